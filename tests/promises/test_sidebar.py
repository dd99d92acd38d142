"""JupyterLab's sidebar: a real Jupyter server with dask-labextension, by the requests of its buttons."""

import re
import uuid

import pytest
from clusters import live as live_sessions
from conftest import processes_of
from distributed import Client
from distributed.core import Status
from lab import JupyterServer, until
from shells import run_json, shell

from dask_cml import CMLCluster

pytestmark = pytest.mark.usefixtures("no_nannies")
FACTORY = {"n-workers": 1, "forward-dashboard": True, "worker-args": ["--no-nanny"]}


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
        status, model = server.request("PUT", "dask/clusters")
        assert status == 200, model
        made.append(model["id"])
        return model

    yield new
    for cluster_id in made:
        server.request("DELETE", f"dask/clusters/{cluster_id}")


@pytest.fixture
def leaves_no_session(shared_platform):
    yield
    left = live_sessions(shared_platform)
    if left:  # or the next tests would have them
        shell("delete", "--all")
    assert left == []


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("DASK_CML__PLATFORM", "local")


def test_new_scale_adapt_panes_and_shutdown(server, shared_platform, new, leaves_no_session):
    model = new()
    path = f"dask/clusters/{model['id']}"
    assert model["name"].startswith("CMLCluster ")
    until(lambda: server.request("GET", path)[1]["workers"] == 1)
    with Client(model["scheduler_address"]) as client:
        assert client.submit(sum, [1, 2]).result() == 3

    assert server.request("PATCH", path, {"workers": 2})[0] == 200
    until(lambda: server.request("GET", path)[1]["workers"] == 2)
    status, adapted = server.request("PATCH", path, {"adapt": {"minimum": 0, "maximum": 2}})
    assert (status, adapted["adapt"]) == (200, {"minimum": 0, "maximum": 2})
    until(lambda: server.request("GET", path)[1]["workers"] == 0)

    assert_has_panes(server, model["id"])
    assert server.request("DELETE", path)[0] == 204
    assert server.clusters == {}


def assert_has_panes(server, cluster_id):
    dashboard = f"dask/dashboard/{cluster_id}"
    link = f"{server.url}{dashboard}"
    status, check = server.request("GET", f"dask/dashboard-check/{link.replace('/', '%2F')}")
    assert status == 200
    assert check["isActive"]
    assert len(check["plots"]) > 20
    # Not all: the scheduler updates each of them for a while, and has no time for anybody else then.
    for title in "Task Stream", "Progress", "Workers":
        pane = check["plots"][f"Individual {title}"]
        status, page = server.request("GET", dashboard + pane)
        assert status == 200, pane
        assert re.search("<title>(Bokeh|Dask)", page), pane


def test_a_refused_launch_is_answered_with_the_reason_of_the_platform(
    server, shared_platform, leaves_no_session
):
    shared_platform.configure(quota={"sessions": 1})
    try:
        status, answer = server.request("PUT", "dask/clusters")
    finally:
        shared_platform.configure(quota=None)
    assert status == 500
    assert "exceeded quota" in str(answer)
    assert server.clusters == {}


@pytest.mark.slow
def test_shutdown_of_a_cluster_whose_scheduler_has_died(server, shared_platform, new, leaves_no_session):
    model = new()
    [row] = run_json("list")
    sessions = run_json("info", row["name"])["sessions"]
    [scheduler] = [session for session, name in sessions.items() if name == "scheduler"]
    shared_platform.evict(scheduler)
    assert server.request("DELETE", f"dask/clusters/{model['id']}")[0] == 204
    assert server.clusters == {}


@pytest.mark.slow
def test_a_cluster_of_another_program_is_listed_scaled_and_shut_down(server, leaves_no_session):
    with CMLCluster(name="of a program", n_workers=1, platform="local", quiet=True) as cluster:
        until(lambda: server.clusters.get("of a program", {}).get("workers") == 1)
        model = server.clusters["of a program"]
        assert model["scheduler_address"] == "cml://of%20a%20program"
        assert uuid.UUID(model["id"])
        assert_has_panes(server, model["id"])
        path = f"dask/clusters/{model['id']}"
        assert server.request("PATCH", path, {"workers": 2})[0] == 200
        until(lambda: server.clusters["of a program"]["workers"] == 2)
        cluster.scale(3)
        until(lambda: server.clusters["of a program"]["workers"] == 3)
        adapted = server.request("PATCH", path, {"adapt": {"minimum": 1, "maximum": 3}})[1]
        assert adapted["adapt"] == {"minimum": 1, "maximum": 3}
        until(lambda: server.clusters["of a program"]["workers"] == 1)
        assert server.request("DELETE", path)[0] == 204
        until(lambda: cluster.status == Status.closed)
    assert server.clusters == {}


