"""A cluster that runs, with all that it has by default; the tests share it."""

from __future__ import annotations

import re
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


def test_adapting_closes_workers_by_the_groups_of_their_key(cluster, client):
    for key, closed in (lambda worker: "all", 0), (lambda worker: worker.name, 1):
        adaptive = cluster.adapt(minimum=0, maximum=2, interval="1 hour", worker_key=key)
        assert len(cluster.sync(adaptive.workers_to_close, 1)) == closed
    cluster.scale(2)


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
