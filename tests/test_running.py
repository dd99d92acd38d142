"""A cluster that runs, with all that it has by default; the tests share it."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest
from distributed import Client
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

from dask_cml import CMLCluster


@pytest.fixture(scope="module")
def cluster(shared_platform):
    with CMLCluster(n_workers=2, platform="local", quiet=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=120)
        yield client


def test_it_computes(client):
    assert client.submit(sum, [1, 2, 3]).result() == 6
    assert client.gather(client.map(lambda x: x**2, range(10))) == [x**2 for x in range(10)]


def test_one_session_for_the_scheduler_and_one_for_each_worker(shared_platform, cluster, client):
    sessions = cluster.sessions
    assert [session.role for session in sessions] == ["scheduler", "worker", "worker"]
    assert {session.id for session in sessions} == {
        session["id"] for session in shared_platform.list_workers()
    }
    assert {session.name for session in sessions[1:]} == {
        worker["name"] for worker in cluster.scheduler_info["workers"].values()
    }


def test_adapting_closes_workers_by_the_groups_of_their_key(cluster, client):
    for key, closed in (lambda worker: "all", 0), (lambda worker: worker.name, 1):
        adaptive = cluster.adapt(minimum=0, maximum=2, interval="1 hour", worker_key=key)
        assert len(cluster.sync(adaptive.workers_to_close, 1)) == closed
    cluster.scale(2)


@pytest.mark.slow
def test_restart_keeps_the_workers(cluster, client):
    client.restart(timeout=120)
    client.wait_for_workers(2, timeout=120)
    assert client.submit(sum, [1, 2]).result() == 3
    assert len(cluster.workers) == 2


def test_dashboard_link_leads_to_the_dashboard(cluster):
    assert cluster.dashboard_link.endswith("/status")
    with urllib.request.urlopen(cluster.dashboard_link, timeout=120) as answer:
        assert b"Dask" in answer.read()


async def opens_socket(link, origin):
    """Return whether a page of this origin gets the updates of a pane."""
    pane = link.replace("status", "individual-task-stream")
    page = await AsyncHTTPClient().fetch(pane, request_timeout=120)
    token = re.search(r'"token":"([^"]+)"', page.body.decode()).group(1)
    request = HTTPRequest(f"{pane.replace('http', 'ws')}/ws", headers={"Origin": origin})
    try:
        socket = await websocket_connect(request, subprotocols=["bokeh", token])
    except HTTPClientError as error:
        return error.code != 403
    assert "ACK" in await socket.read_message()
    socket.close()
    return True


async def test_pages_of_other_sites_get_no_updates_of_the_raw_dashboard(cluster):
    link = cluster.dashboard_link
    port = urlsplit(link).port
    for own in (f"http://127.0.0.1:{port}", "http://localhost:9000"):
        assert await opens_socket(link, own)
    # A page whose name resolves to 127.0.0.1 has that name as its origin.
    for other in (f"http://evil.example:{port}", "https://evil.127.0.0.1", "null"):
        assert not await opens_socket(link, other)
    # By the check of bokeh before 3.8.2, these begin like the dashboard's own.
    for other in (f"http://localhost.evil.example:{port}", "https://127.0.0.1.evil.example", "http://["):
        assert not await opens_socket(link, other)


async def test_pages_of_other_sites_get_no_events_of_the_scheduler(cluster):
    """Dask's own WebSocket accepts any name by which it is asked, and such a name may lead to 127.0.0.1."""
    port = urlsplit(cluster.dashboard_link).port
    headers = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
    with pytest.raises(HTTPClientError, match="403"):
        await websocket_connect(HTTPRequest(f"ws://127.0.0.1:{port}/eventstream", headers=headers))
    headers["Origin"] = f"http://127.0.0.1:{port}"
    headers["Host"] = f"127.0.0.1:{port}"
    socket = await websocket_connect(HTTPRequest(f"ws://127.0.0.1:{port}/eventstream", headers=headers))
    socket.close()


@pytest.mark.slow
@pytest.mark.parametrize("page", ["hardware", "hardware/autoload.js", "hardware/ws"])
def test_no_reader_of_the_dashboard_fills_the_workers_disks(cluster, page):
    """The page benchmarks them, with gigabytes of files."""
    url = cluster.dashboard_link.removesuffix("status")
    with urllib.request.urlopen(f"{url}status", timeout=60) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{url}{page}", timeout=60)


def test_widget_and_representations(cluster, client):
    assert f"CMLCluster({cluster.name!r}" in repr(cluster) or cluster.name in repr(cluster)
    assert "workers=2" in repr(cluster)
    assert cluster.dashboard_link in cluster._repr_html_()
    assert "<strong>Status:</strong> running" in cluster._repr_html_()
    assert cluster._repr_html_().count(">connected</td>") == 2


def test_job_script_shows_the_code_that_is_launched(shared_platform, cluster):
    script = cluster.job_script()
    assert "'-m', 'dask', 'scheduler'" in script
    assert "'-m', 'dask', 'worker'" in script
    assert cluster.scheduler.plan.code in script
    assert len(shared_platform.list_workers()) == 3
