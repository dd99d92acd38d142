"""A manager's side of the scheduler plugin: registers it, and sends heartbeats."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from distributed.core import rpc
from distributed.protocol.pickle import dumps
from distributed.utils import wait_for

from dask_cml.aio import cancel
from dask_cml.errors import CMLError
from dask_cml.scheduler.plugin import NAME, CMLSchedulerPlugin

logger = logging.getLogger(__name__)

_BEAT_INTERVAL = 2.0
#: Seconds after which a manager with a silent network counts as disconnected.
_MANAGER_SILENCE = 15.0
_CLOSE_TIMEOUT = 2.0


class Presence:
    """Registers the scheduler plugin, and sends heartbeats until it is closed.

    Parameters
    ----------
    address : str
        The scheduler's address.
    connection_args : mapping, optional
        The result of ``Security.get_connection_args("client")``.
    orphan_timeout : float or None, optional
        Time without a manager and a client after which the scheduler closes, in seconds. None: never.
        Default: the value of other managers, or never if there are none.
    info : mapping, optional
        Information on this manager for the scheduler, in addition to its host and process id.
    interval : float
        Time between two heartbeats, in seconds.

    Attributes
    ----------
    id : str
        The id of this manager.

    Examples
    --------
    >>> async def come_and_go():
    ...     presence = Presence(cluster.scheduler_address, orphan_timeout=300)
    ...     await presence.start()
    ...     await presence.close()
    >>> asyncio.run(come_and_go())
    """

    KEEP: Any = object()

    def __init__(
        self,
        address: str,
        connection_args: Mapping[str, Any] | None = None,
        *,
        orphan_timeout: float | None = KEEP,
        info: Mapping[str, Any] | None = None,
        interval: float = _BEAT_INTERVAL,
    ) -> None:
        self.id = secrets.token_hex(8)
        self.info = {"host": socket.gethostname(), "pid": os.getpid(), **(info or {})}
        self._orphan_timeout = orphan_timeout
        self._interval = interval
        self._silence = max(_MANAGER_SILENCE, 4 * interval)
        # A connection of its own: no other message delays a heartbeat, and its end marks the manager's end.
        self._scheduler = rpc(address, connection_args=dict(connection_args or {}))
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register the plugin, and start to send heartbeats.

        Raises
        ------
        OSError
            If the scheduler cannot be reached.
        CMLError
            If the scheduler refuses the plugin.
        """
        change = {} if self._orphan_timeout is self.KEEP else {"orphan_timeout": self._orphan_timeout}
        await self._beat(register=True, **change)
        if self._beating is None:
            self._beating = asyncio.create_task(self._keep_beating())

    async def close(self, **change: float | None) -> None:
        """Close the connection, by which the scheduler notices that this manager has left.

        Parameters
        ----------
        **change
            ``orphan_timeout``, to change it first, if the scheduler answers.
        """
        beating, self._beating = self._beating, None
        await cancel(beating)
        if beating is not None and change:
            with contextlib.suppress(OSError, asyncio.TimeoutError, CMLError):
                await wait_for(self._beat(register=False, **change), _CLOSE_TIMEOUT)
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await wait_for(self._scheduler.close_rpc(), _CLOSE_TIMEOUT)

    async def _keep_beating(self) -> None:
        heard = True
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self._beat()
                heard = True
            except (OSError, asyncio.TimeoutError, CMLError) as error:
                if heard:
                    logger.debug("Heartbeat to the scheduler failed: %r", error)
                heard = False

    async def _beat(self, register: bool = False, **change: float | None) -> None:
        async def beat() -> dict[str, Any]:
            message = {"manager": self.id, "info": self.info, "silence": self._silence, **change}
            if register or not (answer := await self._scheduler.cml_manager_heartbeat(**message)):
                timeout = None if self._orphan_timeout is self.KEEP else self._orphan_timeout
                plugin = dumps(CMLSchedulerPlugin(timeout))
                await self._scheduler.register_scheduler_plugin(plugin=plugin, name=NAME, idempotent=True)
                answer = await self._scheduler.cml_manager_heartbeat(**message)
            return answer

        try:
            answer = await wait_for(beat(), self._silence)
            self._orphan_timeout = answer["orphan_timeout"]
        except (OSError, asyncio.TimeoutError):
            raise
        except Exception as error:
            raise CMLError(
                f"the scheduler at {self._scheduler.address} refused dask-cml's plugin: {error}"
            ) from error
