"""Programs in a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
from collections.abc import Sequence

#: Text that would steer a terminal: its title, its screen, and the direction of its writing.
STEERING = "\x1b]0;title\x07\x1b[2J\u202e\u200f"


def in_a_terminal(command: Sequence[str], **variables: str) -> tuple[int, str]:
    """Run a program with its streams in a terminal. Return its exit status, and what it writes."""
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
