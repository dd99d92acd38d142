"""dask-labextension with clusters of ours, and with all of the project in its list: by its REST interface."""

import asyncio
import contextlib
import sys
import time
import uuid
from types import SimpleNamespace

import dask
import pytest
from clusters import create_and_leave, create_elsewhere, limits, simulate
from distributed.core import Status
from lab import JupyterServer, until
from simulated.testing import eventually, simulated

from dask_cml import jupyter
from dask_cml.cancellation import cancel
from dask_cml.jupyter import Sidebar, find_lists
from dask_cml.observers import CommandedCluster
from dask_cml.records import store
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("no_nannies")
FACTORY = {"n-workers": 1, "forward-dashboard": True, "worker-args": ["--no-nanny"]}


@pytest.mark.parametrize(
    ("session", "configured", "made"),
    [
        ("abcdefgh12345678", None, "CMLCluster"),
        (None, None, "LocalCluster"),
        ("x", "LocalCluster", "LocalCluster"),
    ],
)
def test_new_makes_a_cluster_of_ours_unless_another_one_is_configured(monkeypatch, session, configured, made):
    monkeypatch.delenv("CDSW_ENGINE_ID", raising=False)
    for name, value in {"CDSW_ENGINE_ID": session, "DASK_LABEXTENSION__FACTORY__CLASS": configured}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    default = {"module": "dask.distributed", "class": "LocalCluster", "args": [], "kwargs": {}}
    with dask.config.set({"labextension.factory": default, "cml.platform": "auto"}):
        jupyter.make_cml_clusters()
        assert dask.config.get("labextension.factory.class") == made
        kwargs = dask.config.get("labextension.factory.kwargs")
    assert ("forward-dashboard" in kwargs) == (made == "CMLCluster")


@pytest.mark.slow
def test_a_server_without_labextension_logs_this_once(platform, tmp_path):
    disabled = "--ServerApp.jpserver_extensions=dask_labextension=False"
    with JupyterServer(tmp_path, FACTORY, arguments=[disabled]) as server:
        until(lambda: "dask-labextension is missing" in server.log)
        assert server.request("GET", "dask/clusters")[0] == 404
        server.stop()
    assert server.log.count("dask-labextension is missing") == 1
    assert "Traceback" not in server.log


class Manager:
    """What there is of a DaskClusterManager."""

    def __init__(self):
        self._clusters, self._cluster_names, self._adaptives = {}, {}, {}


def test_lists_are_found_where_releases_have_them(monkeypatch):
    new, old = Manager(), Manager()
    monkeypatch.delitem(sys.modules, "dask_labextension.manager", raising=False)
    assert find_lists({}) is None
    assert find_lists({"dask_cluster_manager": SimpleNamespace(clusters={})}) is None
    assert find_lists({"dask_cluster_manager": new})[0] is new._clusters
    monkeypatch.setitem(sys.modules, "dask_labextension.manager", SimpleNamespace(manager=old))
    assert find_lists({})[0] is old._clusters
    assert find_lists({"dask_cluster_manager": new})[0] is new._clusters


@contextlib.asynccontextmanager
async def listing():
    """The sidebar in a process that lists clusters."""
    sidebar = Sidebar(({}, {}, {}), interval=0.05)
    sidebar.start()
    try:
        yield sidebar
    finally:
        await sidebar.close()


@contextlib.asynccontextmanager
async def listed(it):
    """A sidebar with one cluster that another process keeps: its id, the listed and the keeper's object."""
    creator = await create_elsewhere(it, name="c", security=True)
    [cluster] = creator.clusters
    async with listing() as sidebar:
        await eventually(lambda: sidebar._listed)
        [(cluster_id, shown)] = sidebar._listed.items()
        yield sidebar, cluster_id, shown, creator
        await shown.close()
        await eventually(lambda: cluster.status == Status.closed)


def left_over(name):
    """Create a cluster on the simulated platform that lives without its creator, and leave it."""
    return create_and_leave(name=name, platform="auto")


@simulated
async def test_names_and_ids_stay_and_a_cluster_without_keys_is_not_listed(it):
    """Another program may have its address by now, and would get what the sidebar asks."""
    creator = await create_elsewhere(it, name="open", security=False)
    async with listing() as sidebar:
        await left_over("old")
        names = sidebar._names
        await eventually(lambda: names)
        [cluster_id] = names
        assert cluster_id == str(uuid.uuid5(jupyter._IDS, store.read("old").id))
        names[cluster_id] = "new"  # by the user
        await left_over("another")
        await eventually(lambda: len(names) == 2)
        assert {*names.values()} == {"new", "another"}
        await sidebar.close()
        assert sidebar._listed == {}
    async with listing() as other:
        await eventually(lambda: len(other._listed) == 2)
        assert other._names[cluster_id] == "old"
        await asyncio.gather(*[cluster.close() for cluster in other._listed.values()])
        await eventually(lambda: not other._names)
    [cluster] = creator.clusters
    await creator.start(cluster.close())


