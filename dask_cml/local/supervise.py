"""The program that runs one session. Its launcher starts this file by its path."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import ModuleType


def import_platform() -> ModuleType:
    """Import the platform without ``dask_cml/__init__.py``, which imports Dask."""
    package = types.ModuleType("dask_cml")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["dask_cml"] = package
    sys.path.pop(0)  # the folder of this file, where other packages would find modules of common names
    from dask_cml.local import platform

    return platform


if __name__ == "__main__":
    import_platform().current().supervisor(Path(sys.argv[1])).run()
