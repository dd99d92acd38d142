"""A cluster as a script or a notebook uses it, on real sessions of the local platform."""

from __future__ import annotations

import logging
import re
import threading

import pytest
from distributed import Client
from distributed.deploy.adaptive import Adaptive

import dask_cml
from dask_cml import CMLCluster

pytestmark = pytest.mark.usefixtures("light")


@pytest.fixture
def cluster(platform, light):
    with CMLCluster(n_workers=2, platform="local", quiet=True) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster) as client:
        client.wait_for_workers(2, timeout=120)
        yield client


def n_workers(cluster):
    return len(cluster.scheduler_info["workers"])


def live(platform):
    return [
        session
        for session in platform.sessions()
        if session["status"] in ("scheduling", "starting", "running")
    ]


@pytest.mark.slow
def test_another_adaptive_class_may_be_used(platform, until):
    with CMLCluster(platform="local", quiet=True) as cluster, Client(cluster) as client:
        adaptive = cluster.adapt(Adaptive=Adaptive, minimum=1, maximum=2, interval="100 ms")
        assert type(adaptive) is Adaptive
        until(lambda: n_workers(cluster) == 1)
        assert client.submit(sum, [1]).result() == 1
        assert adaptive.periodic_callback.is_running()


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


def test_logs_of_cluster_scheduler_and_workers_ended_ones_too(platform, cluster, client, until):
    first, second = (f"{cluster.name}-{i}" for i in range(2))
    client.submit(print, "a task has printed this").result()
    cluster._tell("the cluster has reported this")
    until(lambda: "a task has printed this" in str(cluster.get_logs()))
    address = next(a for a, info in cluster.scheduler_info["workers"].items() if info["name"] == second)
    assert [*cluster.get_logs(False, False, [address])] == [second]
    cluster.scale(0)
    until(lambda: len(cluster.sessions) == 1)
    logs = cluster.get_logs()
    assert [*logs] == ["Cluster", "Scheduler", first, second]
    # Nothing is printed.
    assert [platform.log(session["id"]) for session in platform.sessions()] == ["", "", ""]
    assert logs["Cluster"] == "the cluster has reported this"
    assert 0 <= logs["Scheduler"].find("Scheduler at") < logs["Scheduler"].find("Retire worker")
    assert "Start worker at" in logs[first]
    assert [*cluster.get_logs(cluster=False, scheduler=False, workers=first)] == [first]
    assert cluster.get_logs(cluster=False, scheduler=False, workers=False) == {}
    expected = f"invalid worker 'x': expected one of Cluster, Scheduler, {first}, {second}"
    with pytest.raises(ValueError, match=expected):
        cluster.get_logs(workers=["x"])
    with pytest.raises(TypeError, match=rf"invalid cluster='{first}': .* pass workers=\['{first}'\]"):
        cluster.get_logs(first)


@pytest.mark.slow
def test_a_task_that_prints_works_while_the_disk_is_full(platform, tmp_path, until):
    with (
        CMLCluster(1, log_directory=str(tmp_path), name="c", platform="local") as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(1, timeout=120)
        log = tmp_path / "c" / "c-0.log"
        full = tmp_path / "full"
        full.symlink_to("/dev/full")  # every write fails for lack of space
        full.replace(log)
        assert client.submit(lambda: print("x" * 10**6)).result() is None
        log.unlink()
        assert client.submit(print, "there is space").result() is None
        until(lambda: log.exists() and "there is space" in log.read_text())
        assert "bytes of output lost: the log could not be written" in log.read_text()


async def test_job_script_launches_nothing(platform):
    cluster = CMLCluster(cpu=4, memory=16, platform="local", asynchronous=True)
    assert "cpu=4 memory=16" in cluster.job_script()
    assert platform.list_workers() == []
    await cluster.close()


@pytest.mark.parametrize(
    "name", [pytest.param("plain", marks=pytest.mark.slow), 'it\'s $HOME "quoted" {1+1} \\ ü']
)
def test_names_with_special_characters(platform, name):
    with CMLCluster(n_workers=1, name=name, platform="local") as cluster, Client(cluster) as client:
        client.wait_for_workers(1, timeout=120)
        [worker] = client.scheduler_info()["workers"].values()
        assert worker["name"] == f"{name}-0"
        assert cluster.name == name


@pytest.mark.slow
def test_close_from_two_threads(platform):
    cluster = CMLCluster(n_workers=1, platform="local")
    threads = [threading.Thread(target=cluster.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert cluster.status.name == "closed"


@pytest.mark.slow
def test_two_clusters_side_by_side(platform, capsys):
    with (
        CMLCluster(n_workers=1, platform="local", name="one") as one,
        CMLCluster(n_workers=1, platform="local", name="two") as two,
        Client(one) as of_one,
        Client(two, set_as_default=False) as of_two,
    ):
        assert of_one.submit(sum, [1, 2]).result() == 3
        assert of_two.submit(sum, [3, 4]).result() == 7
        assert one.scheduler_address != two.scheduler_address
        assert "another cluster" not in capsys.readouterr().out  # whoever gives names wants both
        assert {*CMLCluster.open()} == {one, two}
        two.close()
        assert CMLCluster.open() == [one]
        assert of_one.submit(sum, [5, 6]).result() == 11


@pytest.mark.slow
def test_close_all_closes_the_cluster_of_a_cell_that_ran_twice(platform):
    first = CMLCluster(platform="local", quiet=True)
    second = CMLCluster(platform="local", quiet=True, scheduler_args=["--no-dashboard"])
    assert second.dashboard_link == ""
    dask_cml.close_all()
    assert CMLCluster.open() == []
    closed = r"closed after [\d.]+ (s|min); 1 session, 0\.\d\d vCPU hours"
    for cluster in first, second:
        assert re.search(closed, repr(cluster))
        assert re.search(closed, cluster._repr_html_())
        assert "Sessions:" not in cluster._repr_html_()
        assert 'colspan="2"' not in cluster._repr_html_()
        assert '<strong>Dashboard:</strong> <a href=""' in cluster._repr_html_()


@pytest.mark.slow
def test_silence_logs_is_undone_at_the_end(platform):
    handler = logging.StreamHandler()
    logging.getLogger("distributed").addHandler(handler)
    try:
        for options, level in [({"silence_logs": logging.CRITICAL}, logging.CRITICAL), ({}, logging.WARNING)]:
            with CMLCluster(platform="local", **options):
                assert handler.level == level
            assert handler.level == logging.NOTSET
    finally:
        logging.getLogger("distributed").removeHandler(handler)


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
