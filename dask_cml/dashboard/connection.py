"""Connections to a scheduler's dashboard, through the scheduler's own comm port.

The dashboard listens on the loopback of the scheduler's session, which only the platform's https entry
reaches. The scheduler's plugin also serves it on a comm.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dask_cml.msgpack_comm import MsgpackComm
from dask_cml.protocol import FORWARD

#: Opens a comm on which a scheduler serves its dashboard. Raises OSError.
OpenComm = Callable[[], Awaitable[MsgpackComm]]
#: Characters of a scheduler's error.
_MOST_CHARACTERS = 1000


async def open_comm(
    address: str, connection_args: Mapping[str, Any] | None = None, timeout: float = 30.0
) -> MsgpackComm:
    """Open a comm on which a scheduler serves its dashboard.

    Parameters
    ----------
    address : str
        The scheduler's address.
    connection_args : mapping, optional
        The result of ``Security.get_connection_args("client")``.
    timeout : float
        Time limit for the connection, and for the scheduler's answer, in seconds. Default 30.

    Raises
    ------
    OSError
        If the scheduler does not accept the connection, or has no dashboard.
    """
    with contextlib.ExitStack() as stack:
        try:
            comm = await MsgpackComm.connect(address, connection_args, timeout)
            stack.callback(comm.abort)
            answer = await comm.ask(FORWARD, timeout)
            if not isinstance(answer, dict):
                raise OSError("the scheduler has no plugin that forwards its dashboard")
            if answer.get("status") != "OK":
                raise OSError(f"{answer.get('message')}"[:_MOST_CHARACTERS])
        except (OSError, ValueError, RuntimeError, asyncio.TimeoutError) as error:
            why = str(error) or f"no answer within {timeout:g} s"
            raise OSError(f"cannot reach the dashboard of the scheduler at {address}: {why}") from error
        stack.pop_all()
    return comm
