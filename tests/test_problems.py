"""Problems of a cluster, words and pauses: errors, tasks that cannot run, sessions that wait or fail."""

import asyncio
import contextlib
import math
import re
from types import SimpleNamespace

import dask
import pytest
from clusters import (
    arrived,
    cut_off,
    lines_of,
    log_of,
    rebuild,
    scheduler_of,
    simulate,
    step_in,
    step_out,
    stopped_clock,
    who_gave_up,
)
from distributed import Client
from distributed.core import Status
from simulated.shell import shell
from simulated.testing import eventually, simulated

from dask_cml import output
from dask_cml.core import workers as module
from dask_cml.core.look import Look
from dask_cml.core.workers import Workers
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.observers import Observers
from dask_cml.scheduler.plugin import CMLSchedulerPlugin
from dask_cml.sessions import process
from dask_cml.sessions.causes import Cause, Loss
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("light")


@pytest.mark.parametrize("moment", ["looks for losses", "takes the board", "checks the scheduler"])
@simulated
async def test_a_programming_error_is_logged_once_and_is_a_problem_until_it_passes(it, moment, caplog):
    async with simulate(n_workers=1) as cluster:
        calls = []

        async def fail(*_, **__):
            calls.append(1)
            raise AttributeError("no such part")

        step_in(cluster, moment, fail)
        with contextlib.ExitStack() as stack:
            if moment == "checks the scheduler":
                stack.callback(cut_off(cluster))
            await eventually(lambda: len(calls) > 3)
            assert "AttributeError('no such part')" in cluster.problem
            assert "AttributeError('no such part')" in repr(cluster)
        step_out(cluster, moment)
        await eventually(lambda: cluster.problem is None)
    assert output.flush(60)
    logged = [record for record in caplog.records if "no such part" in (record.exc_text or "")]
    assert len(logged) == 1


@simulated
async def test_an_error_of_a_poll_of_all_clusters_is_logged_once(it, caplog):
    class Broken(Observers):
        polls = 0

        async def polled(self):
            self.polls += 1
            raise AttributeError("no such list")

    observers = Broken(interval=0.01)
    observers.start()
    await eventually(lambda: observers.polls > 3)
    await observers.close()
    assert output.flush(60)
    logged = [record for record in caplog.records if "no such list" in (record.exc_text or "")]
    assert len(logged) == 1


@simulated
async def test_close_tries_again_after_an_error_of_dask_and_waits_for_no_file(it, caplog):
    async def fail():
        del cluster._close_dask
        raise AttributeError("comm")

    cluster = await simulate()
    cluster._close_dask = fail
    step_in(cluster, "writes the record", lambda *_, **__: asyncio.sleep(3600))
    with pytest.raises(AttributeError):
        await cluster.close()
    await cluster.close()
    assert cluster.status == Status.closed
    assert it.platform.live == []
    assert "not done in" in caplog.text


NO_FPGA = "3 tasks need FPGA=1, which no worker group offers"
NO_GPU = "1 task needs GPU=1; worker group gpu offers it, but has no workers: "
CALL = "call cluster.scale(1, worker_group='gpu')"


def reported(cluster):
    """The lines about tasks that cannot run."""
    return [line for line in lines_of(cluster) if "cannot run all tasks" in line]


