"""Represent the result of a check, and format commands that fix problems."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import dataclass
from typing import Literal

import click

from dask_cml.printable import printable

State = Literal["ok", "warning", "wrong"]

_COLORS = {"ok": "green", "warning": "yellow", "wrong": "red"}


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
        The name of the check, or of the cluster.
    """

    state: State
    words: str
    command: str | None = None
    name: str = ""

    def render(self) -> str:
        """Format the finding for a terminal, with the command on a separate line."""
        begin = f"{click.style(self.state, fg=_COLORS[self.state])}{' ' * (9 - len(self.state))}"
        command = f"\n{'':<28}{self.command}" if self.command else ""
        return f"{begin}{printable(self.name):<16} {printable(self.words)}" + command


def pip_command(action: str, *arguments: str) -> str:
    """Return a shell command that runs this Python's pip."""
    user = ["--user"] if action == "install" and sys.prefix == sys.base_prefix else []
    return shlex.join([sys.executable, "-m", "pip", action, *user, *arguments])


def dask_command() -> str:
    """Return the shell command ``dask``, or its long form if ``dask`` is not on the PATH."""
    return "dask" if shutil.which("dask") else shlex.join([sys.executable, "-m", "dask"])
