"""The connection that reads plain data only: what a hostile scheduler cannot do with it, and what works."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct

import msgpack
import pytest
from distributed import Scheduler, Worker
from distributed.comm.core import listen
from distributed.protocol.serialize import Serialize, ToPickle
from distributed.security import Security
from wire_samples import framed, raw

from dask_cml.msgpack_comm import HandlerFailed, InvalidMessage, MsgpackComm


@pytest.fixture
def security():
    pytest.importorskip("cryptography")
    return Security.temporary()


def arguments(security):
    return security.get_connection_args("client")


SHAKE = framed({"compression": None, "python": (3, 10, 0), "pickle-protocol": 5})


@contextlib.asynccontextmanager
async def server(*messages):
    """A program at a scheduler's address that sends these bytes, and then stays."""
    writers = []

    async def serve(reader, writer):
        writers.append(writer)
        with contextlib.suppress(OSError):
            for message in messages:
                writer.write(message)
                await writer.drain()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    listener.close()
    for writer in writers:
        writer.transport.abort()
    await listener.wait_closed()


async def answer_of(address):
    comm = await MsgpackComm.connect(address)
    try:
        return await comm.ask("identity")
    finally:
        comm.abort()


# -- pickles


async def test_a_pickle_in_the_handshake_or_in_an_answer_runs_nothing(hostile):
    for pickled in (ToPickle(hostile), Serialize(hostile)):
        for message in (pickled, {"workers": [pickled]}, {"a": {"b": (pickled, 1)}}):
            for messages in ((framed(message),), (SHAKE, framed(message))):
                async with server(*messages, SHAKE) as address:
                    await answer_of(address)
    assert not hostile.ran


async def test_a_pickle_is_read_as_none_and_the_rest_as_it_is(hostile):
    message = {"a": ToPickle(hostile), "b": 1, "c": {2, 3}, "d": [Serialize(hostile), "e"]}
    async with server(SHAKE, framed(message)) as address:
        found = await answer_of(address)
    assert {**found, "c": {*found["c"]}} == {"a": None, "b": 1, "c": {2, 3}, "d": (None, "e")}
    assert not hostile.ran


async def test_the_same_answers_run_code_in_a_comm_of_dask(hostile):
    """The reason for this connection. If it fails, Dask unpickles no answers any more."""
    from distributed.comm.core import connect

    async with server(framed(ToPickle(hostile))) as address:
        with contextlib.suppress(Exception):
            await connect(address, timeout=5)
    assert hostile.ran


