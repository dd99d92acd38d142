"""Moves the data of a session's workers when the platform is about to stop the session.

The platform sends SIGTERM to the session's main process. That passes it on as SIGUSR1 to the process of
``dask worker``, which runs this module by ``--preload-nanny``, or without nannies by ``--preload``.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from typing import Any

from dask_cml.protocol import NOTICE

logger = logging.getLogger("distributed.nanny.dask_cml")

SIGNAL = signal.SIGUSR1
_TIMEOUT = 20.0
_servers: list[Any] = []
_telling: set[asyncio.Task[None]] = set()


async def dask_setup(nanny: Any) -> None:
    """Take notice of the session's end."""
    take_notice(nanny)


def take_notice(server: Any) -> None:
    """Tell the scheduler when the session is about to be stopped.

    Parameters
    ----------
    server : Nanny or Worker
        What runs in this process, with a connection to the scheduler.
    """
    _servers.append(server)
    asyncio.get_running_loop().add_signal_handler(SIGNAL, _notice)


def _notice() -> None:
    task = asyncio.ensure_future(_tell())
    _telling.add(task)
    task.add_done_callback(_telling.discard)


async def _tell() -> None:
    names = [str(server.name) for server in _servers]
    logger.warning("Session about to be stopped: workers %s retire", ", ".join(names))
    try:
        await asyncio.wait_for(getattr(_servers[0].scheduler, NOTICE)(names=names), _TIMEOUT)
    except Exception as error:  # the scheduler may have ended, too
        logger.warning("Scheduler not informed of the session's end: %r", error)
