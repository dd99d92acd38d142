"""``dask cml``, as a user has it in a shell: in this process, which is quick, or in one of its own."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from click.testing import CliRunner

from dask_cml import cli


def run(*words: object, code: int = 0) -> str:
    """Run a command in this process, which is in no event loop. Return what it prints to both streams."""
    result = CliRunner().invoke(cli.cml, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


def run_json(*words: object) -> Any:
    """Run a command with ``--json`` in this process. Return what it prints."""
    result = CliRunner().invoke(cli.cml, [*(str(word) for word in words), "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "dask", "cml", *(str(word) for word in words)]


def shell(*words: object, code: int = 0) -> tuple[str, str]:
    """Run a command in a process of its own. Return what it writes to stdout and stderr."""
    result = subprocess.run(command(*words), capture_output=True, text=True, timeout=240)
    assert result.returncode == code, result.stderr
    return result.stdout, result.stderr


@contextlib.contextmanager
def started(*words: object) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a process of its own, and kill it at the end of the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command(*words), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
