"""Dask's dashboard with the installed bokeh: it writes every report, and every pane opens and updates."""

import re
import sys
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import cloudpickle
import pytest
from dashboards import to_socket
from distributed import Client, get_task_stream, performance_report
from tornado.httpclient import AsyncHTTPClient, HTTPClientError
from tornado.websocket import websocket_connect

from dask_cml import CMLCluster

pytestmark = pytest.mark.slow

# The scheduler's session cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def client(shared_platform):
    with (
        CMLCluster(n_workers=1, worker_args=["--no-nanny"], platform="local", quiet=True) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(1, timeout=120)
        compute(client)
        yield client


def compute(client):
    return client.gather(client.map(lambda number: number + 1, range(20), pure=False))


@pytest.mark.images
def test_the_reports_of_a_computation_are_written(client, tmp_path):
    with performance_report(tmp_path / "report.html"):
        compute(client)
    with get_task_stream(client, plot="save", filename=str(tmp_path / "stream.html")):
        compute(client)
    client.profile(filename=str(tmp_path / "profile.html"))
    assert "Dask Performance Report" in (tmp_path / "report.html").read_text()
    assert "Task Stream" in (tmp_path / "stream.html").read_text()
    assert "Dask Profile" in (tmp_path / "profile.html").read_text()


def test_every_pane_updates(client):
    assert client.run_on_scheduler(errors_of_updates) == {}


def errors_of_updates(dask_scheduler):
    """Build each pane in the scheduler, and update it once, as the page in a browser does."""
    from bokeh.document import Document
    from distributed.dashboard.scheduler import applications

    errors = {}
    for path, build in applications.items():
        document = Document()
        try:
            build(dask_scheduler, {}, document)
            for callback in document.session_callbacks:
                callback.callback()
            document.to_json()
        except Exception as error:
            errors[path] = repr(error)
    return errors


def test_the_raw_dashboard_answers_requests_for_any_host(client):
    """As the documentation warns. Its updates are for own pages only."""
    link = client.cluster.dashboard_link
    assert status(urllib.request.Request(link, headers={"Host": "evil.example"})) == 200


async def opens_socket(link, origin):
    """Return whether a page of this origin gets the updates of a pane."""
    pane = link.replace("status", "individual-task-stream")
    page = await AsyncHTTPClient().fetch(pane)
    token = re.search(r'"token":"([^"]+)"', page.body.decode()).group(1)
    request = to_socket(f"{pane.replace('http', 'ws')}/ws", Origin=origin)
    try:
        socket = await websocket_connect(request, subprotocols=["bokeh", token])
    except HTTPClientError as error:
        assert error.code == 403, error  # noqa: PT017, the connection is what is asked for
        return False
    assert "ACK" in await socket.read_message()
    socket.close()
    return True


async def test_pages_of_other_sites_get_no_updates_of_the_raw_dashboard(client):
    link = client.cluster.dashboard_link
    port = urlsplit(link).port
    for own in (f"http://127.0.0.1:{port}", "http://localhost:9000"):
        assert await opens_socket(link, own)
    # A page whose name resolves to 127.0.0.1 has that name as its origin.
    for other in (f"http://evil.example:{port}", "https://evil.127.0.0.1", "null"):
        assert not await opens_socket(link, other)
    # By the check of bokeh before 3.8.2, these begin like the dashboard's own.
    for other in (f"http://localhost.evil.example:{port}", "https://127.0.0.1.evil.example", "http://["):
        assert not await opens_socket(link, other)


# The last one: the scheduler keeps what it has served up to date for a while.
def test_the_dashboard_serves_every_pane(client):
    from distributed.dashboard.scheduler import applications

    link = client.cluster.dashboard_link
    statuses = {path: status(link.replace("/status", path)) for path in applications}
    assert len(statuses) > 40
    # Every reader of this one would fill the disks of all workers.
    assert {path: status for path, status in statuses.items() if status != 200} == {"/hardware": 404}


def status(link):
    try:
        with urllib.request.urlopen(link, timeout=120) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
