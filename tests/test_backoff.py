"""What a keeper does after failures and refusals, and the words for it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from clusters import arrived, log_of, rebuild, simulate, who_gave_up
from simulated.testing import eventually, simulated

from dask_cml.core import backoff as module
from dask_cml.core.losses import Losses
from dask_cml.core.workers import Workers
from dask_cml.errors import CMLError, LaunchRefused
from dask_cml.sessions.causes import Cause, Loss

KILLED = Loss(Cause.KILLED, "evicted or killed by the platform")
OUT_OF_MEMORY = Loss(Cause.OUT_OF_MEMORY, "out of memory", of_task=True)
EVICTED, CLOSED = Loss(Cause.EVICTED, "evicted"), Loss(Cause.CLOSED, "closed")
ENDED = Loss(Cause.PROGRAM_ENDED, "its program ended")


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(module, "time", clock)
    return clock


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
        Losses(workers._cluster)._count("default", losses, [lost])

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


# -- by the causes of losses


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


def test_workers_that_were_launched_before_others_failed_do_not_count_again(backoff, clock, lines, lose):
    """The nodes of a cluster may be drained one by one."""
    began = clock.now
    clock.now += 3600
    for n in range(9):
        clock.now += 2
        lose({f"mine-{n}": EVICTED}, began, lasted=3600)
    assert (backoff.pause, backoff.gave_up, len(lines)) == (0, False, 9)


# -- in a cluster, each group has its own


@pytest.mark.slow
@simulated
async def test_a_group_that_was_given_up_is_launched_again_when_a_user_scales_it(it):
    async with simulate(name="mine", worker_groups={"gpu": {}}) as cluster, rebuild("mine") as remote:
        it.platform.doom("fails", times=5)
        cluster.scale(1, worker_group="gpu")
        await eventually(lambda: who_gave_up(cluster).keys() == who_gave_up(remote).keys() == {"gpu"})
        assert "gpu: no new workers after 5 failures in a row: " in cluster.problem
        assert remote.problem == cluster.problem
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
