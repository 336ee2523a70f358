"""Programs written for torch.distributed.pipelining run on Taktline, unchanged.

Either from outside, with ``python -m taktline.compat train.py`` in place of ``python train.py``, or
from within, with :func:`install` before anything else is imported.
"""

from __future__ import annotations

from taktline.compat._install import install, uninstall
from taktline.errors import InstallError

__all__ = ["InstallError", "install", "uninstall"]
