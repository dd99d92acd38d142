"""dask-labextension with clusters of ours, and with all of the project in its list: by its REST interface."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import dask
import psutil
import pytest
from clusters import create_and_kill, create_and_leave, create_elsewhere, log_of, simulate, write_record
from distributed import Client
from distributed.core import Status
from lab import JupyterServer, until
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster, jupyter, observers
from dask_cml.jupyter import Sidebar, find_manager
from dask_cml.records import liveness, store
from dask_cml.records.record import Record, SchedulerState
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


@pytest.fixture(scope="module")
def server(shared_platform, tmp_path_factory):
    """A Jupyter server that most tests share."""
    with JupyterServer(tmp_path_factory.mktemp("jupyter"), FACTORY) as server:
        yield server


@pytest.fixture
def new(server, leaves_no_session):
    """Make a cluster as NEW does, and return its model; it is shut down after the test."""
    made = []

    def new():
        status, model = server.ask("PUT", "dask/clusters")
        assert status == 200, model
        made.append(model["id"])
        return model

    yield new
    for cluster_id in made:
        server.ask("DELETE", f"dask/clusters/{cluster_id}")


def live_sessions(platform):
    return [
        session
        for session in platform.sessions()
        if not (session["finished_at"] or session["stop_requested"])
    ]


@pytest.fixture
def leaves_no_session(shared_platform):
    yield
    left = live_sessions(shared_platform)
    if left:  # or the next tests would have them
        shared_platform.stop_workers(*[session["id"] for session in left])
        for record in store.records():
            store.remove(record)
    assert left == []


def run(*command, **options):
    done = subprocess.run(
        [sys.executable, "-m", "dask", "cml", *command], text=True, capture_output=True, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("DASK_CML__PLATFORM", "local")


# -- what the sidebar makes


def test_new_scale_adapt_panes_and_shutdown(server, shared_platform, new, leaves_no_session):
    model = new()
    path = f"dask/clusters/{model['id']}"
    assert model["name"].startswith("CMLCluster ")
    until(lambda: server.ask("GET", path)[1]["workers"] == 1)
    with Client(model["scheduler_address"]) as client:
        assert client.submit(sum, [1, 2]).result() == 3

    assert server.ask("PATCH", path, {"workers": 2})[0] == 200
    until(lambda: server.ask("GET", path)[1]["workers"] == 2)
    status, adapted = server.ask("PATCH", path, {"adapt": {"minimum": 0, "maximum": 2}})
    assert (status, adapted["adapt"]) == (200, {"minimum": 0, "maximum": 2})
    until(lambda: server.ask("GET", path)[1]["workers"] == 0)

    assert_has_panes(server, model["id"])
    assert server.ask("DELETE", path)[0] == 204
    assert server.clusters == {}


def assert_has_panes(server, cluster_id):
    dashboard = f"dask/dashboard/{cluster_id}"
    link = f"{server.url}{dashboard}"
    status, check = server.ask("GET", f"dask/dashboard-check/{link.replace('/', '%2F')}")
    assert status == 200
    assert check["isActive"]
    assert len(check["plots"]) > 20
    # Not all: the scheduler updates each of them for a while, and has no time for anybody else then.
    for title in "Task Stream", "Progress", "Workers":
        pane = check["plots"][f"Individual {title}"]
        status, page = server.ask("GET", dashboard + pane)
        assert status == 200, pane
        assert re.search("<title>(Bokeh|Dask)", page), pane


def test_a_refused_launch_is_answered_with_the_reason_of_the_platform(
    server, shared_platform, leaves_no_session
):
    shared_platform.configure(quota={"sessions": 1})
    try:
        status, answer = server.ask("PUT", "dask/clusters")
    finally:
        shared_platform.configure(quota=None)
    assert status == 500
    assert "exceeded quota" in str(answer)
    assert server.clusters == {}


@pytest.mark.slow
def test_shutdown_of_a_cluster_whose_scheduler_has_died(server, shared_platform, new, leaves_no_session):
    model = new()
    [record] = store.records()
    shared_platform.evict(record.scheduler.session)
    assert server.ask("DELETE", f"dask/clusters/{model['id']}")[0] == 204
    assert server.clusters == {}


# -- what others make


@pytest.mark.slow
def test_a_cluster_of_another_program_is_listed_scaled_and_shut_down(server, leaves_no_session):
    with CMLCluster(name="of a program", n_workers=1, platform="local", quiet=True) as cluster:
        until(lambda: server.clusters.get("of a program", {}).get("workers") == 1)
        model = server.clusters["of a program"]
        assert model["scheduler_address"] == "cml://of%20a%20program"
        assert uuid.UUID(model["id"])
        assert_has_panes(server, model["id"])
        path = f"dask/clusters/{model['id']}"
        assert server.ask("PATCH", path, {"workers": 2})[0] == 200
        until(lambda: server.clusters["of a program"]["workers"] == 2)
        cluster.scale(3)
        until(lambda: server.clusters["of a program"]["workers"] == 3)
        adapted = server.ask("PATCH", path, {"adapt": {"minimum": 1, "maximum": 3}})[1]
        assert adapted["adapt"] == {"minimum": 1, "maximum": 3}
        until(lambda: server.clusters["of a program"]["workers"] == 1)
        assert server.ask("DELETE", path)[0] == 204
        until(lambda: cluster.status == Status.closed)
    assert server.clusters == {}


@pytest.mark.slow
def test_a_cluster_of_a_shell_is_listed_until_it_is_shut_down(server, environment, leaves_no_session):
    for how in "the sidebar", "the shell":
        run("create", "--name", "of a shell")
        until(lambda: "of a shell" in server.clusters)
        if how == "the sidebar":
            assert server.ask("DELETE", f"dask/clusters/{server.clusters['of a shell']['id']}")[0] == 204
        else:
            run("delete", "of a shell")
        until(lambda: server.clusters == {})
        assert store.records() == []


@pytest.mark.slow
def test_a_cluster_without_workers_has_panes(server, leaves_no_session):
    with CMLCluster(name="empty", platform="local", quiet=True):
        until(lambda: "empty" in server.clusters)
        assert_has_panes(server, server.clusters["empty"]["id"])


@pytest.mark.slow
def test_sidebar_counts_all_groups_and_scales_the_default_one(server, leaves_no_session):
    groups = {"big": {"n_workers": 1, "cpu": 2}}
    with CMLCluster(name="groups", n_workers=1, worker_groups=groups, platform="local", quiet=True):
        until(lambda: server.clusters.get("groups", {}).get("workers") == 2)
        model = server.clusters["groups"]
        assert model["cores"] == 3
        path = f"dask/clusters/{model['id']}"
        # dask-labextension does nothing if it is asked for as many as it counts.
        assert server.ask("PATCH", path, {"workers": 3})[0] == 200
        until(lambda: server.clusters["groups"]["workers"] == 4)
        assert server.ask("PATCH", path, {"adapt": {"minimum": 0, "maximum": 1}})[0] == 200
        until(lambda: server.clusters["groups"]["workers"] == 1)
        assert server.clusters["groups"]["cores"] == 2
    until(lambda: server.clusters == {})


@pytest.mark.slow
def test_shutdown_in_the_sidebar_refuses_a_cluster_of_another_user(server, monkeypatch, leaves_no_session):
    monkeypatch.setenv("CDSW_CREATOR", "ann")
    with CMLCluster(name="of ann", platform="local", quiet=True) as cluster:
        until(lambda: "of ann" in server.clusters)
        status, answer = server.ask("DELETE", f"dask/clusters/{server.clusters['of ann']['id']}")
        assert status == 500
        assert "user ann created cluster 'of ann'" in str(answer)
        assert "dask cml delete 'of ann'" in str(answer)
        assert cluster.status == Status.running
        assert "of ann" in server.clusters


@pytest.mark.slow
def test_a_scheduler_that_hangs_delays_no_other_cluster(server, shared_platform, leaves_no_session):
    with (
        CMLCluster(name="hangs", platform="local", quiet=True) as cluster,
        CMLCluster(name="hangs, listed", platform="local", quiet=True) as listed,
    ):
        until(lambda: {"hangs", "hangs, listed"} <= {*server.clusters})
        processes = [process for shown in (cluster, listed) for process in scheduler_processes(shown)]
        assert processes
        for process in processes:
            process.suspend()
        try:
            with CMLCluster(name="answers", platform="local", quiet=True):
                until(lambda: "answers" in server.clusters)
                assert server.clusters["hangs, listed"]["workers"] == 0
            until(lambda: "answers" not in server.clusters)
        finally:
            for process in processes:
                process.resume()
    until(lambda: server.clusters == {})


def scheduler_processes(cluster):
    """Processes of the scheduler's session."""
    session = cluster.sessions[0].id
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("CDSW_ENGINE_ID") == session:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


