"""The dashboard at a local port: pages and WebSockets through the scheduler's comm port, and nothing else."""

import asyncio
import contextlib
import errno
import functools
import json
import os
import re
import resource
import socket
import sys

import dask
import pytest
from dashboards import Pane, forwarded, forwarded_to, forwarder, forwarder_to, get, scheduler, stand_in, stay
from distributed import Scheduler
from distributed.security import Security
from ports import free_port
from schedulers import prepare

from dask_cml.dashboard.proxy import DashboardForwarder, open_comm
from dask_cml.layout import FOLDER, HOSTS, NUMBER, scheduler_file
from dask_cml.protocol import FORWARD
from dask_cml.scheduler.dashboard_guard import protect
from dask_cml.sessions.plan import PRELOAD

pytest.importorskip("bokeh")


@pytest.mark.images
async def test_many_pages_and_websockets_of_the_dashboard_at_once(security):
    async with forwarded(security) as (running, forwarder), contextlib.AsyncExitStack() as stack:
        assert running.address.startswith("tls" if security else "tcp")
        assert forwarder.link == f"http://127.0.0.1:{forwarder.port}/status"
        page = await get(forwarder.port)
        assert page.code == 200
        assert b"<title>Dask Diagnostic UI</title>" in page.body
        script = re.search(rb'src="(static/js/bokeh\.min\.js[^"]*)"', page.body).group(1).decode()
        ports = running.http_server.port, forwarder.port
        direct, carried = [await get(port, f"/{script}") for port in ports]
        assert direct.code == 200
        assert len(direct.body) > 500_000
        assert carried.body == direct.body
        assert (await get(forwarder.port, "/no-such-page")).code == 404
        panes = [await stack.enter_async_context(Pane(forwarder.port)) for _ in range(4)]
        pages = asyncio.gather(*(get(forwarder.port, "/health") for _ in range(100)))
        answers = await asyncio.gather(*(pane.ask("SERVER-INFO-REQ") for pane in panes))
        assert [page.body for page in await pages] == [b"ok"] * 100
        assert {answer[0]["msgtype"] for answer in answers} == {"SERVER-INFO-REPLY"}


@pytest.mark.slow
async def test_the_dashboard_of_a_scheduler_is_forwarded_with_its_keys(tmp_path, holds):
    pytest.importorskip("cryptography")
    security = Security.temporary()
    folder = prepare(tmp_path / "mine")
    file = folder / scheduler_file(0)
    command = [sys.executable, "-m", "dask", "scheduler", "--host", "tls://127.0.0.1:0"]
    command += ["--dashboard-address", "127.0.0.1:0", "--preload", PRELOAD]
    for role, part in {"ca-file": "ca_file", "cert": "scheduler_cert", "key": "scheduler_key"}.items():
        (tmp_path / part).write_text(getattr(security, f"tls_{part}"))
        command += [f"--tls-{role}", str(tmp_path / part)]
    environment = {**os.environ, FOLDER: str(folder), NUMBER: "0"}
    process = await asyncio.create_subprocess_exec(
        *command, stderr=asyncio.subprocess.DEVNULL, env=environment
    )
    try:
        await holds(file.exists)
        address = json.loads(file.read_text())["address"]
        async with forwarder_to(address, security) as forwarder, Pane(forwarder.port) as pane:
            assert (await pane.ask("PULL-DOC-REQ"))[2]["doc"]["roots"]
        async with forwarder_to(address, Security.temporary(), timeout=1) as stranger:
            assert (await get(stranger.port)).code == 502
    finally:
        process.terminate()
        await process.wait()


