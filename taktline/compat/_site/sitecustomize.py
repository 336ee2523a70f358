"""Python runs this at the start of each process whose parent has installed Taktline."""

import os
import sys
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load(name, folders):
    """Run the first module of that name in the folders, should there be one; returns its names."""
    spec = PathFinder.find_spec(name, folders)
    if spec is None or spec.loader is None:
        return {}
    # By hand: importing importlib.util would take most of the time of this file.
    sys.modules[name] = module = type(sys)(name)
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    spec.loader.exec_module(module)
    return vars(module)


if os.environ.get("TAKTLINE_COMPAT") == "1":
    # From its folder, since the package itself may not be importable yet.
    _load("taktline.compat._finder", [os.path.dirname(_HERE)])["put_first"]()

# Python runs only one sitecustomize: load the next one on the path, under this name.
_load("sitecustomize", [folder for folder in sys.path if os.path.abspath(folder) != _HERE])
