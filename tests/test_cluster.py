"""A cluster as a script or a notebook uses it, on real sessions of the local platform."""

from __future__ import annotations

import pytest
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
def test_logs_are_read_by_names_and_addresses_of_workers(platform, until):
    """A promise says which logs there are."""
    with CMLCluster(n_workers=2, platform="local", quiet=True) as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=120)
        first, second = (f"{cluster.name}-{i}" for i in range(2))
        address = next(a for a, info in cluster.scheduler_info["workers"].items() if info["name"] == second)
        assert [*cluster.get_logs(False, False, [address])] == [second]
        assert [*cluster.get_logs(cluster=False, scheduler=False, workers=first)] == [first]
        assert cluster.get_logs(cluster=False, scheduler=False, workers=False) == {}
        expected = f"invalid worker 'x': expected one of Cluster, Scheduler, {first}, {second}"
        with pytest.raises(ValueError, match=expected):
            cluster.get_logs(workers=["x"])
        with pytest.raises(TypeError, match=rf"invalid cluster='{first}': .* pass workers=\['{first}'\]"):
            cluster.get_logs(first)


async def test_job_script_launches_nothing(platform):
    cluster = CMLCluster(cpu=4, memory=16, platform="local", asynchronous=True)
    assert "cpu=4 memory=16" in cluster.job_script()
    assert platform.list_workers() == []
    await cluster.close()


@pytest.mark.slow
def test_names_with_special_characters(platform):
    name = 'it\'s $HOME "quoted" {1+1} \\ ü'
    with CMLCluster(n_workers=1, name=name, platform="local") as cluster, Client(cluster) as client:
        client.wait_for_workers(1, timeout=120)
        [worker] = client.scheduler_info()["workers"].values()
        assert worker["name"] == f"{name}-0"
        assert cluster.name == name


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