async def ask(port, method="GET", path="/health", **headers):
    """Return the status and the body that a request gets; its headers are as given."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    writer.write("\r\n".join([f"{method} {path} HTTP/1.1", *lines, "Connection: close", "", ""]).encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    if "chunked" in head:
        [body] = re.fullmatch(r"\w+\r\n(.*)\r\n0\r\n\r\n", body, re.DOTALL).groups()
    return int(head.split()[1]), body


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


async def test_requests_for_other_hosts_are_refused_with_a_reason(port):
    hosts = [
        "evil.example.com",
        "127.0.0.1.evil.example.com",
        "evilml.example.com",
        "ml.example.com.evil.org",
    ]
    hosts += ["localhost@evil.org", "localhost/evil.org", "evil.org:80", "localhost:x", None]
    for host in hosts:
        status, words = await ask(port, Host=host)
        assert status in (400, 403), host
        if status == 400:  # that is no host at all
            continue
        assert f"refuses requests for host {host!r}" in words
        assert "cml.forward-hosts" in words


async def test_websockets_of_other_pages_are_refused(port):
    more = {"Upgrade": "websocket"}
    for origin in "http://evil.org", "null", "https://localhost:9001", "http://localhost:9001", "x":
        status, words = await ask(port, Host="localhost:9000", Origin=origin, **more)
        assert status == 403
        assert f"pages of {origin!r}" in words
    own = [
        "http://localhost:9000",
        "https://abc123.ml.example.com",
        "https://read-only-abc123.ml.example.com",
    ]
    statuses = [(await ask(port, Host="localhost:9000", Origin=origin, **more))[0] for origin in [*own, None]]
    assert 403 not in statuses
    by_proxy = await ask(port, Host="hub.example.com", Origin="https://hub.example.com", **more)
    assert by_proxy[0] == statuses[0]
    for other in "https://other.ml.example.com", "https://abc123.ml.example.com.evil.org":
        assert (await ask(port, Host="abc123.ml.example.com", Origin=other, **more))[0] == 403
    # The other page cannot read the answer.
    assert (await ask(port, Host="localhost:9000", Origin="http://evil.org"))[0] == 200


ORIGINS = {
    "https://abc123.ml.example.com": True,
    "https://READ-ONLY-abc123.ml.example.com": True,
    "https://hub.example.com": True,
    "http://localhost:9000": True,
    "https://workers.ml.example.com": True,  # where CML says that it serves the session
    None: True,
    "https://other.ml.example.com": False,  # another user's session, to which browsers are logged in
    "https://abc123.ml.example.com.evil.org": False,
    "http://localhost.evil.org": False,
}


async def test_the_schedulers_own_dashboard_opens_websockets_for_pages_of_its_session(monkeypatch):
    monkeypatch.setenv("CDSW_ENGINE_ID", "abc123")
    monkeypatch.setenv("CDSW_DOMAIN", "ML.example.com")
    monkeypatch.setenv(HOSTS, "x.example.com,Hub.example.com")
    async with Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as running:
        protect(running).allow("https://workers.ml.example.com/")
        for origin, opens in ORIGINS.items():
            more = {"Host": "abc123.ml.example.com", "Origin": origin, "Upgrade": "websocket"}
            # Dask warns of a second event stream.
            for path in ("/eventstream", "/status/ws") if not opens or origin is None else ("/status/ws",):
                status, words = await ask(running.http_server.port, path=path, **more)
                assert (status == 403 and "cml.forward-hosts" in words) is not opens
        # Dask accepts any name by which it is asked, and such a name may lead to 127.0.0.1.
        more = {"Host": "evil.org", "Origin": "http://evil.org", "Upgrade": "websocket"}
        assert (await ask(running.http_server.port, path="/eventstream", **more))[0] == 403


async def test_requests_that_could_change_something_and_service_workers_are_refused(port):
    for method in "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "CONNECT", "STRANGE":
        status, _ = await ask(port, method, "/api/v1/retire_workers", Host="localhost")
        assert status == 405
    status, words = await ask(port, Host="localhost", **{"Service-Worker": "script"})
    assert (status, words) == (403, "The dashboard has no service workers\n")


INVALID_REQUESTS = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.org\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: evil.org\r\n : localhost\r\n\r\n",
    b"\x16\x03\x01 nothing of HTTP\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n\r\n" + b"x" * 3_000_000,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n",
]
CLOSED_PATHS = [
    "/proxy/8787/localhost/status",
    "/prefix/proxy/1/a",
    "/%70roxy/1/a",
    "/%2570roxy/1/a",
    "/PROXY/1/a",
    "/x%2fproxy%2f1",
    "/x\\proxy\\1",
    "/status/../proxy/1/a",
    "/status/%2e%2e/x",
    "/jupyter/api/kernels",
    "/hardware",
    "/hardware/ws",
    "/%2525252570roxy",
    "/%" + "25" * 1000,
]


async def test_invalid_requests_and_paths_that_reach_other_servers_do_not_reach_the_scheduler():
    async with stand_in() as silent, forwarder_to(f"tcp://127.0.0.1:{silent.port}") as forwarder:
        for sent in INVALID_REQUESTS:
            reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
            writer.write(sent)
            with contextlib.suppress(OSError):
                writer.write_eof()
            answer = b""
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
            assert answer[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 403")
            writer.close()
        for path in CLOSED_PATHS:
            assert (await ask(forwarder.port, path=path, Host="localhost"))[0] == 404
        assert not silent.connections


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/plain\r\n"


def answering(head=ANSWER, body=b"ok", received=None):
    async def serve(reader, writer):
        request = await reader.readuntil(b"\r\n\r\n")
        if received is not None:
            received.append(request.decode())
        writer.write(head + b"\r\n" + body)
        with contextlib.suppress(OSError):
            await writer.drain()
        await reader.read()

    return serve


async def test_a_dashboard_and_a_browser_receive_the_allowed_headers_only():
    received = []
    secrets = {
        "Cookie": "session=secret",
        "Authorization": "Bearer secret",
        "Proxy-Authorization": "secret",
        "REMOTE-USER": "secret",
        "X-XSRFToken": "secret",
        "X-Forwarded-For": "secret",
        "Origin": "http://secret",
        "Referer": "http://secret",
    }
    head = ANSWER.replace(b"200", b"201") + b"ETag: x\r\nCache-Control: no-store\r\n"
    for name in (
        b"Set-Cookie",
        b"Clear-Site-Data",
        b"Service-Worker-Allowed",
        b"Strict-Transport-Security",
        b"Access-Control-Allow-Origin",
        b"Link",
        b"Refresh",
        b"Alt-Svc",
        b"X-Unknown",
    ):
        head += name + b": secret\r\n"
    async with forwarded_to(answering(head, received=received)) as (forwarder, _):
        answer = await get(forwarder.port, "/a%20b?c=d%26", Accept="text/html", **secrets)
    [request] = received
    assert "secret" not in request
    assert request.startswith("GET /a%20b?c=d%26 HTTP/1.1\r\n")
    assert "Accept: text/html\r\n" in request
    assert "Host: 127.0.0.1\r\n" in request
    assert "secret" not in str([*answer.headers.get_all()])
    passed = {"Content-Type": "text/plain", "Etag": "x", "Cache-Control": "no-store"}
    own = {"Date": answer.headers["Date"], "Transfer-Encoding": "chunked", "Connection": "close"}
    assert dict(answer.headers.get_all()) == {**passed, **own}
    assert (answer.code, answer.body) == (201, b"ok")


async def test_an_answer_ends_at_its_length_and_the_next_request_gets_its_own():
    more = b"okHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"
    async with forwarded_to(answering(body=more)) as (forwarder, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = await reader.readuntil(b"0\r\n\r\n")
            assert answer.endswith(b"\r\n\r\n2\r\nok\r\n0\r\n\r\n")
        writer.close()


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
VALID_ANSWERS = [
    (CHUNKED, b"2\r\nok\r\n0\r\n\r\nmore", b"ok"),
    (b"HTTP/1.1 204 No Content\r\n", b"more", b""),
    (b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n", b"more", b""),
    (ANSWER.replace(b"2\r", b"02\r"), b"ok", b"ok"),
]
INVALID_ANSWERS = [
    (b"HTTP/1.1 100 Continue\r\n", b"HTTP/1.1 100 Continue\r\n\r\n" * 5000),
    (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n", b"evil"),
    (b"nothing of HTTP\r\n", b""),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n", b"ok"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n", b"ok"),
    (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n", b"ok"),
    (CHUNKED, b"zz\r\n"),
]


async def test_answers_of_any_framing_pass_and_an_invalid_one_is_a_bad_gateway(caplog):
    for head, body, expected in VALID_ANSWERS:
        async with forwarded_to(answering(head, body)) as (forwarder, _):
            answer = await get(forwarder.port)
        assert (answer.code, answer.body) == (int(head.split()[1]), expected)
    for head, body in INVALID_ANSWERS:
        async with forwarded_to(answering(head, body)) as (forwarder, _):
            answer = await get(forwarder.port)
        assert answer.code == 502
        assert b"evil" not in answer.body
    assert "Traceback" not in caplog.text


async def test_a_truncated_answer_is_not_ended_like_a_complete_one(caplog):
    async def break_off(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER.replace(b": 2", b": 200000") + b"\r\n" + b"x" * 100_000)
        await writer.drain()

    async with forwarded_to(break_off) as (forwarder, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert not answer.endswith(b"0\r\n\r\n")
    assert "Traceback" not in caplog.text


async def test_a_redirect_stays_at_the_dashboard():
    own = "status", "info/main/workers.html"
    foreign = "/status", "//evil.org", "https://evil.org/", "javascript:alert(1)", "\\\\evil.org"
    for location in own + foreign:
        head = f"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: {location}\r\n".encode()
        async with forwarded_to(answering(head, b"")) as (forwarder, _):
            answer = await get(forwarder.port)
        passed = location if location in own else None
        assert (answer.code, answer.headers.get("Location")) == (302, passed)


UPGRADE = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"


async def test_a_websocket_carries_any_bytes_both_ways_until_one_side_ends_it(holds):
    async def echo(reader, writer):
        request = await reader.readuntil(b"\r\n\r\n")
        assert b"Sec-Websocket-Key: abc\r\n" in request
        assert b"Cookie" not in request
        writer.write(UPGRADE + b"Sec-WebSocket-Accept: x\r\nSet-Cookie: evil\r\n\r\nhello")
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()

    async with forwarded_to(echo) as (forwarder, opened):
        reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
        writer.write(
            b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: abc\r\nCookie: secret\r\n\r\n"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head == UPGRADE.replace(
            b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
            b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: x\r\n\r\n",
        )
        assert await reader.readexactly(5) == b"hello"
        for size in (1, 3_000_000):
            data = os.urandom(size)
            writer.write(data)
            sending = asyncio.create_task(writer.drain())
            assert await reader.readexactly(size) == data
            await sending
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await holds(opened[0].closed)


@pytest.fixture
def few_descriptors(monkeypatch):
    """A process with few descriptors: the server takes no more than eight connections."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))


