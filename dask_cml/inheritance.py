"""What the process of a scheduler or a worker takes over from the program that created the cluster."""

from __future__ import annotations

import os
import sys

from dask_cml.layout import PROGRAM_FOLDER


def program_folder() -> str | None:
    """Return the folder in which this process's program finds its modules.

    That is the folder of a script. Notebooks, consoles and ``python -m`` look in the current folder. Return
    None for programs that pip has installed.
    """
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None or getattr(main, "__spec__", None) is not None:
        try:
            return os.getcwd()
        except FileNotFoundError:  # it has been removed
            return None
    return os.path.dirname(os.path.abspath(file)) if file.endswith(".py") else None


def find_modules() -> None:
    """Let this process find modules in the program's folder, and there first, as the program does.

    Call this late: a module there may have the name of one that Dask imports.
    """
    folder = os.environ.get(PROGRAM_FOLDER)
    if folder and sys.path[0] != folder:
        sys.path.insert(0, folder)
