"""The dashboard at a local port: pages, WebSockets and any other bytes, through the scheduler's comm port."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import socket
import sys

import dask
import pytest
from distributed import Scheduler
from distributed.comm.core import CommClosedError, connect
from distributed.security import Security
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import websocket_connect

from dask_cml import wire
from dask_cml.manager import dashboard
from dask_cml.manager.dashboard import DashboardForwarder
from dask_cml.manager.presence import Presence
from dask_cml.scheduler.plugin import NAME
from dask_cml.wire import FORWARD

pytest.importorskip("bokeh")

#: After such a request all bytes are passed on.
OPENING = b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: any\r\n\r\n"


@contextlib.asynccontextmanager
async def scheduler(port=0, security=None, dashboard="127.0.0.1:0", plugin=True):
    running = Scheduler(
        host="127.0.0.1", port=port, dashboard=True, dashboard_address=dashboard, security=security
    )
    async with running:
        if plugin:
            presence = Presence(running.address, arguments(security))
            await presence.start()
            await presence.close()
        yield running


@contextlib.asynccontextmanager
async def forwarded(security=None, **options):
    """A scheduler and a forwarder to its dashboard."""
    async with (
        scheduler(security=security, **options) as running,
        DashboardForwarder(running.address, arguments(security)) as forwarder,
    ):
        yield running, forwarder


def arguments(security):
    return security.get_connection_args("client") if security else {}


@pytest.fixture(params=["tcp", "tls"])
def security(request):
    if request.param == "tcp":
        return None
    pytest.importorskip("cryptography")
    return Security.temporary()


async def get(port, path="/status"):
    client = AsyncHTTPClient(force_instance=True, max_clients=200)
    try:
        request = HTTPRequest(f"http://127.0.0.1:{port}{path}", request_timeout=120, connect_timeout=120)
        return await client.fetch(request, raise_error=False)
    finally:
        client.close()


class Pane:
    """A document of the dashboard as a browser has it: a page, and its WebSocket."""

    def __init__(self, port, path="/individual-task-stream"):
        self.address, self.path = f"127.0.0.1:{port}", path

    async def __aenter__(self):
        page = await get(self.address.split(":")[1], self.path)
        token = re.search(r'"token":"([^"]+)"', page.body.decode()).group(1)
        self.socket = await websocket_connect(
            f"ws://{self.address}{self.path}/ws", subprotocols=["bokeh", token]
        )
        assert (await self.receive())[0]["msgtype"] == "ACK"
        return self

    async def __aexit__(self, *args):
        self.socket.close()

    async def receive(self):
        """Return the parts of a message of Bokeh's protocol: header, metadata, content."""
        parts = []
        while len(parts) < 3:
            part = await self.socket.read_message()
            if part is None:
                raise ConnectionResetError("the WebSocket is closed")
            parts.append(json.loads(part))
        return parts

    async def receive_all(self):
        """Receive until the connection ends."""
        while True:
            await self.receive()

    async def ask(self, what, number=1):
        for part in {"msgid": str(number), "msgtype": what}, {}, {}:
            await self.socket.write_message(json.dumps(part))
        while (answer := await self.receive())[0].get("reqid") != str(number):
            pass  # the document is updated meanwhile
        return answer


# -- the dashboard


async def test_pages_are_those_of_the_dashboard(security):
    async with forwarded(security) as (running, forwarder):
        assert running.address.startswith("tls" if security else "tcp")
        assert forwarder.link == f"http://127.0.0.1:{forwarder.port}/status"
        page = await get(forwarder.port)
        assert page.code == 200
        assert b"<title>Dask Diagnostic UI</title>" in page.body
        script = re.search(rb'src="(static/js/bokeh\.min\.js[^"]*)"', page.body).group(1).decode()
        direct, carried = [
            await get(port, f"/{script}") for port in (running.http_server.port, forwarder.port)
        ]
        assert direct.code == 200
        assert len(direct.body) > 500_000
        assert carried.body == direct.body
        assert (await get(forwarder.port, "/no-such-page")).code == 404


async def test_panes_get_their_documents_and_updates_by_websocket(security):
    async with forwarded(security) as (_, forwarder), Pane(forwarder.port) as pane:
        header, _, content = await pane.ask("PULL-DOC-REQ")
        assert header["msgtype"] == "PULL-DOC-REPLY"
        assert content["doc"]["roots"]


