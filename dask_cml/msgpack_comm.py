"""A connection to a scheduler that reads plain data only, so that no answer can run code in this process.

Dask's own comms unpickle what the other side sends, from the handshake on. So a program that answers at a
scheduler's address runs code in every process that connects. This one connects like Dask's TCP comm, and
reads messages in its format, but only their part in msgpack. It drops the other parts, which contain pickles.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import struct
import sys
from collections.abc import Mapping
from typing import Any

import msgpack
from distributed.comm.addressing import parse_address
from distributed.comm.core import CommClosedError
from distributed.comm.tcp import TCP, TCPConnector, TLSConnector
from tornado.iostream import IOStream, StreamClosedError

#: Bytes, parts and mappings of the largest message: the identity of a scheduler with 10,000 workers.
_MOST_BYTES, _MOST_PARTS, _MOST_MAPPINGS = 2**24, 2**12, 2**18
#: Characters of an error in a scheduler that this process repeats.
_MOST_CHARACTERS = 1000
#: Dask's connectors send and receive nothing yet.
_CONNECTORS = {"tcp": TCPConnector, "tls": TLSConnector}


class InvalidMessage(OSError):
    """The other side sent something that is not plain data, or too much of it."""


class HandlerFailed(RuntimeError):
    """The scheduler's handler raised an exception. The message is its representation."""


class MsgpackComm:
    """A connection to a scheduler, as one of Dask's comms, for messages of plain data.

    Plain data are None, booleans, numbers, strings, bytes, and tuples and dicts of these. A received set is a
    tuple, and an enumeration's member is its name. None replaces what was pickled or serialized.

    The end of a ``with`` block closes it.

    Examples
    --------
    >>> async def workers(address):
    ...     with await MsgpackComm.connect(address) as comm:
    ...         return (await comm.ask("identity"))["workers"]
    """

    def __init__(self, comm: TCP) -> None:
        self._comm = comm
        assert comm.stream is not None
        #: The connection itself, for bytes that are no messages.
        self.stream: IOStream = comm.stream

    def __enter__(self) -> MsgpackComm:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    @classmethod
    async def connect(
        cls, address: str, connection_args: Mapping[str, Any] | None = None, timeout: float = 10.0
    ) -> MsgpackComm:
        """Connect to a scheduler.

        Parameters
        ----------
        address : str
            The scheduler's address, ``tcp://…`` or ``tls://…``.
        connection_args : mapping, optional
            The result of ``Security.get_connection_args("client")``. ``tls://`` requires it.
        timeout : float
            Time limit in seconds. Default 10.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not accept the connection.
        ValueError
            If the address is invalid.
        """
        return await asyncio.wait_for(cls._connect(address, connection_args or {}), timeout)

    @classmethod
    async def _connect(cls, address: str, connection_args: Mapping[str, Any]) -> MsgpackComm:
        scheme, location = parse_address(address)
        if scheme not in _CONNECTORS or (scheme == "tls" and not connection_args.get("ssl_context")):
            raise ValueError(f"invalid address {address!r}: expected tcp://, or tls:// and keys")
        if scheme == "tcp" and connection_args.get("require_encryption"):
            raise OSError(f"{address} is not encrypted, but Dask's configuration requires encryption")
        try:
            comm = cls(await _CONNECTORS[scheme]().connect(location, **connection_args))
        except CommClosedError as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            raise
        try:
            python = tuple(sys.version_info)[:3]
            # Dask's listeners expect these keys. The other side pickles nothing that this side reads.
            await comm.write(
                {"compression": None, "python": python, "pickle-protocol": pickle.HIGHEST_PROTOCOL}
            )
            await comm.read()
        except BaseException:
            comm.abort()
            raise
        return comm

    async def ask(self, op: str, timeout: float = 10.0, **arguments: Any) -> Any:
        """Call a handler of the scheduler, and return its answer.

        Parameters
        ----------
        op : str
            The handler's name, such as ``identity``.
        timeout : float
            Time limit in seconds. Default 10. After a time-out, call only :meth:`abort`.
        **arguments
            The handler's arguments, plain data.

        Raises
        ------
        OSError, asyncio.TimeoutError
            If the scheduler does not answer.
        HandlerFailed
            If the handler raises an exception.
        """

        async def answer() -> Any:
            await self.write({"op": op, **arguments, "reply": True})
            return await self.read()

        answered = await asyncio.wait_for(answer(), timeout)
        if isinstance(answered, dict) and answered.get("status") == "uncaught-error":
            raise HandlerFailed(str(answered.get("exception_text"))[:_MOST_CHARACTERS])
        return answered

    async def write(self, message: Any) -> None:
        """Send a message of plain data, and wait until it is on its way."""
        content = msgpack.packb(message)
        head = struct.pack("3Q", 16 + len(content), 1, len(content))
        await self.stream.write(head + content)

    async def read(self) -> Any:
        """Receive a message.

        Raises
        ------
        OSError
            If the connection ends, or the message is not plain data or too large.
        """
        try:
            # The first number is the size of the parts that Dask reads at once.
            _, n = struct.unpack("2Q", await self.stream.read_bytes(16))
            if not 0 < n <= _MOST_PARTS:
                raise InvalidMessage(f"a message has {n} parts: expected 1 to {_MOST_PARTS}")
            sizes = struct.unpack(f"{n}Q", await self.stream.read_bytes(8 * n))
            if sum(sizes) > _MOST_BYTES:
                raise InvalidMessage(f"a message has {sum(sizes)} bytes: expected at most {_MOST_BYTES}")
            content = await self.stream.read_bytes(sum(sizes))
        except StreamClosedError as error:
            raise ConnectionResetError("the other side closed the connection") from error
        return _unpack(content[: sizes[0]])

    def abort(self) -> None:
        """Close the connection at once."""
        self._comm.abort()


def _unpack(content: bytes) -> Any:
    mappings = itertools.count(1)

    def plain(value: dict[Any, Any]) -> Any:
        if next(mappings) > _MOST_MAPPINGS:
            raise InvalidMessage(f"a message has more than {_MOST_MAPPINGS} mappings")
        # Dask's marks. Its own reader imports the module of an enumeration.
        if "__Pickled__" in value or "__Serialized__" in value:
            return None
        if "__Set__" in value:
            return value.get("as-list")
        return value.get("name") if "__Enum__" in value else value

    try:
        return msgpack.unpackb(content, use_list=False, strict_map_key=False, object_hook=plain)
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise InvalidMessage(f"a message is not plain data: {type(error).__name__}: {error}") from None
