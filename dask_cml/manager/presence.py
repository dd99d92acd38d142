"""A manager's side of the plugin in the scheduler: registers it, and says that the manager is there."""

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
#: A manager whose network is silent rather than closed is gone after so long.
_MANAGER_SILENCE = 15.0
_CLOSE_TIMEOUT = 2.0


class Presence:
    """A manager's side: has the plugin registered, and says that the manager is there until it is closed.

    Parameters
    ----------
    address : str
        The scheduler's.
    connection_args : mapping, optional
        As ``Security.get_connection_args("client")`` returns them.
    orphan_timeout : float or None, optional
        Seconds without a manager and without a client after which the scheduler closes; None means never.
        Not given: it stays what another manager said, and is never if this is the first one.
    info : mapping, optional
        What the scheduler is to know of this manager, beside its host and process id.
    interval : float
        Seconds between two heartbeats.

    Attributes
    ----------
    id : str
        Tells this manager from others.

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
        # A connection of its own: nothing else is in front of a heartbeat, and its end is the manager's.
        self._scheduler = rpc(address, connection_args=dict(connection_args or {}))
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Register the plugin, and begin to send heartbeats.

        Raises
        ------
        OSError
            If the scheduler cannot be reached.
        CMLError
            If it does not take the plugin.
        """
        change = {} if self._orphan_timeout is self.KEEP else {"orphan_timeout": self._orphan_timeout}
        await self._beat(register=True, **change)
        if self._beating is None:
            self._beating = asyncio.create_task(self._keep_beating())

    async def close(self, **change: float | None) -> None:
        """Close the connection, by which the scheduler knows that this manager is gone.

        Parameters
        ----------
        **change
            ``orphan_timeout``, if it is to be changed and the scheduler is there to hear it.
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
                    logger.debug("The scheduler does not hear that this manager is there: %r", error)
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
                f"the scheduler at {self._scheduler.address} refuses the plugin: {error}"
            ) from error