@simulated
async def test_a_need_that_no_group_offers_is_a_problem_until_one_offers_it(it):
    async with (
        simulate(name="mine", worker_groups={"gpu": {"nvidia_gpu": 1}}) as cluster,
        rebuild("mine") as remote,
        Client(cluster, asynchronous=True) as client,
    ):
        assert cluster.problem is None
        future = client.submit(abs, -1, resources={"GPU": 1})
        await eventually(lambda: cluster.problem == f"{NO_GPU}{CALL}")
        cluster.scale(1, worker_group="gpu")
        assert await future == 1
        del future
        cluster.scale(0, worker_group="gpu")
        await eventually(lambda: not cluster.workers)
        futures = client.map(abs, range(3), resources={"FPGA": 1})
        await eventually(lambda: f"problem: {NO_FPGA}" in repr(cluster))
        await eventually(lambda: remote.problem == NO_FPGA)
        futures += client.map(abs, range(3, 5), resources={"FPGA": 1})
        await eventually(lambda: cluster.problem == NO_FPGA.replace("3", "5"))
        futures += client.map(abs, range(5, 7), resources={"LICENSE": 1})
        await eventually(lambda: "; 2 tasks need LICENSE=1" in cluster.problem)
        assert reported(cluster) == [
            f"Cluster mine cannot run all tasks: {NO_GPU}{CALL}",
            f"Cluster mine cannot run all tasks: {NO_FPGA}",
            f"Cluster mine cannot run all tasks: {NO_FPGA.replace('3', '2').replace('FPGA', 'LICENSE')}",
        ]
        await cluster.add_worker_group("fpga", n_workers=1, resources={"FPGA": 3, "LICENSE": 1})
        assert await client.gather(futures) == [*range(7)]
        await eventually(lambda: cluster.problem is remote.problem is None)
        again = client.submit(abs, 7, resources={"GPU": 1})
        await eventually(lambda: reported(cluster)[3:] == reported(cluster)[:1])
        del again


@simulated
async def test_queued_sessions_are_told_although_the_scheduler_does_not_say_what_tasks_need(it, monkeypatch):
    def fail(self):
        raise KeyError("tasks")

    monkeypatch.setattr(CMLSchedulerPlugin, "demand", fail)
    async with simulate(n_workers=1) as cluster:
        it.platform.configure({"sessions": 2}, waits_for_room=True)
        cluster.scale(2)
        await eventually(lambda: "1 of 2 worker sessions queued" in log_of(cluster))
        await asyncio.sleep(30.0)
        assert log_of(cluster).count("queued") == 1


