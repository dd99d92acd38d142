"""What a user is told, and where."""

import asyncio
import re
import time

import dask
import distributed
import pytest
from clusters import LIGHT, arrived, connected, lines_of, log_of, make, simulate, supplied
from distributed import Client, wait
from programs import Program
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster

NO_FPGA = "3 tasks need FPGA=1, which no worker group offers"
NO_GPU = "1 task needs GPU=1; worker group gpu offers it, but has no workers: "

#: Futures of earlier releases are cancelled without a reason.
GIVES_REASONS = hasattr(distributed.client, "FutureCancelledError")


@pytest.mark.parametrize("quiet", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_script_writes_one_line_when_its_cluster_has_started_unless_it_is_quiet(platform, light, quiet):
    code = f'with CMLCluster(n_workers=1, name="dawn", quiet={quiet}): pass'
    returned, out, err = Program(code).ends()
    assert (returned, out) == (0, "")
    started = (
        r"Cluster dawn started in [\d.]+ (s|min)( with 1 worker|; its worker connects when it has started)\n"
    )
    assert re.fullmatch("" if quiet else started, err)


@pytest.mark.parametrize("quiet", [False, True])
@simulated
async def test_lines_of_a_cluster_are_printed_unless_it_is_quiet(it, quiet, capsys):
    async with supplied(name="night", n_workers=1, quiet=quiet) as cluster:
        it.platform.evict(it.platform.running["night-0"])
        await eventually(lambda: connected(cluster) == {"night-1"})
        logs = await cluster.get_logs()
        assert "Worker night-0 lost: evicted or killed by the platform" in logs["Cluster"]
    assert ("Worker night-0 lost" in capsys.readouterr().out) is not quiet


@simulated
async def test_a_cluster_shows_its_workers_and_sessions_where_it_is_the_last_line_of_a_cell(it):
    async with supplied(name="night", n_workers=1, cpu=2) as cluster:
        for words in ("CMLCluster(night, 'tcp://", "workers=1", "threads=2"):
            assert words in repr(cluster)
        for words in ("night-scheduler", "night-0", "running"):
            assert words in cluster._repr_html_()
        it.platform.configure({"sessions": 2})
        cluster.scale(3)
        await eventually(lambda: "2 pending" in repr(cluster))
        cluster.adapt(1, 4)
        assert "adapts between 1 and 4" in repr(cluster)
    assert re.search(r"closed after .*; 2 sessions, \d\.\d\d vCPU hours\)", repr(cluster))


@simulated
async def test_the_dashboards_link_is_that_of_the_schedulers_session(it):
    async with simulate(name="night") as cluster:
        session = it.platform.running["night-scheduler"]
        assert cluster.dashboard_link.startswith(f"https://{session}.cml.example.com/")


@simulated
async def test_a_cluster_without_workers_asks_for_some_when_tasks_wait(it):
    async with simulate(name="night") as cluster, Client(cluster, asynchronous=True) as client:
        await asyncio.sleep(60.0)
        assert lines_of(cluster) == []
        future = client.submit(sum, [1, 2])
        await eventually(lambda: lines_of(cluster))
        words = "the cluster has no workers: call cluster.scale(n) or cluster.adapt()"
        assert lines_of(cluster)[0].endswith(words)
        assert "the cluster has no workers" in repr(cluster)
        cluster.scale(1)
        assert await future == 3
        await eventually(lambda: cluster.problem is None)


@simulated
async def test_tasks_that_no_group_can_run_are_a_problem_until_one_offers_what_they_need(it):
    async with simulate(name="night") as cluster, Client(cluster, asynchronous=True) as client:
        futures = client.map(abs, range(3), resources={"FPGA": 1})
        await eventually(lambda: cluster.problem == NO_FPGA)
        assert f"problem: {NO_FPGA}" in repr(cluster)
        assert NO_FPGA in cluster._repr_html_()
        assert lines_of(cluster) == [f"Cluster night cannot run all tasks: {NO_FPGA}"]
        await cluster.add_worker_group("fpga", n_workers=1, resources={"FPGA": 1})
        assert await client.gather(futures) == [*range(3)]
        await eventually(lambda: cluster.problem is None)


@simulated
async def test_tasks_for_a_group_without_workers_name_the_call_that_scales_it(it):
    async with (
        simulate(name="night", worker_groups={"gpu": {"nvidia_gpu": 1}}) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        future = client.submit(abs, 1, resources={"GPU": 1})
        call = "call cluster.scale(1, worker_group='gpu')"
        await eventually(lambda: f"Cluster night cannot run all tasks: {NO_GPU}{call}" in log_of(cluster))
        cluster.scale(1, worker_group="gpu")
        assert await future == 1


@simulated
async def test_a_task_for_a_worker_that_does_not_exist_is_told(it):
    async with supplied(name="night", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        future = client.submit(abs, 1, workers=["night-7"])
        words = "1 task is restricted to night-7, which the cluster does not have"
        await eventually(lambda: f"Cluster night cannot run all tasks: {words}" in log_of(cluster))
        await future.cancel()


@simulated
async def test_adapt_without_a_maximum_says_which_one_it_takes(it, caplog):
    async with simulate(name="night") as cluster:
        cluster.adapt()
        words = "Cluster night adapts to at most 100 workers: adapt() got no finite maximum"
        await eventually(lambda: words in caplog.text)


@simulated
async def test_a_second_cluster_of_a_process_says_how_to_shut_the_first_one_down(it):
    async with simulate() as one, simulate(name="named"), simulate() as two:
        [line] = [line for line in lines_of(two) if "another cluster" in line]
        words = r"This process has another cluster, open for [\d.]+ (s|min)\. To shut it down, run: (.*)"
        command = re.fullmatch(words, line)
        assert command
        assert command[2] == f"from dask_cml import CMLCluster; CMLCluster.from_name({one.name!r}).shutdown()"
        assert {cluster.name for cluster in CMLCluster.open()} == {one.name, "named", two.name}


@simulated
async def test_scattered_data_that_was_lost_names_the_reason(it):
    async with supplied(name="night", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        [data] = await client.scatter([b"data"])
        it.platform.evict(it.platform.running["night-0"])
        await eventually(lambda: data.status == "cancelled")
        with pytest.raises(Exception, match="cancelled for reason: " if GIVES_REASONS else None):
            await data


@pytest.fixture(scope="module")
def ended(shared_platform, tmp_path_factory):
    """The logs of a cluster whose workers have stopped, their folder, and what CML's console shows."""
    folder = tmp_path_factory.mktemp("logs")
    options = {"name": "night", "n_workers": 2, "log_directory": str(folder / "logs"), "platform": "local"}
    with CMLCluster(**options, **LIGHT) as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=120)
        client.submit(print, "a task has printed this").result()
        while "a task has printed this" not in str(cluster.get_logs()):
            time.sleep(0.1)
        cluster.scale(0)
        while len(cluster.sessions) > 1:
            time.sleep(0.1)
        logs = cluster.get_logs()
        shown = [shared_platform.log(session["id"]) for session in shared_platform.sessions()]
    return logs, folder / "logs" / "night", shown


def test_logs_are_those_of_the_cluster_the_scheduler_and_each_worker_ended_ones_too(ended):
    logs, _, shown = ended
    assert [*logs] == ["Cluster", "Scheduler", "night-0", "night-1"]
    assert logs["Cluster"] == ""
    assert "Scheduler at" in logs["Scheduler"]
    assert all("Start worker at" in logs[name] for name in ("night-0", "night-1"))
    # CML's console shows them only if a program fails.
    assert shown == ["", "", ""]


def test_a_folder_for_logs_keeps_them_after_the_end(ended):
    _, folder, _ = ended
    assert "Scheduler at" in (folder / "night-scheduler.log").read_text()
    assert "Start worker at" in (folder / "night-0.log").read_text()


@pytest.mark.slow
def test_the_output_of_a_scheduler_that_cannot_run_is_in_the_error(platform, light):
    with pytest.raises(Exception, match="no_such_module"):
        CMLCluster(platform="local", quiet=True, scheduler_args=["--preload", "no_such_module"])


#: The disk is spilled to only by data that a worker manages, so its looks at all memory are off.
SPILLS = {
    "distributed.worker.memory.terminate": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.target": 0.3,
    "distributed.worker.memory.pause": 0.6,
}


@pytest.mark.slow
async def test_a_worker_whose_memory_and_disk_are_full_is_told_and_others_come_under_adapt(
    platform, no_nannies, holds
):
    def block(n):
        import numpy as np

        return np.random.default_rng(n).integers(0, 2**60, 2**22)  # 32 MiB

    def is_told():
        return "worker night-0 has spilled" in repr(cluster)

    with dask.config.set(SPILLS):
        cluster = await make(name="night", n_workers=1, memory=1, scratch="500 MB")
    async with cluster, Client(cluster, asynchronous=True) as client:
        await client.wait_for_workers(1)
        blocks = client.map(block, range(40))  # 1.3 GB
        await holds(is_told)
        assert "GB and is paused: scale up, or give workers more memory" in repr(cluster)
        assert "is paused: scale up" in cluster._repr_html_()
        await holds(lambda: "Cluster night: worker night-0 has spilled" in log_of(cluster))
        cluster.adapt(minimum=1, maximum=3, interval="200 ms")
        await wait(blocks)
        assert arrived(cluster) >= 2
        cluster.scale(3)  # adaptive scaling could stop night-0 once it holds no results
        for future in blocks:
            future.release()
        await holds(lambda: not is_told())
        assert await client.submit(sum, [1, 2], workers=["night-0"]) == 3
