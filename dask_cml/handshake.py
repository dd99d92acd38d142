"""A time limit for Dask's handshake on each new connection.

Dask limits the time until a connection is open, with TLS. After that, it waits for the peer's handshake
without a limit: connect (comm/core.py:369). If a service mesh accepts the connection, it never comes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed.comm.core import Comm, Connector
from distributed.comm.registry import get_backend

from dask_cml.cancellation import within


class LimitedConnector(Connector):
    """Connects by another connector, and limits Dask's handshake by ``distributed.comm.timeouts.connect``.

    Parameters
    ----------
    connector : Connector
        The other connector.
    why : str, optional
        Why the peer may not answer, as a clause for the error.
    """

    def __init__(self, connector: Connector, why: str | None = None) -> None:
        self._connector, self._why = connector, why

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Comm:
        """Connect by the other connector. The first message that is read is the handshake.

        Raises
        ------
        OSError
            If the other connector does not connect.
        """
        comm = await self._connector.connect(address, deserialize=deserialize, **connection_args)
        limit = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
        read = comm.read

        async def read_handshake(*arguments: Any, **more: Any) -> Any:
            vars(comm).pop("read", None)  # a second such connector may have removed it
            try:
                return await within(limit, read(*arguments, **more))
            except asyncio.TimeoutError:
                comm.abort()
                silent = f"{comm.peer_address} accepts connections, but did not answer within {limit:g} s"
                raise OSError("; ".join(filter(None, (silent, self._why)))) from None

        comm.read = read_handshake
        return comm


def limit_handshakes() -> None:
    """Limit the handshake on each connection that this process opens from now on."""
    for scheme in ("tcp", "tls"):
        backend = get_backend(scheme)
        unlimited = backend.get_connector
        if not isinstance(unlimited(), LimitedConnector):  # several Dask workers share a process

            def get_connector(unlimited: Any = unlimited) -> Connector:
                return LimitedConnector(unlimited())

            backend.get_connector = get_connector  # type: ignore[method-assign]