async def test_dashboard_of_a_scheduler_s_process_is_forwarded_with_its_keys(tmp_path, holds):
    pytest.importorskip("cryptography")
    security = Security.temporary()
    file = tmp_path / "scheduler.json"
    command = [sys.executable, "-m", "dask", "scheduler", "--host", "tls://127.0.0.1:0"]
    command += ["--dashboard-address", "127.0.0.1:0", "--scheduler-file", str(file)]
    for role, part in {"ca-file": "ca_file", "cert": "scheduler_cert", "key": "scheduler_key"}.items():
        (tmp_path / part).write_text(getattr(security, f"tls_{part}"))
        command += [f"--tls-{role}", str(tmp_path / part)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    try:
        await holds(lambda: file.exists() and file.read_text().endswith("}"))
        address = json.loads(file.read_text())["address"]
        presence = Presence(address, arguments(security))
        await presence.start()
        forwarder = DashboardForwarder(address, arguments(security))
        await forwarder.start()
        async with forwarder, Pane(forwarder.port) as pane:
            assert (await pane.ask("PULL-DOC-REQ"))[2]["doc"]["roots"]
        stranger = DashboardForwarder(address, arguments(Security.temporary()), timeout=1)
        async with stranger:
            assert (await get(stranger.port)).code == 502
        await presence.close()
    finally:
        process.terminate()
        await process.wait()


async def test_many_requests_and_websockets_at_once(security):
    async with forwarded(security) as (_, forwarder), contextlib.AsyncExitStack() as stack:
        panes = [await stack.enter_async_context(Pane(forwarder.port)) for _ in range(10)]
        pages = asyncio.gather(*(get(forwarder.port, "/health") for _ in range(100)))
        answers = await asyncio.gather(*(pane.ask("SERVER-INFO-REQ") for pane in panes))
        assert [page.body for page in await pages] == [b"ok"] * 100
        assert {answer[0]["msgtype"] for answer in answers} == {"SERVER-INFO-REPLY"}


async def test_only_this_machine_can_connect():
    async with forwarded() as (_, forwarder):
        [listener] = forwarder._server.sockets
        assert listener.getsockname()[0] == "127.0.0.1"


async def test_asker_has_no_say_in_where_it_leads():
    async with scheduler() as running, stand_in() as other:
        comm = await connect(running.address)
        await comm.write({"op": FORWARD, "host": "127.0.0.1", "port": other.port, "reply": False})
        assert await comm.read() == {"status": "OK"}
        await comm.write(b"GET /health HTTP/1.0\r\n\r\n")
        answer = await comm.read()
        while not isinstance(answer, bytes):
            answer = await comm.read()
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert other.connections == 0
        comm.abort()


# -- who asks


async def ask(port, method="GET", path="/health", **headers):
    """Return the status and the body that a request gets; its headers are as given."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    writer.write("\r\n".join([f"{method} {path} HTTP/1.1", *lines, "Connection: close", "", ""]).encode())
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]


@pytest.fixture
async def port(monkeypatch):
    """The port of a forwarder in a session of CML."""
    monkeypatch.setenv("CDSW_ENGINE_ID", "abc123")
    monkeypatch.setenv("CDSW_DOMAIN", "ml.example.com")
    with dask.config.set({"cml.forward-hosts": ["Hub.example.com"]}):
        async with forwarded() as (_, forwarder):
            yield forwarder.port


async def test_hosts_of_this_machine_of_cml_and_of_proxies_get_the_dashboard(port):
    hosts = ["localhost", "LOCALHOST:9000", f"127.0.0.1:{port}", "[::1]:9000", "10.1.2.3:8888"]
    hosts += [socket.gethostname(), "abc123.ml.example.com", "hub.example.com:443"]
    assert {host: await ask(port, Host=host) for host in hosts} == dict.fromkeys(hosts, (200, "ok"))


async def test_other_hosts_are_refused_in_words(port):
    hosts = [
        "evil.example.com",
        "127.0.0.1.evil.example.com",
        "evilml.example.com",
        "ml.example.com.evil.org",
    ]
    hosts += ["localhost@evil.org", "localhost/evil.org", "evil.org:80", "localhost:x", None]
    for host in hosts:
        status, words = await ask(port, Host=host)
        assert status == 403, host
        assert f"refuses requests for host {host or ''!r}" in words
        assert "cml.forward-hosts" in words


@pytest.mark.parametrize("more", [{"method": "POST"}, {"Upgrade": "websocket"}])
async def test_orders_of_other_pages_are_refused(port, more):
    for origin in "http://evil.org", "null", "https://localhost:9001", "http://localhost:9001", "x":
        status, words = await ask(port, Host="localhost:9000", Origin=origin, **more)
        assert status == 403
        assert f"pages of {origin!r}" in words
    own = [
        "http://localhost:9000",
        "https://abc123.ml.example.com",
        "https://read-only-abc123.ml.example.com",
    ]
    statuses = [(await ask(port, Host="localhost:9000", Origin=each, **more))[0] for each in [*own, None]]
    assert 403 not in statuses
    by_proxy = await ask(port, Host="hub.example.com", Origin="https://hub.example.com", **more)
    assert by_proxy[0] == statuses[0]
    # What it is answered, the other page cannot read.
    assert (await ask(port, Host="localhost:9000", Origin="http://evil.org"))[0] == 200


async def test_every_request_of_a_connection_is_checked(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    own = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody"
    for _ in range(2):
        writer.write(own)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.search(rb"Content-Length: (\d+)", head)[1]))
    writer.write(own.replace(b"Host", b"Origin: http://evil.org\r\nHost"))
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\nHost: localhost\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nX: 1\nHost: localhost\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: evil.org\r\n : localhost\r\n\r\n", b"400"),
        (b"\x16\x03\x01 nothing of HTTP\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b"411"),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", b"411"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", b"431"),
    ],
)
async def test_what_two_readers_may_understand_differently_is_refused(sent, status):
    async with DashboardForwarder("tcp://127.0.0.1:9", timeout=0.1) as forwarder:
        reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
        writer.write(sent)
        assert (await reader.readline()).startswith(b"HTTP/1.1 " + status)
        writer.close()


async def test_a_connection_without_a_request_reaches_nobody():
    async with (
        stand_in() as silent,
        DashboardForwarder(f"tcp://127.0.0.1:{silent.port}") as forwarder,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert not silent.connections
        writer.close()


# -- what is not there


async def test_scheduler_that_is_gone_is_a_bad_gateway_until_it_is_back():
    async with scheduler() as running:
        port = running.port
    async with DashboardForwarder(f"tcp://127.0.0.1:{port}", timeout=0.5) as forwarder:
        page = await get(forwarder.port)
        assert (page.code, page.reason) == (502, "Bad Gateway")
        assert f"Cannot reach the Dask scheduler at tcp://127.0.0.1:{port}".encode() in page.body
        forwarder._timeout = 60
        async with scheduler(port=port) as running:
            assert (await get(forwarder.port, "/health")).body == b"ok"
        forwarder._timeout = 0.5
        assert (await get(forwarder.port)).code == 502


async def test_scheduler_that_accepts_and_says_nothing_is_a_bad_gateway():
    async with (
        stand_in() as silent,
        DashboardForwarder(f"tcp://127.0.0.1:{silent.port}", timeout=0.5) as forwarder,
    ):
        assert (await get(forwarder.port)).code == 502
        assert silent.connections


async def test_scheduler_without_the_plugin_is_a_bad_gateway_that_says_so():
    async with forwarded(plugin=False) as (_, forwarder):
        page = await get(forwarder.port)
        assert page.code == 502
        assert b"no plugin" in page.body


async def test_dashboard_on_another_address_is_not_looked_for_on_this_one():
    async with forwarded(dashboard="127.0.0.2:0") as (_, forwarder):
        page = await get(forwarder.port)
        assert page.code == 502
        assert b"does not listen on 127.0.0.1" in page.body


async def test_request_with_a_long_body_hears_of_the_bad_gateway():
    async with DashboardForwarder("tcp://127.0.0.1:9", timeout=0.2) as forwarder:
        reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
        writer.write(
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n\r\n" + b"x" * 3_000_000
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 502")
        writer.close()


async def test_keys_of_another_cluster_lead_nowhere():
    pytest.importorskip("cryptography")
    async with (
        scheduler(security=Security.temporary()) as running,
        DashboardForwarder(running.address, arguments(Security.temporary()), timeout=1) as forwarder,
    ):
        assert (await get(forwarder.port)).code == 502


# -- bytes


class StandIn:
    """Listens where the dashboard does, and does with connections what a test wants."""

    def __init__(self, serve):
        self.serve = serve
        self.connections = 0
        self.tasks = set()

    def accept(self, reader, writer):
        self.connections += 1
        task = asyncio.create_task(self.handle(reader, writer))
        self.tasks.add(task)

    async def handle(self, reader, writer):
        try:
            await self.serve(reader, writer)
        finally:
            writer.transport.abort()


async def stay(reader, writer):
    await asyncio.Event().wait()


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


@contextlib.asynccontextmanager
async def carried(serve, monkeypatch, security=None):
    """A connection for any bytes through a forwarder to a stand-in of the dashboard, and the plugin."""

    async def serve_after_request(reader, writer):
        await reader.readexactly(len(OPENING))
        await serve(reader, writer)

    async with forwarded(security) as (running, forwarder), stand_in(serve_after_request) as server:
        plugin = running.plugins[NAME]
        monkeypatch.setattr(plugin, "_dashboard_port", lambda: server.port)
        reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
        writer.write(OPENING)
        yield reader, writer, plugin
        writer.transport.abort()


async def test_bytes_arrive_as_they_were_sent_in_both_directions_at_once(security, monkeypatch):
    async def echo(reader, writer):
        while data := await reader.read(100_000):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
        await asyncio.Event().wait()

    blocks = [os.urandom(1_000_000) for _ in range(20)]
    async with carried(echo, monkeypatch, security) as (reader, writer, _):

        async def send():
            for block in blocks:
                writer.write(block)
                await writer.drain()
            writer.write_eof()

        _, received = await asyncio.gather(send(), reader.read())
    assert hashlib.sha256(received).digest() == hashlib.sha256(b"".join(blocks)).digest()


async def test_answer_to_a_request_that_has_ended_still_comes(monkeypatch):
    async def count(reader, writer):
        data = await reader.read()
        writer.write(str(len(data)).encode())
        writer.write_eof()
        await reader.read()

    async with carried(count, monkeypatch) as (reader, writer, _):
        writer.write(b"x" * 1_000_000)
        writer.write_eof()
        assert await reader.read() == b"1000000"


async def test_request_goes_on_when_the_answer_has_ended(monkeypatch):
    received = asyncio.get_running_loop().create_future()

    async def answer_first(reader, writer):
        writer.write(b"answer")
        writer.write_eof()
        received.set_result(await reader.read())

    async with carried(answer_first, monkeypatch) as (reader, writer, _):
        assert await reader.read() == b"answer"
        writer.write(b"x" * 1_000_000)
        writer.write_eof()
        assert await received == b"x" * 1_000_000


async def test_what_nobody_reads_is_bounded_and_does_not_stop_the_other_direction(monkeypatch, holds):
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

    tunnels = []
    monkeypatch.setattr(dashboard, "Tunnel", recording(dashboard.Tunnel, tunnels))
    async with carried(flood, monkeypatch) as (reader, writer, _):
        bound = wire._WINDOW + wire.CHUNK
        await holds(lambda: tunnels and tunnels[0]._waiting > bound // 2)
        for _ in range(50):
            writer.write(b"y" * 100_000)
            await writer.drain()
        await holds(lambda: received == 5_000_000)
        assert tunnels[0]._waiting <= bound
        # Beside that there is only what the system has in its sockets' buffers.
        assert sent < 50_000_000
        assert len(await reader.readexactly(60_000_000)) == 60_000_000
        assert sent >= 60_000_000


def recording(cls, instances):
    def make(*arguments):
        instances.append(cls(*arguments))
        return instances[-1]

    return make


async def test_side_that_sends_more_than_it_may_is_cut_off(monkeypatch):
    async with scheduler() as running, stand_in() as server:
        monkeypatch.setattr(running.plugins[NAME], "_dashboard_port", lambda: server.port)
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
        assert not running.plugins[NAME]._forwards


# -- ends


async def test_browser_that_goes_leaves_nothing_behind(monkeypatch, holds):
    async def send_for_ever(reader, writer):
        while True:
            writer.write(b"x" * 1000)
            await writer.drain()

    async with carried(send_for_ever, monkeypatch) as (_, writer, plugin):
        await holds(lambda: len(plugin._forwards) == 1)
        writer.transport.abort()
        await holds(lambda: not plugin._forwards)


async def test_dashboard_s_connection_that_breaks_breaks_the_browser_s(monkeypatch, holds):
    async def answer_in_part(reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
        await writer.drain()

    async with carried(answer_in_part, monkeypatch) as (reader, writer, plugin):
        received = b""
        with contextlib.suppress(ConnectionError):
            received = await reader.read()
        assert b"502" not in received
        writer.close()
        await holds(lambda: not plugin._forwards)


async def test_close_ends_all_connections_and_frees_the_port(holds):
    async with scheduler() as running:
        forwarder = DashboardForwarder(running.address)
        await forwarder.start()
        await forwarder.start()
        async with Pane(forwarder.port) as pane:
            idle, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
            await holds(lambda: len(forwarder._tasks) >= 2)
            await forwarder.close()
            await forwarder.close()
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(pane.receive_all(), 120)
            assert await idle.read() == b""
            writer.close()
        assert not forwarder._tasks
        await holds(lambda: not running.plugins[NAME]._forwards)
        async with DashboardForwarder(running.address, port=forwarder.port) as again:
            assert (await get(again.port, "/health")).body == b"ok"


async def test_end_of_the_scheduler_ends_all_connections_and_not_the_forwarder(holds):
    async with scheduler() as running, DashboardForwarder(running.address) as forwarder:
        async with Pane(forwarder.port) as pane:
            await asyncio.wait_for(running.close(), 120)
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(pane.receive_all(), 120)
        await holds(lambda: not forwarder._tasks)
        forwarder._timeout = 0.5
        assert (await get(forwarder.port)).code == 502


async def test_port_that_is_taken_is_an_error():
    async with stand_in() as other:
        with pytest.raises(OSError, match="address already in use"):
            await DashboardForwarder("tcp://127.0.0.1:9", port=other.port).start()