# -- the end of the server


@pytest.mark.slow
def test_the_end_of_the_server_shuts_down_only_the_clusters_of_its_sidebar(platform, tmp_path, environment):
    initial = [{"name": "at the start", "workers": 1}]
    with JupyterServer(tmp_path, FACTORY, {"initial": initial}) as server:
        until(lambda: "at the start" in server.clusters)
        model = server.ask("PUT", "dask/clusters")[1]
        with CMLCluster(name="stays", n_workers=1, platform="local", quiet=True) as cluster:
            until(lambda: {*server.clusters} == {"at the start", model["name"], "stays"})
            until(lambda: server.clusters["at the start"]["workers"] == 1)
            server.stop()
            assert "Traceback" not in server.log
            assert [record.name for record in store.records()] == ["stays"]
            assert {session["id"] for session in live_sessions(platform)} == {
                session.id for session in cluster.sessions
            }
            with Client(cluster) as client:
                assert client.submit(sum, [1, 2]).result() == 3


@pytest.mark.slow
def test_two_servers_list_the_clusters_of_each_other(
    server, shared_platform, new, tmp_path, leaves_no_session
):
    with JupyterServer(tmp_path, FACTORY) as other:
        model = new()
        [record] = store.records()
        until(lambda: record.name in other.clusters)
        theirs = other.clusters[record.name]
        assert theirs["scheduler_address"] == model["scheduler_address"]
        assert other.ask("DELETE", f"dask/clusters/{theirs['id']}")[0] == 204
        assert server.ask("DELETE", f"dask/clusters/{model['id']}")[0] == 204
        assert (server.clusters, other.clusters) == ({}, {})


