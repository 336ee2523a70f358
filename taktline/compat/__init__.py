"""Programs written for torch.distributed.pipelining run on Taktline, unchanged.

Either from outside, with ``python -m taktline.compat train.py`` in place of ``python train.py``, or
from within, with :func:`install` before anything else is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from taktline.compat._finder import PEER, Finder, is_ours, put_first
from taktline.errors import InstallError

__all__ = ["InstallError", "install", "uninstall"]

_SWITCH = "TAKTLINE_COMPAT"
_SITE = str(Path(__file__).with_name("_site"))


def install() -> None:
    """Make each import of torch.distributed.pipelining return Taktline's modules.

    This holds in the processes that this one starts, too: spawned, forked or run by torchrun.

    ::

        import taktline.compat

        taktline.compat.install()  # before anything that imports torch.distributed.pipelining

    """
    loaded = sys.modules.get(PEER)
    if loaded is not None and not is_ours(loaded):
        raise InstallError(
            f"{PEER} has been imported already, and the importing code would keep torch's own; "
            "call taktline.compat.install() before anything that imports it, or run the program "
            "as python -m taktline.compat script.py"
        )
    put_first()
    os.environ[_SWITCH] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([_SITE, *_other_folders()])


def uninstall() -> None:
    """Make imports of torch.distributed.pipelining return torch's own modules again.

    Modules that were imported before stay as they are.

    >>> uninstall()
    """
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
    for name, module in list(sys.modules.items()):
        if (name == PEER or name.startswith(f"{PEER}.")) and is_ours(module):
            del sys.modules[name]
            parent, _, attribute = name.rpartition(".")
            if parent in sys.modules and not is_ours(sys.modules[parent]):
                vars(sys.modules[parent]).pop(attribute, None)
    os.environ.pop(_SWITCH, None)
    folders = _other_folders()
    if folders:
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    else:
        os.environ.pop("PYTHONPATH", None)


def _other_folders() -> list[str]:
    """The folders on PYTHONPATH besides ours; an empty entry is the current folder."""
    path = os.environ.get("PYTHONPATH", "")
    return [folder for folder in path.split(os.pathsep) if folder != _SITE] if path else []
