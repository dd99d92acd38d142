"""How many sessions a worker group needs for the work that is known: the decision at one moment."""

from __future__ import annotations

import pytest

from dask_cml.core.policy import Snapshot, Supply, Work, sessions_to_finish, sessions_wanted, unrunnable

GPU = {"GPU": 1}


def supply(name="default", **values):
    return Supply(name, **{"adapts": True, **values})


def gpus(name="gpu", n=1.0, **values):
    return supply(name, **{"nthreads": 4, "resources": {"GPU": n}, **values})


def work(n, seconds=1.0, unrunnable=0, **resources):
    """So many tasks of so many seconds each."""
    return Work(resources, n, n * seconds, unrunnable)


def wanted(
    snapshot, group="default", *, arrived=0, planned=None, underway=(), start=0.0, target=5.0, minimum=0
):
    return sessions_wanted(
        snapshot,
        group,
        arrived=arrived,
        planned=arrived + len(underway) if planned is None else planned,
        underway=underway,
        start_time=start,
        target_duration=target,
        minimum=minimum,
    )


# -- which group does the work


def groups_of(supplies, **resources):
    snapshot = Snapshot([work(1, **resources)], supplies)
    return [supply.name for supply in supplies if snapshot.work_of(supply.name)]


FIXED = {"adapts": False}
BOTH = gpus("both")
BOTH.resources["FPGA"] = 1


@pytest.mark.parametrize(
    ("supplies", "needs", "group"),
    [
        # the one that offers what they need
        ([supply(), gpus()], {}, "default"),
        ([supply(), gpus()], {"GPU": 1}, "gpu"),
        ([supply(), gpus()], {"FPGA": 1}, None),
        ([supply()], {"GPU": 0}, "default"),
        # one of whose Dask workers can run them
        ([supply(), gpus(processes=2)], {"GPU": 1}, None),
        ([supply(), gpus(processes=2)], {"GPU": 0.5}, "gpu"),
        # the one that offers the least beyond their needs
        ([supply(), gpus("four", 4), gpus("one"), BOTH], {"GPU": 1}, "one"),
        ([supply(), gpus("four", 4), gpus("one"), BOTH], {"GPU": 2}, "four"),
        ([supply(), gpus("four", 4), gpus("one"), BOTH], {"GPU": 1, "FPGA": 1}, "both"),
        # of several alike, the default one
        ([supply(), supply("more")], {}, "default"),
        ([gpus("default"), gpus("more")], {"GPU": 1}, "default"),
        # one that adapts before one of a fixed size
        ([supply(target=2, **FIXED), supply("more")], {}, "more"),
        ([supply(), gpus(target=1, **FIXED), gpus("more", 4)], {"GPU": 1}, "more"),
        # one with GPUs only where no plain group has workers
        ([supply(target=1, **FIXED), gpus()], {}, "default"),
        ([supply(target=0, **FIXED), gpus()], {}, "gpu"),
        ([gpus("default")], {}, "default"),
    ],
)
def test_tasks_scale_up_the_one_group_that_fits_best(supplies, needs, group):
    assert groups_of(supplies, **needs) == ([] if group is None else [group])


# -- how many sessions the work needs


@pytest.mark.parametrize(
    ("size", "tasks", "sessions"),
    [
        ({}, work(0), 0),
        ({}, work(100), 20),
        ({}, work(101), 21),
        ({"nthreads": 4}, work(100), 5),
        ({"nthreads": 4, "processes": 2}, work(100), 5),
        ({}, work(3, 1000.0), 3),  # never more than there are tasks
        ({"nthreads": 4}, work(3, 1000.0), 1),
        ({}, work(1, 0.001), 1),
        ({}, work(5, 0.0), 1),  # the scheduler was told that they take no time
        ({"nthreads": 8, "resources": {"GPU": 1}}, work(100, GPU=1), 20),
        ({"nthreads": 8, "resources": {"GPU": 4}}, work(100, GPU=1), 5),
        ({"nthreads": 8, "resources": {"GPU": 4}}, work(100, GPU=2), 10),
        ({"nthreads": 2, "resources": {"GPU": 4}}, work(100, GPU=1), 10),  # threads are fewer than GPUs
        ({"nthreads": 8, "resources": {"GPU": 3}}, work(100, GPU=2), 20),  # the third GPU is of no use
        ({"nthreads": 8, "processes": 2, "resources": {"GPU": 3}}, work(100, GPU=1), 10),
        ({"nthreads": 8, "resources": {"GPU": 0.3}}, work(100, GPU=0.1), 7),
        ({"nthreads": 8, "resources": {"GPU": 4, "FPGA": 1}}, work(100, GPU=1, FPGA=1), 20),
    ],
)
def test_sessions_for_one_need(size, tasks, sessions):
    assert sessions_to_finish(Supply("group", **size), [tasks], 5.0) == sessions


@pytest.mark.parametrize(
    ("tasks", "sessions"),
    [
        ([work(100, GPU=1), work(100)], 20),  # plain tasks use threads that the others leave
        ([work(100, GPU=1), work(700)], 40),  # 20 for the GPUs; but 800 tasks need 160 threads
        ([work(50, GPU=1), work(100, GPU=0.5)], 20),
        ([work(50, GPU=1), work(50, GPU=0.5)], 15),
    ],
)
def test_several_needs_share_threads_and_resources(tasks, sessions):
    assert sessions_to_finish(gpus(), tasks, 5.0) == sessions


# -- how many there should be


def test_each_group_is_judged_by_its_own_work():
    snapshot = Snapshot([work(100), work(10, GPU=1)], [supply(), gpus()])
    assert wanted(snapshot) == 20
    assert wanted(snapshot, "gpu") == 2
    snapshot = Snapshot([work(100, GPU=1)], [supply(sessions=3), gpus()])
    assert wanted(snapshot, arrived=3) == 0


