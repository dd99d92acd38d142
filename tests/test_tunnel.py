"""The bytes of a TCP connection in one of Dask's comms."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os

import pytest
from dashboards import Lead, arguments, scheduler, stand_in
from distributed.comm.core import CommClosedError, connect
from distributed.protocol.serialize import ToPickle

from dask_cml import tunnel
from dask_cml.cancellation import cancel
from dask_cml.dashboard.connection import open_comm
from dask_cml.protocol import FORWARD
from dask_cml.scheduler.plugin import NAME
from dask_cml.tunnel import Tunnel


@contextlib.asynccontextmanager
async def carried(serve, security=None):
    """A connection through a tunnel to a stand-in of the dashboard, and the tunnel."""
    async with stand_in(serve) as server, Lead(server.port, security) as lead:
        tunnels = asyncio.Queue()

        async def accept(reader, writer):
            tunnels.put_nowait(made := Tunnel(await lead.open(), reader, writer))
            running = asyncio.create_task(made.run())
            try:
                with contextlib.suppress(OSError):
                    await running
            finally:
                await cancel(running)
                writer.transport.abort()

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as listener:
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
            yield reader, writer, await tunnels.get()
            writer.transport.abort()


async def test_bytes_arrive_as_they_were_sent_in_both_directions_at_once(security):
    async def echo(reader, writer):
        while data := await reader.read(100_000):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
        await asyncio.Event().wait()

    blocks = [os.urandom(1_000_000) for _ in range(20)]
    async with carried(echo, security) as (reader, writer, _):

        async def send():
            for block in blocks:
                writer.write(block)
                await writer.drain()
            writer.write_eof()

        _, received = await asyncio.gather(send(), reader.read())
    assert hashlib.sha256(received).digest() == hashlib.sha256(b"".join(blocks)).digest()


async def test_answer_to_a_request_that_has_ended_still_comes():
    async def count(reader, writer):
        data = await reader.read()
        writer.write(str(len(data)).encode())
        writer.write_eof()
        await reader.read()

    async with carried(count) as (reader, writer, _):
        writer.write(b"x" * 1_000_000)
        writer.write_eof()
        assert await reader.read() == b"1000000"


async def test_request_goes_on_when_the_answer_has_ended():
    received = asyncio.get_running_loop().create_future()

    async def answer_first(reader, writer):
        writer.write(b"answer")
        writer.write_eof()
        received.set_result(await reader.read())

    async with carried(answer_first) as (reader, writer, _):
        assert await reader.read() == b"answer"
        writer.write(b"x" * 1_000_000)
        writer.write_eof()
        assert await received == b"x" * 1_000_000


async def test_unread_bytes_are_bounded_and_do_not_stop_the_other_direction(holds):
    sent = received = 0

    async def flood(reader, writer):
        nonlocal received

        async def send():
            nonlocal sent
            while True:
                writer.write(b"x" * 100_000)
                await writer.drain()
                sent += 100_000

        sending = asyncio.create_task(send())
        try:
            while data := await reader.read(100_000):
                received += len(data)
        finally:
            sending.cancel()

    async with carried(flood) as (reader, writer, tunneled):
        bound = tunnel._WINDOW + tunnel.CHUNK
        await holds(lambda: tunneled._waiting > bound // 2)
        for _ in range(50):
            writer.write(b"y" * 100_000)
            await writer.drain()
        await holds(lambda: received == 5_000_000)
        assert tunneled._waiting <= bound
        # Beside that there is only what the system has in its sockets' buffers.
        assert sent < 50_000_000
        assert len(await reader.readexactly(60_000_000)) == 60_000_000
        assert sent >= 60_000_000


async def test_a_side_that_sends_more_than_allowed_is_cut_off(monkeypatch):
    async with scheduler() as running, stand_in() as server:
        monkeypatch.setattr(running.plugins[NAME]._forwards, "_port", lambda: server.port)
        comm = await connect(running.address)
        await comm.write({"op": FORWARD})
        assert await comm.read() == {"status": "OK"}

        async def flood():
            while True:
                await comm.write(b"x" * 2**16)
                await asyncio.sleep(0)

        async def read():
            while True:
                await comm.read()

        with pytest.raises(CommClosedError):
            await asyncio.wait_for(asyncio.gather(flood(), read()), 120)
        assert not running.plugins[NAME]._forwards.comms


@pytest.mark.parametrize(
    "messages", [["text"], [{"op": "x"}], [-1], [2**40], [True, True, True], [b"", b"more"], [b"", b""]]
)
async def test_messages_that_are_neither_bytes_nor_confirm_any_break_the_tunnel(messages):
    class Comm:
        """A comm that receives these messages, and then none."""

        async def read(self):
            if messages:
                return messages.pop(0)
            await asyncio.Event().wait()

        async def write(self, message):
            pass

        async def close(self):
            pass

        def abort(self):
            pass

    async with stand_in() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with pytest.raises(OSError, match="invalid message"):
            await Tunnel(Comm(), reader, writer).run()
        writer.transport.abort()


async def test_a_pickle_in_a_tunnel_runs_nothing(hostile):
    """A scheduler's session may be in other hands."""
    async with scheduler() as running:

        async def forward(comm, **more):
            await comm.write({"status": "OK", "more": ToPickle(hostile)})
            await comm.write(ToPickle(hostile))

        running.handlers[FORWARD] = forward
        comm = await open_comm(running.address, arguments(None))
        assert await comm.read() is None
        comm.abort()
    assert not hostile.ran