# -- without dask-labextension


@pytest.mark.slow
def test_a_server_without_labextension_logs_this_once(platform, tmp_path):
    disabled = "--ServerApp.jpserver_extensions=dask_labextension=False"
    with JupyterServer(tmp_path, FACTORY, arguments=[disabled]) as server:
        until(lambda: "dask-labextension is missing" in server.log)
        assert server.ask("GET", "dask/clusters")[0] == 404
        server.stop()
    assert server.log.count("dask-labextension is missing") == 1
    assert "Traceback" not in server.log


def test_extension_is_where_servers_look_for_it():
    assert (Path(sys.prefix) / "etc/jupyter/jupyter_server_config.d/dask_cml.json").is_file()


class Manager:
    """What there is of a DaskClusterManager."""

    def __init__(self):
        self._clusters, self._cluster_names, self._adaptives = {}, {}, {}


@pytest.mark.parametrize("place", ["settings", "module", "both"])
def test_manager_is_found_where_releases_have_it(monkeypatch, place):
    manager = Manager()
    settings = {} if place == "module" else {"dask_cluster_manager": manager}
    module = SimpleNamespace(manager=Manager() if place == "both" else manager)
    if place != "settings":
        monkeypatch.setitem(sys.modules, "dask_labextension.manager", module)
    assert find_manager(settings) is manager


def test_an_unsupported_labextension_manager_is_not_changed(monkeypatch):
    monkeypatch.delitem(sys.modules, "dask_labextension.manager", raising=False)
    assert find_manager({}) is None
    assert find_manager({"dask_cluster_manager": SimpleNamespace(clusters={})}) is None


# -- one step after another


@contextlib.asynccontextmanager
async def listing():
    """The sidebar in a process that lists clusters."""
    sidebar = Sidebar(Manager(), interval=0.05)
    sidebar.start()
    try:
        yield sidebar
    finally:
        await sidebar.close()


def left_over(name):
    """Create a cluster on the simulated platform that lives without its creator, and leave it."""
    return create_and_leave(name=name, platform="auto")


@simulated
async def test_name_that_the_user_gave_in_the_sidebar_stays(it):
    async with listing() as sidebar:
        await left_over("old")
        names = sidebar._names
        await eventually(lambda: names)
        [cluster_id] = names
        names[cluster_id] = "new"
        await left_over("another")
        await eventually(lambda: len(names) == 2)
        assert names[cluster_id] == "new"
        await asyncio.gather(*[cluster.close() for cluster in sidebar._listed.values()])
        await eventually(lambda: not names)


