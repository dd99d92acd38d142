"""Represent the result of a check, and format commands that fix problems."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from dask_cml.printable import printable

State = Literal["ok", "warning", "wrong"]

_COLORS = {"ok": "green", "warning": "yellow", "wrong": "red"}
_LEAST_ROOM = 20


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Parameters
    ----------
    state : {"ok", "warning", "wrong"}
        With ``"wrong"``, clusters cannot run. With ``"warning"``, clusters run, but a feature does not work.
    words : str
        The result, in sentences.
    command : str, optional
        A shell command that fixes the problem.
    name : str
        The name of the check, or what it found something about.
    """

    state: State
    words: str
    command: str | None = None
    name: str = ""

    def render(self, width: int | None = None) -> str:
        """Format the finding for a terminal, with the command on a separate line.

        Parameters
        ----------
        width : int, optional
            The number of columns of the terminal. Default: unlimited.
        """
        begin = f"{self.state:<8} {printable(self.name):<16} "
        room = max(_LEAST_ROOM, width - len(begin)) if width else sys.maxsize
        lines = textwrap.wrap(self.words, room, break_long_words=False, break_on_hyphens=False)
        if self.command:
            lines.append(f"  {self.command}")
        text = ("\n" + " " * len(begin)).join(map(printable, lines))
        return click.style(self.state, fg=_COLORS[self.state]) + begin[len(self.state) :] + text


def pip_command(action: str, *arguments: str) -> str:
    """Return a shell command that runs this Python's pip."""
    pip = shutil.which("pip")
    ours = pip is not None and Path(pip).parent == Path(sys.executable).parent
    program = ["pip"] if ours else [sys.executable, "-m", "pip"]
    user = ["--user"] if action == "install" and sys.prefix == sys.base_prefix else []
    return shlex.join([*program, action, *user, *arguments])


def dask_command() -> str:
    """Return the shell command ``dask``, or its long form if ``dask`` is not on the PATH."""
    return "dask" if shutil.which("dask") else shlex.join([sys.executable, "-m", "dask"])
