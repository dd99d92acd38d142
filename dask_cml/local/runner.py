"""Runs a session's code. The supervisor starts this file by its path, in the session's own process."""

from __future__ import annotations

import json
import os
import sys


def run_python(code: str) -> None:
    """Run code as ``python -c`` does."""
    main = sys.modules["__main__"].__dict__
    for name in [name for name in main if name not in ("__builtins__", "__name__")]:
        del main[name]
    exec(compile(code, "<session>", "exec"), main)


def run_ipython(code: str, directory: str) -> bool:
    """Run code in IPython, with this directory for its files. Return whether the code raised no error.

    The exit status of a ``!command`` is lost, as on CML.
    """
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    class Shell(InteractiveShell):
        # Commands write to the session's output directly, and stay in its process group.
        system = InteractiveShell.system_raw

    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = Shell.instance(config=config, ipython_dir=directory)
    return bool(shell.run_cell(code).success)


def main(path: str) -> int:
    """Run the code of the plan in a file, and return the exit status."""
    with open(path) as file:
        code = json.load(file)["code"]
    sys.argv, sys.path[0] = [""], ""
    if code.lstrip().startswith("!"):
        return 0 if run_ipython(code, os.path.join(os.path.dirname(path), "ipython")) else 1
    run_python(code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