@simulated
async def test_tasks_for_connected_or_wanted_workers_are_no_problem(it):
    async with (
        simulate(
            name="mine", n_workers=1, worker_groups={"gpu": {"processes": 2, "worker_args": []}}
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await eventually(lambda: arrived(cluster) == 1)
        it.platform.doom("silent")
        cluster.scale(1, worker_group="gpu")
        [(address, worker)] = cluster.scheduler_info["workers"].items()
        known = ["mine-0", address, worker["host"], "mine-gpu-0-1"]
        futures = [client.submit(abs, i, workers=[name]) for i, name in enumerate(known)]
        assert await client.gather(futures[:3]) == [0, 1, 2]
        await eventually(lambda: scheduler_of(it, cluster).unrunnable)
        await asyncio.sleep(2 * timing.look)
        assert cluster.problem is None
        futures.append(client.submit(abs, 4, workers=["tcp://10.0.0.8:1"]))
        words = "1 task is restricted to tcp://10.0.0.8:1, which the cluster does not have"
        await eventually(lambda: cluster.problem == words)
        assert words in cluster._repr_html_()


@pytest.fixture
def impatience(monkeypatch):
    """What waits for half a second is said to wait; the time-outs are shorter than what the tests wait."""
    monkeypatch.setattr(process, "WAITS_AFTER", 0.5)
    with dask.config.set({"cml.api.poll-interval": "200ms", "cml.quota-retry": "500ms"}):
        yield


@pytest.mark.usefixtures("impatience")
@simulated
async def test_a_scheduler_that_waits_for_room_is_shown_so_and_workers_that_are_earlier_connect(it):
    it.platform.configure({"sessions": 0}, waits_for_room=True)
    cluster = simulate(name="lab", n_workers=1)
    start = asyncio.ensure_future(cluster)
    await eventually(lambda: cluster.scheduler is not None and cluster.scheduler.waits_for)
    assert re.search(r", scheduler queued for \d+ s, starting\)", repr(cluster))
    await asyncio.sleep(30)
    assert "starting, queued for " in await shell("list")
    assert '"n_waiting": 1,' in await shell("group", "list", "lab", "--json")  # the worker's session alone
    it.platform.configure()
    async with await start:
        await eventually(lambda: arrived(cluster) == 1)
        assert len(it.platform.all) == 2


@pytest.mark.usefixtures("impatience")
@simulated
async def test_the_reason_of_a_wait_is_reported_once_with_what_helps(it):
    it.platform.configure(quota={"sessions": 1}, waits_for_room=True)
    async with simulate(name="lab", n_workers=1) as cluster:
        await eventually(lambda: ": 1 of 1 worker sessions queued" in log_of(cluster))
        assert cluster._repr_html_().count("queued for ") == 2
        [worker] = cluster.workers.values()
        for used in (50, 51):
            it.platform.set(worker.session_id, k8sMessage=f"exceeded quota: pods, used: pods={used}")
            await eventually(lambda used=used: str(used) in worker.reason)
        await eventually(lambda: "OVERRIDE_PODQUOTA" in log_of(cluster))
        await asyncio.sleep(30.0)
        [line] = [line for line in lines_of(cluster) if "exceeded" in line]
        assert re.search(r"worker sessions queued: exceeded quota: pods, .* use fewer, larger workers", line)
        it.platform.configure()
        await eventually(lambda: arrived(cluster) == 1)


KILLED = Loss(Cause.KILLED, "evicted or killed by the platform")
OUT_OF_MEMORY = Loss(Cause.OUT_OF_MEMORY, "out of memory", of_task=True)
EVICTED, CLOSED = Loss(Cause.EVICTED, "evicted"), Loss(Cause.CLOSED, "closed")
ENDED = Loss(Cause.PROGRAM_ENDED, "its program ended")


@pytest.fixture
def clock(monkeypatch):
    return stopped_clock(monkeypatch, module)


@pytest.fixture
def lines():
    return []


@pytest.fixture
def workers(clock, lines):
    groups = SimpleNamespace(workers=lambda _: [f"mine-{n}" for n in range(5)], adapts=lambda _: False)
    options = SimpleNamespace(name="mine")
    core = SimpleNamespace(options=options, groups=groups, workers={}, _tell=lines.append)
    core.processes = Workers(core)
    return core.processes


@pytest.fixture
def backoff(workers):
    return workers.backoff()


@pytest.fixture
def lose(workers):
    def lose(losses, began=math.inf, lasted=0.0):
        lost = SimpleNamespace(launched_at=began, connected_for=lasted)
        Look(workers._cluster)._count("default", losses, [lost])

    return lose


@pytest.fixture
def refuse(workers):
    def refuse():
        workers._cluster.workers = dict.fromkeys(["mine-0", "mine-1", "mine-2"])
        workers._count("default", [], [LaunchRefused("mine-3", "quota")], math.inf)

    return refuse


@pytest.fixture
def fail(workers):
    def fail(n=1, began=math.inf):
        workers._count("default", [], [CMLError("it ended")] * n, began)

    return fail


def test_the_pause_doubles_with_each_failure_until_nothing_is_launched(backoff, lines, clock, fail):
    pauses = []
    for n in range(3, -1, -1):
        fail(n or 1)
        pauses.append(backoff.pause)
        if n == 3:
            assert lines == ["Worker failed: it ended (and 2 more)"]
            assert backoff.words == "it ended (and 2 more)"
            backoff.arrived(clock.now)
            assert backoff.words is None
    assert pauses == [0, 2, 4, 8]
    clock.now += 7.5
    assert backoff.pause == 0.5
    clock.now += 1
    assert (backoff.pause, backoff.gave_up) == (0, False)
    fail()
    assert backoff.pause == math.inf
    assert backoff.words == "no new workers after 5 failures in a row: it ended"
    assert lines[-1] == f"Cluster mine launches {backoff.words}. To try again, run `dask cml scale mine N`"


def test_a_refusal_is_reported_once_and_retried_later(backoff, lines, clock, refuse):
    assert backoff.affordable(9, 4, [1.0]) == 9
    assert backoff.affordable(9, 4, [1.0, 61.0]) == 4  # queued for longer than quota-retry
    for _ in range(2):
        refuse()
    assert lines == ["Cluster mine launched 3 of 5 workers: quota"]
    assert (backoff.affordable(2, 3, []), backoff.words) == (2, None)  # no more are wanted than launched
    assert backoff.affordable(9, 2, []) == backoff.affordable(9, 3, []) == 3
    clock.now += 61
    assert backoff.affordable(9, 3, []) == 4
    backoff.granted(3)
    assert backoff.words == "3 of 5 workers launched: quota"
    backoff.granted(4)
    assert backoff.words is None


def test_a_refusal_after_a_failure_is_the_problem_until_the_next_failure(backoff, fail, refuse):
    fail()
    refuse()
    assert backoff.words == "3 of 5 workers launched: quota"
    fail()
    assert backoff.words == "it ended"
    for _ in range(3):
        fail()
    refuse()
    assert "no new workers after 5 failures" in backoff.words


@pytest.mark.parametrize(
    ("losses", "pauses"),
    [
        ([KILLED], [0, 2, 4, 8, math.inf]),
        ([EVICTED], [0, 2, 4, 8, math.inf]),
        ([ENDED], [0, 2, 4, 8, math.inf]),
        ([OUT_OF_MEMORY, KILLED], [0, 2, 4, 8, math.inf]),
        ([OUT_OF_MEMORY], [0, 2, 4, 8, 16]),  # of a task, which the scheduler gives up
        ([CLOSED], [0] * 5),
    ],
)
def test_the_pauses_follow_from_the_causes(backoff, clock, lose, losses, pauses):
    found = []
    for _ in range(5):
        clock.now += 1
        backoff.arrived(clock.now)
        lose({f"mine-{n}": loss for n, loss in enumerate(losses)})
        found.append(backoff.pause)
    assert found == pauses
    if OUT_OF_MEMORY in losses and len(losses) == 1:
        for _ in range(2000):
            lose({"mine-0": OUT_OF_MEMORY})
        assert (backoff.pause, backoff.gave_up) == (60, False)


def test_workers_that_were_launched_before_others_failed_do_not_count_again(backoff, clock, lose):
    """The nodes of a cluster may be drained one by one."""
    began = clock.now
    clock.now += 3600
    for n in range(9):
        clock.now += 2
        lose({f"mine-{n}": EVICTED}, began, lasted=3600)
    assert (backoff.pause, backoff.gave_up) == (0, False)


@pytest.mark.slow
@simulated
async def test_a_group_that_was_given_up_is_launched_again_when_a_user_scales_it(it):
    async with simulate(name="mine", worker_groups={"gpu": {}}) as cluster, rebuild("mine") as remote:
        it.platform.doom("fails", times=5)
        cluster.scale(1, worker_group="gpu")
        await eventually(lambda: who_gave_up(cluster).keys() == who_gave_up(remote).keys() == {"gpu"})
        assert "gpu: no new workers after 5 failures in a row: " in cluster.problem
        assert remote.problem == cluster.problem
        assert "no new workers after 5 failures in a row" in repr(remote)
        assert "Group gpu of cluster mine launches no new workers after 5 failures" in log_of(cluster)
        launched = it.platform.count("launch_workers")
        cluster.scale(1)
        await eventually(lambda: arrived(cluster) == 1)
        assert it.platform.count("launch_workers") == launched + 1
        remote.scale(1, worker_group="gpu")
        await eventually(lambda: arrived(cluster) == 2)
        await eventually(lambda: cluster.problem is remote.problem is None)
        assert who_gave_up(cluster) == who_gave_up(remote) == {}
        it.platform.configure({"sessions": 1})
        cluster.scale(4, worker_group="gpu")
        await eventually(lambda: "gpu: 1 of 4 workers launched" in (cluster.problem or ""))
        await cluster.delete_worker_group("gpu")
        await eventually(lambda: cluster.problem is None)
        it.platform.configure()
        await cluster.add_worker_group("gpu", n_workers=2)
        await eventually(lambda: arrived(cluster) == 3)
