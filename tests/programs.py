"""Python programs that make clusters, as scripts of users do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

#: Seconds within which a program must have ended.
PATIENCE = 120


class Program:
    """A Python program that makes clusters; it prints "ready" when it may be disturbed.

    Parameters
    ----------
    code : str
        Runs as its main module, with what tests need most imported. Indented lines are dedented.
    **variables : str
        More environment variables.
    """

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
