"""Runs a test in a simulated world."""

import asyncio
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .world import World, world

#: Seconds by the clock of the world.
_PATIENCE = 300.0


def simulated(test: Callable[..., Any]) -> Callable[..., None]:
    """Make a test of a coroutine function: the code of a notebook in the world ``it``, its argument.

    The test fails if it leaves the session of a cluster live.
    """

    def run_test(tmp_path: Path, **arguments: Any) -> None:
        state = tmp_path / "state"
        state.mkdir(mode=0o700)

        async def play(it: World) -> None:
            await it.process("notebook", {"CDSW_ENGINE_ID": "notebook12345678"}).start(
                test(it=it, **arguments)
            )
            left = [
                session for session in it.platform.live_sessions if session.key and not session.stop_requested
            ]
            assert not left, "the test left sessions live"

        with world(state) as run:
            run(play)

    wanted = [
        parameter for parameter in inspect.signature(test).parameters.values() if parameter.name != "it"
    ]
    directory = inspect.Parameter("tmp_path", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run_test.__signature__ = inspect.Signature([directory, *wanted])  # type: ignore[attr-defined]
    run_test.__name__, run_test.__doc__ = test.__name__, test.__doc__
    run_test.__module__ = test.__module__
    return run_test


async def eventually(condition: Callable[[], Any], seconds: float = _PATIENCE) -> None:
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < seconds, "it did not come true"
        await asyncio.sleep(0.01 if waited < 10.0 else 0.2)  # each look takes real time