@pytest.mark.slow
def test_a_cluster_of_a_shell_is_listed_with_panes_until_it_is_shut_down(
    server, environment, leaves_no_session
):
    for how in "the sidebar", "the shell":
        shell("create", "--name", "of a shell")
        until(lambda: "of a shell" in server.clusters)
        assert_has_panes(server, server.clusters["of a shell"]["id"])  # though it has no workers
        if how == "the sidebar":
            assert server.request("DELETE", f"dask/clusters/{server.clusters['of a shell']['id']}")[0] == 204
        else:
            shell("delete", "of a shell")
        until(lambda: server.clusters == {})
        assert run_json("list") == []


@pytest.mark.slow
def test_sidebar_counts_all_groups_scales_the_default_one_and_ends_only_own_clusters(
    server, monkeypatch, leaves_no_session
):
    monkeypatch.setenv("CDSW_CREATOR", "ann")
    groups = {"big": {"n_workers": 1, "cpu": 2}}
    with CMLCluster(
        name="groups", n_workers=1, worker_groups=groups, platform="local", quiet=True
    ) as cluster:
        until(lambda: server.clusters.get("groups", {}).get("workers") == 2)
        model = server.clusters["groups"]
        assert model["cores"] == 3
        path = f"dask/clusters/{model['id']}"
        # dask-labextension does nothing if it is asked for as many as it counts.
        assert server.request("PATCH", path, {"workers": 3})[0] == 200
        until(lambda: server.clusters["groups"]["workers"] == 4)
        assert server.request("PATCH", path, {"adapt": {"minimum": 0, "maximum": 1}})[0] == 200
        until(lambda: server.clusters["groups"]["workers"] == 1)
        assert server.clusters["groups"]["cores"] == 2
        status, answer = server.request("DELETE", path)
        assert status == 500
        assert "user ann created cluster 'groups'" in str(answer)
        assert "dask cml delete groups" in str(answer)
        assert cluster.status == Status.running
        assert "groups" in server.clusters
    until(lambda: server.clusters == {})


@pytest.mark.slow
def test_a_scheduler_that_hangs_delays_no_other_cluster(server, shared_platform, leaves_no_session):
    with (
        CMLCluster(name="hangs", platform="local", quiet=True) as cluster,
        CMLCluster(name="hangs, listed", platform="local", quiet=True) as listed,
    ):
        until(lambda: {"hangs", "hangs, listed"} <= {*server.clusters})
        ids = [shown.sessions[0].id for shown in (cluster, listed)]
        processes = [process for id in ids for process in processes_of(id, "CDSW_ENGINE_ID")]
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


@pytest.mark.slow
def test_the_end_of_the_server_shuts_down_only_the_clusters_of_its_sidebar(platform, tmp_path, environment):
    initial = [{"name": "at the start", "workers": 1}]
    with JupyterServer(tmp_path, FACTORY, {"initial": initial}) as server:
        until(lambda: "at the start" in server.clusters)
        model = server.request("PUT", "dask/clusters")[1]
        with CMLCluster(name="stays", n_workers=1, platform="local", quiet=True) as cluster:
            until(lambda: {*server.clusters} == {"at the start", model["name"], "stays"})
            until(lambda: server.clusters["at the start"]["workers"] == 1)
            server.stop()
            assert "Traceback" not in server.log
            assert [row["name"] for row in run_json("list")] == ["stays"]
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
        [row] = run_json("list")
        until(lambda: row["name"] in other.clusters)
        theirs = other.clusters[row["name"]]
        assert theirs["scheduler_address"] == model["scheduler_address"]
        assert other.request("DELETE", f"dask/clusters/{theirs['id']}")[0] == 204
        assert server.request("DELETE", f"dask/clusters/{model['id']}")[0] == 204
        until(lambda: (server.clusters, other.clusters) == ({}, {}))


@pytest.mark.slow
def test_a_cluster_that_outlives_the_server_ends_with_the_second_shutdown(platform, tmp_path, environment):
    with JupyterServer(tmp_path, {**FACTORY, "shutdown-on-close": False}) as server:
        server.request("PUT", "dask/clusters")
        [row] = run_json("list")
        until(lambda: run_json("list")[0]["workers"] == 1)
        for left in [row["name"]], []:
            until(lambda: server.clusters)
            [model] = server.clusters.values()
            assert server.request("DELETE", f"dask/clusters/{model['id']}")[0] == 204
            assert [row["name"] for row in run_json("list")] == left
    assert not live_sessions(platform)
