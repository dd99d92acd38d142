"""``dask cml`` in the simulated world, where it is a part of the process that calls it."""

import contextlib
import inspect
import io
import json
from typing import Any

import click

from dask_cml.cli import cml
from dask_cml.cli.console import in_shell


async def shell(*words: object, code: int = 0) -> str:
    """Run ``dask cml`` with these words. Return what it prints to both streams."""
    status, out, err = await _run(*words)
    assert status == code, out + err
    return out + err


async def shell_json(*words: object) -> Any:
    """Run ``dask cml`` with these words and ``--json``. Return what it prints."""
    status, out, err = await _run(*words, "--json")
    assert status == 0, err
    return json.loads(out)


async def _run(*words: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with cml.make_context("dask cml", [str(word) for word in words]) as context:
                # Not the method of its class, which runs coroutines in an event loop of their own.
                result = click.Group.invoke(cml, context)
                if inspect.iscoroutine(result):
                    await result
        except Exception as error:
            shown = error if isinstance(error, click.UsageError) else in_shell(error, context)
            shown.show()
            return shown.exit_code, out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()
