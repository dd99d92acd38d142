"""One question to a scheduler, with a time limit that covers the connection and Dask's handshake, too.

Dask's own handshake has none: behind a mesh of the platform, every connection succeeds, and nothing answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from distributed.comm.core import Comm, connect
from distributed.core import send_recv

from dask_cml.cancellation import within
from dask_cml.errors import CMLError

#: Errors of a scheduler that does not answer.
NO_ANSWER = (OSError, asyncio.TimeoutError)
#: Asks one cluster's scheduler: a handler, a time limit if it is another one than usually, and its arguments.
Ask = Callable[..., Awaitable[Any]]


async def ask(
    address: str, connection_args: Mapping[str, Any], op: str, timeout: float, /, **arguments: Any
) -> Any:
    """Call a handler of a scheduler over a connection of its own, and return its answer.

    Parameters
    ----------
    address : str
        The scheduler's address.
    connection_args : mapping
        The result of ``Security.get_connection_args("client")``.
    op : str
        The handler's name.
    timeout : float
        Time limit for the connection, Dask's handshake and the answer together, in seconds.
    **arguments
        The handler's arguments.

    Raises
    ------
    OSError, asyncio.TimeoutError
        If the scheduler does not answer.
    CMLError
        If the handler raises an exception.
    """

    async def answer() -> Any:
        comm = await connect(address, timeout=timeout, **connection_args)
        try:
            return await call(comm, op, **arguments)
        finally:
            comm.abort()

    return await within(timeout, answer())


async def call(comm: Comm, op: str, **arguments: Any) -> Any:
    """Call a handler of a scheduler, and return its answer.

    Raises
    ------
    OSError
        If the connection breaks.
    CMLError
        If the handler refuses the arguments, or raises an exception.
    """
    try:
        answer = await send_recv(comm, op=op, **arguments)
    except (OSError, asyncio.TimeoutError):
        raise
    except Exception as error:  # of the handler
        raise CMLError(f"the scheduler failed at {op}: {error!r}") from error
    if isinstance(answer, dict) and "refused" in answer:  # an exception would be a pickle, and be logged
        raise CMLError(str(answer["refused"]))
    return answer
