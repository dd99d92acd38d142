"""The bytes of a connection to the dashboard, on the way through a scheduler's comm port."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os

import pytest
from dashboards import Lead, arguments, scheduler, stand_in
from distributed.protocol.serialize import ToPickle
from tornado.iostream import StreamClosedError

from dask_cml.dashboard.proxy import open_comm
from dask_cml.protocol import FORWARD


@contextlib.asynccontextmanager
async def carried(serve, security=None):
    """A connection to a stand-in of the dashboard, and what leads to it."""
    async with (
        stand_in(serve) as server,
        Lead(server.port, security) as lead,
    ):
        comm = await lead.open()
        yield comm.stream, lead
        comm.abort()


async def test_bytes_arrive_as_they_were_sent_in_both_directions_at_once(security):
    async def echo(reader, writer):
        while data := await reader.read(100_000):
            writer.write(data)
            await writer.drain()

    blocks = [os.urandom(1_000_000) for _ in range(20)]
    async with carried(echo, security) as (stream, _):

        async def send():
            for block in blocks:
                await stream.write(block)

        async def receive():
            return [await stream.read_bytes(1_000_000) for _ in blocks]

        _, received = await asyncio.gather(send(), receive())
    assert hashlib.sha256(b"".join(received)).digest() == hashlib.sha256(b"".join(blocks)).digest()


async def test_all_bytes_arrive_before_the_end(security, holds):
    async def answer(reader, writer):
        writer.write(b"x" * 3_000_000)
        await writer.drain()

    async with carried(answer, security) as (stream, lead):
        assert await stream.read_bytes(3_000_000) == b"x" * 3_000_000
        with pytest.raises(StreamClosedError):
            await stream.read_bytes(1)
        await holds(lambda: lead.comms == 0)


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

    async with carried(flood) as (stream, _):
        await holds(lambda: sent > 0)
        for _ in range(50):
            await stream.write(b"y" * 100_000)
        await holds(lambda: received == 5_000_000)
        # Only what the system has in its sockets' buffers.
        assert sent < 50_000_000
        for _ in range(60):
            await stream.read_bytes(1_000_000)
        assert sent >= 60_000_000


async def test_a_pickle_in_a_tunnel_runs_nothing(hostile):
    """A scheduler's session may be in other hands."""
    async with scheduler() as running:

        async def forward(comm, **more):
            await comm.write({"status": "OK", "more": ToPickle(hostile)})
            await comm.write(ToPickle(hostile))

        running.handlers[FORWARD] = forward
        comm = await open_comm(running.address, arguments(None))
        assert await comm.stream.read_bytes(16)
        comm.abort()
    assert not hostile.ran
