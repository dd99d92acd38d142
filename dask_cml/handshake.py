"""A time limit for Dask's handshake on each new connection, see :func:`dask_cml.compat.limit_handshake`."""

from __future__ import annotations

from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed.comm.core import Comm, Connector

from dask_cml import compat


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
        """Connect by the other connector.

        Raises
        ------
        OSError
            If the other connector does not connect.
        """
        comm = await self._connector.connect(address, deserialize=deserialize, **connection_args)
        limit = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
        compat.limit_handshake(comm, limit, self._why)
        return comm
