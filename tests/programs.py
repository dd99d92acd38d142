"""Python programs that make clusters, as scripts of users do."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence

from conftest import PATIENCE


class Program:
    """A Python program that makes clusters; it prints "ready" when it may be disturbed."""

    def __init__(self, code: str, **variables: str) -> None:
        head = "import asyncio, os, signal, sys, threading, time\nfrom dask_cml import CMLCluster\n"
        head += "from distributed import Client\n"
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", head + textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "DASK_CML__PLATFORM": "local", **variables},
        )

    def when_ready(self) -> Program:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line == "ready\n", line + self.process.communicate()[1]
        return self

    def ends(self, patience: float = PATIENCE) -> tuple[int, str, str]:
        """Return its exit status and what it wrote; it is killed if it does not end."""
        try:
            out, err = self.process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            raise AssertionError("the program did not end: " + self.process.communicate()[1]) from None
        # Of an unclosed cluster Dask may say that it has open connections.
        lines = [line for line in err.splitlines(keepends=True) if "WARNING - rpc object" not in line]
        return self.process.returncode, out, "".join(lines)


#: Text that would steer a terminal: its title, its screen, and the direction of its writing.
STEERING = "\x1b]0;title\x07\x1b[2J\u202e\u200f"


def in_a_terminal(command: Sequence[str], **variables: str) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    output = b""
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with subprocess.Popen(command, env={**os.environ, **variables}, **streams) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # the end of a terminal
            while chunk := os.read(ours, 65536):
                output += chunk
        status = process.wait(240)
    os.close(ours)
    return status, output.decode()