def test_busy_sessions_stay():
    assert wanted(Snapshot([work(1)], [supply(sessions=5, busy=3)]), arrived=5) == 3


def test_sessions_that_only_do_the_work_of_another_group_go():
    borrowed = gpus(sessions=3, busy=3, borrowed=[0, 2])
    snapshot = Snapshot([work(9)], [supply(sessions=1, busy=1), borrowed])
    assert wanted(snapshot, "gpu", arrived=3) == 1
    assert (snapshot.borrowed("gpu"), snapshot.has_work("gpu")) == ([0, 2], True)
    snapshot = Snapshot([work(9)], [snapshot.supplies[0], gpus(sessions=1, busy=1, borrowed=[0])])
    assert not snapshot.has_work("gpu")


def test_sessions_stay_that_do_the_work_of_a_group_without_sessions_or_of_their_own():
    borrowed = gpus(sessions=3, busy=3, borrowed=[0, 2])
    assert wanted(Snapshot([work(9)], [supply(), borrowed]), "gpu", arrived=3) == 3
    assert wanted(Snapshot([work(9)], [supply(adapts=False), borrowed]), "gpu", arrived=3) == 3


def test_few_long_tasks_get_a_session_each_however_long_that_takes():
    snapshot = Snapshot([work(10, 100.0)], [supply(sessions=1, busy=1)])
    assert wanted(snapshot, arrived=1, start=20, minimum=1) == 10


def test_more_than_60_percent_of_memory_wants_twice_the_sessions():
    full = supply(sessions=3, busy=3, managed=181, limit=300)
    assert wanted(Snapshot([work(3)], [full]), arrived=3) == 6
    assert wanted(Snapshot([work(3)], [supply(sessions=3, busy=3, managed=180, limit=300)]), arrived=3) == 3


@pytest.mark.parametrize(("managed", "stay"), [(0, 0), (1, 1), (100, 2), (101, 3), (150, 3)])
def test_the_remaining_sessions_can_hold_twice_the_data(managed, stay):
    snapshot = Snapshot([], [supply(sessions=3, managed=managed, limit=300)])
    assert wanted(snapshot, arrived=3) == stay


def test_workers_without_a_limit_of_memory_stay_while_they_hold_anything():
    assert wanted(Snapshot([], [supply(sessions=3, managed=1)]), arrived=3) == 3
    assert wanted(Snapshot([], [supply(sessions=3, managed=0)]), arrived=3) == 0


def test_the_data_of_a_group_can_be_held_by_another_and_no_two_count_on_each_other():
    held = {"sessions": 2, "managed": 10, "limit": 200}
    snapshot = Snapshot([], [supply(**held), gpus(**held)])
    assert (wanted(snapshot, arrived=2), wanted(snapshot, "gpu", arrived=2)) == (1, 0)
    fixed = Snapshot([], [supply(**held), gpus(**held | {"adapts": False, "target": 2})])
    assert wanted(fixed, arrived=2) == 0


def test_data_that_others_cannot_hold_keeps_a_group():
    snapshot = Snapshot([], [supply(), gpus(sessions=2, managed=150, limit=200)])
    assert wanted(snapshot, "gpu", arrived=2) == 4  # it is full
    snapshot = Snapshot([], [supply(sessions=1, limit=100), gpus(sessions=2, managed=100, limit=200)])
    assert (wanted(snapshot, arrived=1), wanted(snapshot, "gpu", arrived=2)) == (1, 1)


# -- what no worker will run


def test_tasks_that_need_resources_of_no_group_are_reported():
    snapshot = Snapshot([work(3, unrunnable=3, FPGA=1)], [supply(), gpus()])
    assert [*unrunnable(snapshot, []).values()] == ["3 tasks need FPGA=1, which no worker group offers"]


def test_tasks_for_a_group_without_workers_are_reported_until_it_is_scaled():
    tasks = [work(1, unrunnable=1, GPU=0.5)]
    words = [
        "1 task needs GPU=0.5; worker group gpu offers it, but has no workers: "
        "call cluster.scale(1, worker_group='gpu')"
    ]
    assert [*unrunnable(Snapshot(tasks, [supply(), gpus(adapts=False)]), []).values()] == words
    assert not unrunnable(Snapshot(tasks, [supply(), gpus(adapts=False, target=1)]), [])
    assert not unrunnable(Snapshot(tasks, [supply(), gpus()]), [])


def test_tasks_for_workers_that_will_not_connect_are_reported():
    snapshot = Snapshot(restricted={("mine-7",): 1, ("mine-8", "mine-9"): 2, ("mine-1",): 3})
    assert [*unrunnable(snapshot, ["mine-0", "mine-1"]).values()] == [
        "1 task is restricted to mine-7, which the cluster does not have",
        "2 tasks are restricted to mine-8 or mine-9, which the cluster does not have",
    ]


def test_tasks_that_run_or_wait_for_workers_are_no_trouble():
    tasks = [work(3, FPGA=1), work(3, unrunnable=3)]
    assert not unrunnable(Snapshot(tasks, [supply(adapts=False, target=1)]), [])
    assert not unrunnable(Snapshot(tasks, [supply()]), [])  # it adapts


def test_tasks_wait_for_ever_in_a_cluster_without_workers():
    snapshot = Snapshot([work(3, unrunnable=3)], [supply(adapts=False), gpus(adapts=False)])
    assert [*unrunnable(snapshot, []).values()] == [
        "3 tasks wait, but the cluster has no workers: call cluster.scale(n) or cluster.adapt()"
    ]


# -- what it is decided by
