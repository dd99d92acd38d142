"""A cluster as a script or a notebook uses it, on real sessions, and what Dask's tests expect of any cluster.

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

import asyncio
import re
import sys
from unittest import mock

import pytest
from clusters import LIGHT, arrived, make
from distributed import Client

from dask_cml import CMLCluster

pytestmark = pytest.mark.usefixtures("light")


def n_workers(cluster):
    return len(cluster.scheduler_info["workers"])


@pytest.mark.slow
def test_processes_share_one_session(platform, until):
    with (
        CMLCluster(
            n_workers=2, cpu=2, memory=2, processes=2, worker_args=[], platform="local", quiet=True
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(4, timeout=120)
        assert len(cluster.sessions) == 3
        assert {worker["nthreads"] for worker in cluster.scheduler_info["workers"].values()} == {1}
        assert cluster.plan == cluster.requested == cluster.observed
        futures = client.scatter([*range(100)])
        cluster.scale(1)
        until(lambda: n_workers(cluster) == 2)
        assert client.gather(futures) == [*range(100)]
        cluster.adapt(0, 2, interval="100 ms", wait_count=1)
        del futures
        until(lambda: n_workers(cluster) == 0)


@pytest.mark.slow
def test_logs_are_read_by_names_with_special_characters_and_addresses_of_workers(platform, until):
    name = 'it\'s $HOME "quoted" {1+1} \\ ü'
    options = {"n_workers": 2, "name": name, "platform": "local", "quiet": True}
    with CMLCluster(**options) as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=120)
        assert cluster.name == name
        workers = client.scheduler_info()["workers"].values()
        assert {worker["name"] for worker in workers} == {f"{name}-0", f"{name}-1"}
        first, second = (f"{cluster.name}-{i}" for i in range(2))
        address = next(a for a, info in cluster.scheduler_info["workers"].items() if info["name"] == second)
        assert [*cluster.get_logs(False, False, [address])] == [second]
        assert [*cluster.get_logs(cluster=False, scheduler=False, workers=first)] == [first]
        assert cluster.get_logs(cluster=False, scheduler=False, workers=False) == {}
        expected = f"invalid workers='x': expected one of Cluster, Scheduler, {first}, {second}"
        with pytest.raises(ValueError, match=re.escape(expected)):
            cluster.get_logs(workers=["x"])
        with pytest.raises(TypeError) as caught:
            cluster.get_logs(first)
        assert str(caught.value).startswith(f"invalid cluster={first!r}: ")
        assert str(caught.value).endswith(f"pass workers=[{first!r}]")


@pytest.mark.slow
def test_sessions_with_networks_of_their_own(namespaces, until):
    with (
        CMLCluster(n_workers=2, platform="local") as one,
        CMLCluster(n_workers=1, platform="local") as two,
        Client(one) as of_one,
        Client(two, set_as_default=False) as of_two,
    ):
        of_one.wait_for_workers(2, timeout=120)
        assert of_one.submit(sum, [1, 2]).result() == 3
        assert of_two.submit(sum, [3, 4]).result() == 7
        assert one.scheduler.address.endswith(":8786")
        assert two.scheduler.address.endswith(":8786")
        until(lambda: len({session.address for session in [*one.sessions, *two.sessions]} - {None}) == 5)


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


@pytest.mark.slow
async def test_it_leaves_no_task_in_the_event_loop(platform, holds):
    before = asyncio.all_tasks()
    async with make(n_workers=1, **LIGHT) as cluster:
        cluster.adapt(1, 3, interval="1 s")
        await holds(lambda: arrived(cluster) == 1)
        assert asyncio.all_tasks() > before
    await holds(lambda: asyncio.all_tasks() - before <= {asyncio.current_task()})