async def test_idle_connections_do_not_stop_the_server(few_descriptors, caplog):
    async with forwarded_to(answering()) as (forwarder, _):
        idle = [await asyncio.open_connection("127.0.0.1", forwarder.port) for _ in range(50)]
        assert (await get(forwarder.port)).body == b"ok"
        assert await idle[0][0].read() == b""
        for _, writer in idle:
            writer.close()
    assert "Traceback" not in caplog.text


async def test_connections_wait_without_a_word_while_the_process_has_no_descriptor(monkeypatch, caplog):
    accept, errors = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")] * 3

    def accept_later(listener):
        if errors:
            raise errors.pop()
        return accept(listener)

    async with forwarded_to(answering()) as (forwarder, _):
        monkeypatch.setattr(socket.socket, "accept", accept_later)
        assert (await get(forwarder.port)).body == b"ok"
    assert (errors, caplog.text) == ([], "")


async def test_a_request_in_progress_is_not_dropped_for_another_connection(few_descriptors):
    asked, go_on = asyncio.Queue(), asyncio.Event()

    async def wait(reader, writer):
        asked.put_nowait(await reader.readuntil(b"\r\n\r\n"))
        await go_on.wait()
        writer.write(ANSWER + b"\r\nok")
        await reader.read()

    async with forwarded_to(wait) as (forwarder, _):
        answers = [asyncio.create_task(get(forwarder.port)) for _ in range(8)]
        for _ in answers:
            await asked.get()
        reader, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
        assert await reader.read() == b""
        writer.close()
        go_on.set()
        assert [answer.body for answer in await asyncio.gather(*answers)] == [b"ok"] * 8