async def test_an_enumeration_imports_no_module(tmp_path, monkeypatch):
    (tmp_path / "imported_by_enum.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    mark = {"__Enum__": True, "name": "A", "__module__": "imported_by_enum", "__name__": "X"}
    async with server(SHAKE, raw(msgpack.packb({"status": mark}))) as address:
        assert await answer_of(address) == {"status": "A"}


# -- sizes and time


def header(size):
    return struct.pack("3Q", 16 + size, 1, size)


@pytest.mark.parametrize(
    "message",
    [
        header(2**31),
        header(2**63),
        struct.pack("2Q", 2**40, 2**40),
        struct.pack("2Q", 8, 0),
        raw(b"\x91" * 100_000),
        raw(b"\x81\xa1a" * 100_000),
        raw(b"\xdd" + struct.pack(">I", 2**20) + b"\x80" * 2**20),
        raw(b"\xdd\xff\xff\xff\xff"),
        raw(b"\xa1\xff"),
        raw(b"\x81\x81\xa1a\x01\x02"),
        raw(b"\xc1"),
        raw(b""),
        raw(msgpack.packb(1) * 2),
    ],
    ids=range(13),
)
@pytest.mark.parametrize("shakes", [True, False])
async def test_a_message_that_is_too_large_or_not_plain_raises_an_error(message, shakes):
    async with server(*[SHAKE] * shakes, message) as address:
        with pytest.raises(InvalidMessage):
            await answer_of(address)


async def test_a_silent_program_raises_a_timeout():
    for messages in ((), (SHAKE[:20],)):
        async with server(*messages) as address:
            with pytest.raises(asyncio.TimeoutError):
                await MsgpackComm.connect(address, timeout=0.1)
    for messages in ((SHAKE,), (SHAKE, header(100))):
        async with server(*messages) as address:
            comm = await MsgpackComm.connect(address)
            with pytest.raises(asyncio.TimeoutError):
                await comm.ask("identity", timeout=0.1)
            comm.abort()


async def test_a_closed_connection_raises_an_error():
    async def hang_up(reader, writer):
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as listener:
        with pytest.raises(ConnectionError):
            await MsgpackComm.connect(f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}")


# -- schedulers


@contextlib.asynccontextmanager
async def scheduler(security=None):
    async with Scheduler(
        host="127.0.0.1", port=0, dashboard=False, dashboard_address=":0", security=security
    ) as running:
        yield running


@pytest.mark.parametrize("keys", [False, True], ids=["tcp", "tls"])
async def test_a_scheduler_answers_several_times(keys, security):
    security = security if keys else None
    async with scheduler(security) as running, Worker(running.address, name=7, security=security):
        comm = await MsgpackComm.connect(running.address, arguments(security) if keys else None)
        for _ in range(2):
            identity = await comm.ask("identity")
            assert identity["id"] == running.id
            assert [each["name"] for each in identity["workers"].values()] == [7]
        assert await comm.ask("get_metadata", keys=["a", "b"], default={}) == {}
        comm.abort()


async def test_an_answer_with_more_than_plain_data_is_read(hostile):
    class Colour(enum.Enum):
        RED = 1

    async with scheduler() as running:
        running.handlers["strange"] = lambda: {"own": hostile, "colour": Colour.RED, "b": 1}
        comm = await MsgpackComm.connect(running.address)
        assert await comm.ask("strange") == {"own": None, "colour": "RED", "b": 1}
        comm.abort()
    assert not hostile.ran


async def test_an_error_of_a_handler_is_raised_with_a_part_of_its_message():
    def fail():
        raise ValueError("invalid x=3" + "!" * 10_000)

    async with scheduler() as running:
        running.handlers["fail"] = fail
        comm = await MsgpackComm.connect(running.address)
        with pytest.raises(HandlerFailed, match="invalid x=3") as raised:
            await comm.ask("fail")
        assert len(str(raised.value)) <= 1000
        assert (await comm.ask("identity"))["id"] == running.id
        comm.abort()


async def test_bytes_go_both_ways():
    async def echo(comm):
        while (message := await comm.read()) is not None:
            await comm.write(message)
        await comm.close()

    listener = listen("tcp://127.0.0.1:0", echo)
    await listener
    comm = await MsgpackComm.connect(listener.contact_address)
    for message in (b"", b"x" * 10**6, 7, {"op": "a"}):
        await comm.write(message)
        assert await comm.read() == message
    await comm.write(None)
    with pytest.raises(ConnectionError):
        await comm.read()
    comm.abort()
    listener.stop()


async def test_a_scheduler_with_other_keys_raises_an_error(security):
    async with scheduler(security) as running:
        for others in (arguments(Security.temporary()), {}):
            with pytest.raises((OSError, ValueError)):
                await MsgpackComm.connect(running.address, others)


async def test_required_encryption_is_not_skipped():
    async with scheduler() as running:
        with pytest.raises(OSError, match="requires encryption"):
            await MsgpackComm.connect(running.address, {"require_encryption": True})


async def test_a_refused_connection_raises_the_error_of_the_system():
    """Dask's own error names an object of Dask, and users read it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ConnectionRefusedError):
        await MsgpackComm.connect(address)


@pytest.mark.parametrize(
    "address", ["ucx://127.0.0.1:1", "cml://lab", "127.0.0.1:1", "tcp://", "tcp://a:x", ""]
)
async def test_an_unsupported_address_raises_an_error(address):
    with pytest.raises((OSError, ValueError)):
        await MsgpackComm.connect(address)
