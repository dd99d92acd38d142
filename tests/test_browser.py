"""JupyterLab in Chromium: the sidebar's buttons, with a scheduler on a loopback of its own where possible."""

import re

import pytest
from lab import JupyterServer, Page, browser, chromium, pictured, until
from testbed import networks

from dask_cml.records import store

pytestmark = pytest.mark.slow

MADE_HERE = re.compile(r"CMLCluster \d")
#: Its tasks fill the panes.
WORK = """
import time
def work(n):
    time.sleep(0.05)
    return bytes(100_000)
futures = client.map(work, range(40))
print("bytes:", sum(map(len, client.gather(futures))))
"""


@pytest.fixture(scope="module")
def sessions(shared_platform):
    """The platform; its sessions have networks of their own where this machine can give them such."""
    if chromium() is None:
        pytest.skip("Chromium is not installed")
    try:
        networks.check()
    except RuntimeError:
        return shared_platform
    shared_platform.configure(networks=True)
    return shared_platform


@pytest.fixture(scope="module")
def chrome(sessions):
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def server(sessions, tmp_path_factory):
    factory = {"n-workers": 1, "forward-dashboard": True}
    with JupyterServer(tmp_path_factory.mktemp("lab"), factory, module="jupyterlab") as server:
        yield server


@pytest.fixture
def opened(chrome, server, request, tmp_path):
    """Open JupyterLab; when the test fails, there are pictures of what it was like."""
    with pictured(request, tmp_path, server) as contexts:

        def opened():
            context = chrome.new_context(viewport={"width": 1400, "height": 900})
            contexts.append(context)
            return Page(context.new_page(), server)

        yield opened
    for model in server.clusters.values():
        server.request("DELETE", f"dask/clusters/{model['id']}")
    assert store.records() == []


def test_the_sidebar_creates_scales_and_shuts_down_a_cluster(opened, server):
    lab = opened()
    lab.open()
    lab.new_button.click()
    item = lab.item(MADE_HERE)
    lab.lists(item, "Number of Workers: 1")
    lab.open_notebook("work.ipynb", WORK)
    lab.scale(item, 2)
    lab.lists(item, "Number of Workers: 2")

    stream = lab.open_pane("Task Stream")
    until(lambda: stream.drawn)
    empty = stream.coloured
    lab.show("work.ipynb")
    lab.insert_client_code(item)
    lab.run_cells()
    lab.notebook.filter(has_text="bytes: 4000000").wait_for()
    lab.show("Task Stream")
    until(lambda: stream.coloured > empty + 1000)
    for title in ("Workers", "Progress", "Workers Memory"):
        pane = lab.open_pane(title)
        until(lambda pane=pane: pane.coloured > 50)
    workers = lab.open_pane("Cluster Map").workers
    until(lambda: workers.count() == 2)

    lab.adapt(item, 0, 2)
    lab.lists(item, "Maximum Workers: 2")

    lab.shut_down(item)
    lab.lists_no(item)
    assert store.records() == []
