"""What Dask's tests expect of LocalCluster, and of any cluster, holds for a cluster on sessions.

On purpose, these differ from LocalCluster:

- The constructor returns when the scheduler answers. Workers connect later, as their sessions start.
- `close()` raises an error that names the sessions that it could not stop. Dask's returns without words.
- `get_logs()` has the logs of sessions by their names, also of ended ones. Dask's has addresses.
- An unknown argument is a TypeError before anything is launched.
- `worker_class` is the name of a class, because the worker runs elsewhere.
- A worker always has a memory limit: its session's.
- A cluster prints lines on its sessions unless it is ``quiet``.
- Its name is part of the address, so a second cluster cannot have it.
"""

from __future__ import annotations

import asyncio
import sys
from unittest import mock

import pytest
from clusters import LIGHT, arrived, make
from distributed import Client

from dask_cml import CMLCluster

# -- a cluster without an event loop of the user's


@pytest.fixture(scope="module")
def cluster(shared_platform):
    with CMLCluster(n_workers=2, platform="local", **LIGHT) as cluster:
        cluster.wait_for_workers(2, timeout=120)
        yield cluster


async def is_asynchronous(cluster):
    return cluster.asynchronous


def test_its_client_shares_its_event_loop_and_its_keys(cluster):
    assert cluster.loop.asyncio_loop.is_running()
    with Client(cluster) as client:
        assert client.loop is cluster.loop
        assert not client.asynchronous
        assert client.security == cluster.security
        assert client.submit(sum, [1, 2]).result() == 3
    memory = 2 * cluster.options.worker_memory
    assert f"workers=2, threads=2, memory={memory:.2f} GiB" in repr(cluster)
    assert not cluster.asynchronous
    assert cluster.sync(is_asynchronous, cluster)


@pytest.mark.slow
def test_without_ipywidgets_it_is_shown_as_html(cluster, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delattr(cluster, "_cached_widget", raising=False)
    with mock.patch("IPython.display.display") as display:
        cluster._ipython_display_()
    [shown], options = display.call_args
    assert options == {"raw": True}
    assert shown.keys() >= {"text/plain", "text/html"}
    monkeypatch.delattr(cluster, "_cached_widget")


# -- a cluster in an event loop


@pytest.mark.slow
async def test_it_leaves_no_task_in_the_event_loop(platform, holds):
    before = asyncio.all_tasks()
    async with make(n_workers=1, **LIGHT) as cluster:
        cluster.adapt(1, 3, interval="1 s")
        await holds(lambda: arrived(cluster) == 1)
        assert asyncio.all_tasks() > before
    await holds(lambda: asyncio.all_tasks() - before <= {asyncio.current_task()})
