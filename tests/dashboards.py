"""Dashboards of real schedulers and stand-ins of them, and a browser's view of a pane."""

import asyncio
import contextlib
import functools
import json
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

from conftest import PATIENCE
from distributed import Scheduler
from schedulers import prepare
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.tcpclient import TCPClient
from tornado.websocket import websocket_connect

from dask_cml.dashboard.proxy import DashboardForwarder, open_comm
from dask_cml.scheduler.dashboard_guard import ForeignSockets
from dask_cml.scheduler.plugin import NAME, CMLSchedulerPlugin


def arguments(security):
    return security.get_connection_args("client") if security else {}


@contextlib.asynccontextmanager
async def scheduler(port=0, security=None, dashboard="127.0.0.1:0", plugin=True):
    running = Scheduler(
        host="127.0.0.1", port=port, dashboard=True, dashboard_address=dashboard, security=security
    )
    # A thread of the plugin may be writing into the folder while it is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as state:
        async with running:
            if plugin:
                own = CMLSchedulerPlugin(prepare(Path(state) / "mine"), 0, ForeignSockets())
                await running.register_scheduler_plugin(own, name=NAME, idempotent=True)
            yield running


@contextlib.asynccontextmanager
async def forwarder(open_comm, **options):
    made = DashboardForwarder(open_comm, **options)
    try:
        yield made
    finally:
        await made.close()


def forwarder_to(address, security=None, timeout=PATIENCE, **options):
    return forwarder(functools.partial(open_comm, address, arguments(security), timeout=timeout), **options)


@contextlib.asynccontextmanager
async def forwarded(security=None, **options):
    async with (
        scheduler(security=security, **options) as running,
        forwarder_to(running.address, security) as forwarder,
    ):
        yield running, forwarder


async def get(port, path="/status", **headers):
    client = AsyncHTTPClient(force_instance=True, max_clients=200)
    url = f"http://127.0.0.1:{port}{path}"
    try:
        return await client.fetch(url, headers=headers, follow_redirects=False, raise_error=False)
    finally:
        client.close()


def to_socket(url, **headers):
    """Return a request of a WebSocket, which knows no defaults but Tornado's 20 seconds."""
    return HTTPRequest(url, headers=headers, connect_timeout=PATIENCE, request_timeout=PATIENCE)


class Pane:
    """A document of the dashboard as a browser has it: a page, and its WebSocket."""

    def __init__(self, port, path="/individual-task-stream"):
        self.address, self.path = f"127.0.0.1:{port}", path

    async def __aenter__(self):
        page = await get(self.address.split(":")[1], self.path)
        token = re.search(r'"token":"([^"]+)"', page.body.decode()).group(1)
        self.socket = await websocket_connect(
            to_socket(f"ws://{self.address}{self.path}/ws"), subprotocols=["bokeh", token]
        )
        assert (await self.receive())[0]["msgtype"] == "ACK"
        return self

    async def __aexit__(self, *args):
        self.socket.close()

    async def receive(self):
        parts = []
        while len(parts) < 3:
            part = await self.socket.read_message()
            if part is None:
                raise ConnectionResetError("the WebSocket is closed")
            parts.append(json.loads(part))
        return parts

    async def receive_all(self):
        while True:
            await self.receive()

    async def ask(self, what, number=1):
        for part in {"msgid": str(number), "msgtype": what}, {}, {}:
            await self.socket.write_message(json.dumps(part))
        while (answer := await self.receive())[0].get("reqid") != str(number):
            pass  # the document is updated meanwhile
        return answer


class StandIn:
    """Listens where the dashboard does, and does with connections what a test wants."""

    def __init__(self, serve):
        self.serve = serve
        self.connections = 0
        self.tasks = set()

    def accept(self, reader, writer):
        self.connections += 1
        self.tasks.add(asyncio.create_task(self.handle(reader, writer)))

    async def handle(self, reader, writer):
        try:
            await self.serve(reader, writer)
        finally:
            writer.transport.abort()


async def stay(reader, writer):
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def forwarded_to(serve):
    """A forwarder to a stand-in of the dashboard, and the streams that it has opened."""
    opened = []

    async def open_comm():
        opened.append(await TCPClient().connect("127.0.0.1", server.port))
        return SimpleNamespace(stream=opened[-1], abort=opened[-1].close)

    async with stand_in(serve) as server, forwarder(open_comm) as made:
        yield made, opened


@contextlib.asynccontextmanager
async def stand_in(serve=stay):
    server = StandIn(serve)
    listener = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    yield server
    listener.close()
    for task in server.tasks:
        task.cancel()
    await asyncio.gather(*server.tasks, return_exceptions=True)
    await listener.wait_closed()