@simulated
async def test_id_is_the_same_for_another_server(it):
    async with listing() as sidebar:
        await left_over("c")
        await eventually(lambda: sidebar._listed)
        await sidebar.close()
        other = Sidebar(Manager(), interval=0.05)
        assert sidebar._listed == {}
        other.start()
        try:
            await eventually(lambda: other._listed)
            [(cluster_id, cluster)] = other._listed.items()
            assert cluster_id == str(uuid.uuid5(jupyter._IDS, store.read("c").id))
            await cluster.close()
        finally:
            await other.close()


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
    creator = await create_elsewhere(it, name="c", security=True)
    [cluster] = creator.clusters
    async with listing() as sidebar:
        await eventually(lambda: sidebar._listed)
        [(cluster_id, listed)] = sidebar._listed.items()
        listed.scale(2)
        await eventually(lambda: listed.worker_groups["default"].n_arrived == 2)
        sidebar._adaptives[cluster_id] = listed.adapt(minimum=0, maximum=1)
        sidebar._adaptives["another"] = kept = object()
        await eventually(lambda: listed.worker_groups["default"].n_workers == 0)
        assert cluster.view.limits() == listed.view.limits()
        assert cluster_id in sidebar._adaptives
        creator.call(cluster.scale, 1)  # which stops the adaptive scaling
        await eventually(lambda: cluster_id not in sidebar._adaptives)
        assert sidebar._adaptives == {"another": kept}
        words = "invalid n=3: expected at most 2, because cml"
        with dask.config.set({"cml.limits.sessions": 3}), pytest.raises(ValueError, match=words):
            listed.scale(3)  # as dask-labextension does, which shows the error
        await listed.close()
        await eventually(lambda: cluster.status == Status.closed)


@simulated
async def test_the_sidebar_scales_a_cluster_that_nobody_keeps(it):
    async with listing() as sidebar:
        await left_over("c")
        await eventually(lambda: sidebar._listed)
        [listed] = sidebar._listed.values()
        listed.scale(1)
        try:
            await eventually(lambda: listed.worker_groups["default"].n_arrived == 1, 60.0)
        finally:
            await listed.close()


@simulated
async def test_a_listed_cluster_is_no_open_cluster_of_the_process(it):
    async with listing() as sidebar:
        await left_over("c")
        await eventually(lambda: sidebar._listed)
        assert CMLCluster.open() == []
        async with simulate(name="mine") as mine:
            assert CMLCluster.open() == [mine]
            assert "another cluster" not in log_of(mine)
        await asyncio.gather(*[cluster.close() for cluster in sidebar._listed.values()])


@simulated
async def test_a_cluster_without_keys_is_not_listed(it):
    """Another program may have its address by now, and would get what the sidebar asks."""
    creator = await create_elsewhere(it, name="open", security=False)
    async with listing() as sidebar:
        await left_over("c")
        await eventually(lambda: sidebar._listed)
        assert [*sidebar._names.values()] == ["c"]
        await asyncio.gather(*[cluster.close() for cluster in sidebar._listed.values()])
    [cluster] = creator.clusters
    await creator.start(cluster.close())


@simulated
async def test_stale_record_is_not_listed_and_not_asked_for_all_the_time(it, monkeypatch):
    async with listing() as sidebar:
        asked = []

        async def counted(records, **options):
            asked.extend(record.name for record in records)
            return await judge(records, **{"timeout": 120, **options})

        judge = liveness.judge
        monkeypatch.setattr(liveness, "judge", counted)
        monkeypatch.setattr(observers, "_RETRY", 3600.0)
        write_record(Record("stale", scheduler=SchedulerState(address="tcp://127.0.0.1:9", id="Scheduler-1")))
        await left_over("alive")
        await eventually(lambda: len(sidebar._listed) == 1)
        assert [*sidebar._names.values()] == ["alive"]
        [cluster] = sidebar._listed.values()
        await cluster.close()
        await eventually(lambda: not sidebar._listed)
        assert asked.count("stale") == 1


@pytest.mark.slow
@simulated
async def test_a_cluster_with_an_unseen_end_is_listed_until_its_scheduler_has_been_silent_for_long(it):
    async with listing() as sidebar:
        await left_over("c")
        await eventually(lambda: sidebar._listed)
        record = store.read("c")
        # As on CML, where only the launcher's session is told of a session.
        it.platform.list_workers = list
        it.platform.stop_workers(*record.sessions)
        await asyncio.sleep(timing.silence / 2)
        assert sidebar._listed
        await eventually(lambda: not sidebar._listed)
        assert [left.id for left in store.records()] == [record.id]


@pytest.mark.slow
@simulated
async def test_a_cluster_whose_creator_was_killed_ends_as_an_orphan_though_the_sidebar_lists_it(it):
    async with listing() as sidebar:
        await create_and_kill(it, name="orphan", security=True, orphan_timeout="30s")
        await eventually(lambda: sidebar._listed)
        await eventually(lambda: not sidebar._listed)
        assert store.records() == []