@simulated
async def test_closed_clusters_disappear_from_the_list(it):
    async with listing() as sidebar:
        cluster = await simulate()
        sidebar._listed["a"], sidebar._names["a"], sidebar._adaptives["a"] = cluster, "A", None
        sidebar._listed["b"], sidebar._names["b"] = object(), "of another kind"
        await cluster.close()
        await eventually(lambda: "a" not in sidebar._listed)
        assert sidebar._names == {"b": "of another kind"}
        assert sidebar._adaptives == {}


@simulated
async def test_the_sidebar_scales_and_adapts_a_cluster_that_another_process_keeps(it):
    async with listed(it) as (sidebar, cluster_id, shown, creator):
        [cluster] = creator.clusters
        await shown.scale(2)
        await eventually(lambda: len(shown.scheduler_info["workers"]) == 2)
        sidebar._adaptives[cluster_id] = shown.adapt(minimum=0, maximum=1)
        sidebar._adaptives["another"] = kept = object()
        await eventually(lambda: not shown.scheduler_info["workers"])
        assert limits(cluster) == (0, 1)
        assert cluster_id in sidebar._adaptives
        # The cluster stays listed, and adapts, while its scheduler is replaced.
        it.platform.evict(store.read("c").scheduler.session)
        while shown.record.scheduler.number == 0 or shown.record.scheduler.address is None:
            assert sidebar._listed == {cluster_id: shown}
            assert cluster_id in sidebar._adaptives
            await asyncio.sleep(0.01)
        creator.call(cluster.scale, 1)  # which stops the adaptive scaling
        await eventually(lambda: cluster_id not in sidebar._adaptives)
        assert sidebar._adaptives == {"another": kept}
        words = "invalid n=3: expected at most 2, because cml"
        with dask.config.set({"cml.limits.sessions": 3}), pytest.raises(ValueError, match=words):
            await shown.scale(3)  # as dask-labextension does, which shows the error


@pytest.mark.slow
@simulated
async def test_the_last_change_in_the_sidebar_counts(it, monkeypatch):
    join, waits = CommandedCluster.from_name, [0.5, 0.0]

    @contextlib.asynccontextmanager
    async def from_name(*arguments, **named):
        await asyncio.sleep(waits.pop(0))
        async with join(*arguments, **named) as joined:
            yield joined

    async with listed(it) as (sidebar, cluster_id, shown, creator):
        with monkeypatch.context() as patch:
            patch.setattr(CommandedCluster, "from_name", from_name)
            shown.adapt(minimum=0, maximum=3)
            await asyncio.sleep(0)
            await shown.scale(1)
            await asyncio.sleep(2.0)
        assert limits(creator.clusters[0]) is None
        # A read that began before a change does not end adaptive scaling.
        await cancel(sidebar._polling)
        sidebar._adaptives[cluster_id] = shown.adapt(minimum=0, maximum=1)
        await shown._adapting
        await sidebar.polled()  # with the records of the last read
        assert cluster_id in sidebar._adaptives
        sidebar.start()


@simulated
async def test_a_cluster_that_nobody_keeps_is_scaled_and_stays_listed_while_shutdown_stops_its_sessions(it):
    """The sidebar removes it itself after that, and fails if it is gone."""
    async with listing() as sidebar:
        await left_over("c")
        await eventually(lambda: sidebar._listed)
        [(cluster_id, shown)] = sidebar._listed.items()
        await shown.scale(1)
        await eventually(lambda: len(shown.scheduler_info["workers"]) == 1, 60.0)
        stop = it.platform.stop_workers

        def stop_late(*ids):
            time.sleep(1.0)
            return stop(*ids)

        it.platform.stop_workers = stop_late
        closing = asyncio.create_task(shown.close())
        while not closing.done():
            assert cluster_id in sidebar._listed
            await asyncio.sleep(0.01)
        await closing
        await eventually(lambda: not sidebar._listed)


@pytest.mark.slow
@simulated
async def test_a_cluster_with_an_unseen_end_is_listed_until_it_is_shut_down(it):
    async with listing() as sidebar:
        await left_over("c")
        await eventually(lambda: sidebar._listed)
        record = store.read("c")
        # As on CML, where only the launcher's session is told of a session.
        it.platform.list_workers = list
        it.platform.stop_workers(*record.sessions)
        await asyncio.sleep(1.5 * timing.silence)
        [shown] = sidebar._listed.values()
        await shown.close()
        await eventually(lambda: not sidebar._listed)
        assert store.records() == []