async def test_a_missing_scheduler_is_a_bad_gateway_until_it_is_back():
    port = free_port()
    limit = {"timeout": 1}
    async with forwarder(lambda: open_comm(f"tcp://127.0.0.1:{port}", {}, **limit)) as made:
        page = await get(made.port)
        assert (page.code, page.reason) == (502, "Bad Gateway")
        words = f"cannot reach the dashboard of the scheduler at tcp://127.0.0.1:{port}: "
        assert words in page.body.decode()
        limit["timeout"] = 120
        async with scheduler(port=port) as running, Pane(made.port) as pane:
            assert (await get(made.port, "/health")).body == b"ok"
            limit["timeout"] = 1
            await asyncio.wait_for(running.close(), 120)
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(pane.receive_all(), 120)
        assert (await get(made.port)).code == 502


async def test_a_scheduler_without_the_plugin_is_a_bad_gateway_with_the_reason():
    async with forwarded(plugin=False) as (_, forwarder):
        page = await get(forwarder.port)
        assert page.code == 502
        assert b"no plugin" in page.body


async def test_a_browser_that_disconnects_leaves_no_connection(holds):
    async def send_for_ever(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED + b"\r\n")
        while True:
            writer.write(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
            await writer.drain()

    for serve in (send_for_ever, stay):
        async with forwarded_to(serve) as (forwarder, opened):
            _, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await holds(lambda opened=opened: opened)
            writer.transport.abort()
            await holds(opened[0].closed)


async def test_close_ends_all_connections_and_frees_the_port(holds):
    async with scheduler() as running:
        forwarder = DashboardForwarder(functools.partial(open_comm, running.address), port=free_port())
        async with Pane(forwarder.port) as pane:
            idle, writer = await asyncio.open_connection("127.0.0.1", forwarder.port)
            assert FORWARD in running._comms.values()
            await forwarder.close()
            await forwarder.close()
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(pane.receive_all(), 120)
            assert await idle.read() == b""
            writer.close()
        await holds(lambda: FORWARD not in running._comms.values())
        async with forwarder_to(running.address, port=forwarder.port) as again:
            assert (await get(again.port, "/health")).body == b"ok"
