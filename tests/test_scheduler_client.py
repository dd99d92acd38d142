"""A manager's connection to the scheduler: wishes arrive once, and no answer is waited for without end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time

import pytest
from distributed import Client, Worker
from distributed.core import rpc
from schedulers import RECORD, prepare, scheduler_in

from dask_cml import protocol
from dask_cml.errors import CMLError
from dask_cml.manager import fleet as fleet_module
from dask_cml.manager import scheduler_client as module
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.options import Options


@pytest.fixture
def folder(tmp_path):
    return prepare(tmp_path / "mine")


@pytest.fixture
async def scheduler(folder):
    async with scheduler_in(folder) as running:
        yield running


@contextlib.asynccontextmanager
async def joined(scheduler, manager="m1", observes=False):
    """A manager's client, and how often it has said that something changed."""
    changes = []
    fleet = Fleet(Options.read(name="mine"), manager)
    client = SchedulerClient(fleet, observes, lambda _: changes.append(fleet.revision))
    client.fleet, client.changes = fleet, changes
    await client.join(scheduler.address, {}, RECORD)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
async def client(scheduler):
    async with joined(scheduler) as client:
        yield client


def break_handler(scheduler, name, times=10**6, lose_answer=False):
    """Let a handler fail, before it does anything or after it. Return what mends it."""
    handler, left = scheduler.handlers[name], [times]

    @functools.wraps(handler)  # by its signature Dask sees what to pass
    async def broken(*arguments, **more):
        if not left[0]:
            result = handler(*arguments, **more)
            return await result if inspect.isawaitable(result) else result
        left[0] -= 1
        if lose_answer:
            handler(*arguments, **more)
        raise OSError("broken")

    scheduler.handlers[name] = broken

    def mend():
        left[0] = 0

    return mend


# -- the connection


async def test_after_it_has_joined_a_manager_knows_the_state(scheduler, client):
    assert client.connected
    assert client.leads
    assert client.fleet.leader == "m1"
    assert client.info["id"] == scheduler.id
    assert "workers" not in client.info


@pytest.mark.parametrize(
    ("record", "version", "words"),
    [
        ("another", protocol.PROTOCOL, "belongs to another cluster, 'mine'"),
        (RECORD, 1, "speaks protocol 1 of dask-cml, this process"),
    ],
)
async def test_a_manager_does_not_join_another_cluster_or_protocol(scheduler, record, version, words):
    hello = scheduler.handlers["cml_hello"]
    scheduler.handlers["cml_hello"] = lambda: {**hello(), "protocol": version}
    client = SchedulerClient(Fleet(Options.read(name="mine"), "m1"), False, lambda _: None)
    with pytest.raises(CMLError, match=words):
        await client.join(scheduler.address, {}, record)
    assert not client.connected
    await client.close()


async def test_two_managers_see_each_others_wishes(scheduler, client, holds):
    async with joined(scheduler, "m2") as other:
        assert not other.leads
        other.fleet.wish("scale", group="default", n=3)
        other.send_wishes()
        await holds(lambda: client.fleet.group().wanted.target == 3)
        assert client.fleet.managers == 2
        client.fleet.wish("scale", group="default", n=1)
        client.send_wishes()
        await holds(lambda: other.fleet.group().wanted.target == 1)
    await holds(lambda: client.fleet.managers == 1)


async def test_a_manager_that_closes_its_connection_has_left(scheduler, client, holds):
    async with joined(scheduler, "m2") as other:
        await client.close()
        await holds(lambda: other.leads)
        assert not client.connected
        assert not client.leads


async def test_a_dask_worker_is_known_when_it_connects(scheduler, client, holds):
    async with Worker(scheduler.address, name="mine-0", nthreads=1, dashboard=False):
        await holds(lambda: client.fleet.observed == {"mine-0"})
        assert client.changes
    await holds(lambda: not client.fleet.observed)


async def test_a_manager_that_hears_nothing_does_not_lead(scheduler, client, holds, monkeypatch):
    mend = break_handler(scheduler, "cml_watch")
    await holds(lambda: not client.connected)
    assert not client.leads
    mend()
    await holds(lambda: client.leads)


async def test_a_manager_knows_at_once_that_its_scheduler_answers_again(scheduler, holds):
    async with joined(scheduler, observes=True) as observer:
        mend = break_handler(scheduler, "cml_watch")
        observer._watched.abort()
        await holds(lambda: not observer.connected)
        mend()
        begin = time.monotonic()
        await holds(lambda: observer.connected)
        assert time.monotonic() - begin < protocol.OBSERVER_HEARTBEAT / 2


async def test_the_lease_of_a_leader_ends_also_while_its_connection_is_open(scheduler, client, monkeypatch):
    assert client.leads
    monkeypatch.setattr(protocol, "LEASE", 0.0)
    assert client.connected
    assert not client.leads


# -- wishes


async def test_a_wish_before_the_first_answer_is_sent_once_the_scheduler_answers(scheduler, holds):
    fleet = Fleet(Options.read(name="mine"), "m1")
    client = SchedulerClient(fleet, False, lambda _: None)
    fleet.wish("scale", group="default", n=2)
    client.send_wishes()
    await client.join(scheduler.address, {}, RECORD)
    await holds(lambda: not fleet.wishes)
    assert fleet.group().wanted.target == 2
    await client.close()


@pytest.mark.parametrize("lose_answer", [False, True])
async def test_a_wish_is_sent_until_it_is_answered_and_carried_out_once(
    scheduler, client, holds, monkeypatch, caplog, lose_answer
):
    monkeypatch.setattr(module, "_PAUSE", 0.01)
    break_handler(scheduler, "cml_apply", times=3, lose_answer=lose_answer)
    client.fleet.wish("add_group", group="gpu", options={}, n=1)
    client.send_wishes()
    await holds(lambda: not client.fleet.wishes)
    assert client.fleet.groups == ["default", "gpu"]
    assert "not changed" not in caplog.text  # because it exists


async def test_a_refused_wish_raises_an_error_or_without_a_waiting_task_logs_a_warning(client, holds, caplog):
    with pytest.raises(ValueError, match="invalid worker_group='no'"):
        await client.decide("delete_group", group="no", wish=1)
    client.fleet.wish("delete_group", group="no")
    client.send_wishes()
    await holds(lambda: not client.fleet.wishes)
    assert "Cluster mine not changed: invalid worker_group='no'" in caplog.text


async def test_an_invalid_wish_is_refused_at_once(client):
    with pytest.raises(ValueError, match=r"invalid operation: .*`\$\.operation\.n`"):
        client.fleet.wish("scale", group="default", n=-1)
    assert client.fleet.wishes == []


async def test_an_invalid_wish_does_not_block_the_others(scheduler, client, holds, caplog, monkeypatch):
    """It may be of another release, with other checks."""
    with monkeypatch.context() as patch:
        patch.setattr(fleet_module, "check_operation", lambda operation: None)
        client.fleet.wish("scale", group="default", n=-1)
    client.fleet.wish("add_group", group="gpu", options={}, n=2)
    client.send_wishes()
    await holds(lambda: not client.fleet.wishes)
    assert client.fleet.group("gpu").wanted.target == 2
    assert client.fleet.group().wanted.target == 0
    assert "Cluster mine not changed: invalid operation: Expected `int` >= 0" in caplog.text


async def test_wishes_of_any_thread_are_sent(client, holds):
    def scale():
        client.fleet.wish("scale", group="default", n=3)
        client.send_wishes()

    await asyncio.to_thread(scale)
    await holds(lambda: not client.fleet.wishes)
    assert client.fleet.group().wanted.target == 3


# -- requests


async def test_a_decision_returns_its_result_and_the_new_state(client):
    client.fleet.wish("scale", group="default", n=2)
    client.send_wishes()
    assert [*await client.decide("replace", names=["mine-7"], causes={})] == []
    await client.decide("launched", names=["mine-0"])
    assert client.fleet.member("mine-0").launched
    with pytest.raises(ValueError, match="invalid session 'others-0'"):
        await client.decide("launched", names=["others-0"])
    with pytest.raises(ValueError, match="invalid operation"):
        await client.decide("unknown")


@pytest.mark.slow
async def test_an_answer_that_never_comes_is_waited_for_shortly_if_the_scheduler_is_gone(
    scheduler, client, holds
):
    async def silent():
        await asyncio.Event().wait()

    scheduler.handlers["cml_demand"] = silent
    break_handler(scheduler, "cml_watch")
    asking = asyncio.create_task(client.demand())
    await holds(lambda: not client.connected)
    with pytest.raises((OSError, asyncio.TimeoutError)):
        await asyncio.wait_for(asking, 60)


async def test_names_of_dask_workers_that_cost_least_to_close(scheduler, client):
    async with (
        Worker(scheduler.address, name="mine-0", nthreads=1, dashboard=False) as busy,
        Worker(scheduler.address, name="mine-1", nthreads=1, dashboard=False),
        Client(scheduler.address, asynchronous=True) as user,
    ):
        held = await user.scatter([b"0" * 10**6], workers=[busy.address], hash=False)
        asked = {"n": 1, "key": None, "attribute": "name"}
        assert [*await client.call("workers_to_close", **asked)] == ["mine-1"]
        assert {*await client.held(["mine-0", "other"])} == {"mine-0"}
        assert (await client.held(["mine-0"]))["mine-0"]["nbytes"] >= 10**6
        assert await client.retire(["mine-0"]) == {"mine-0"}
        assert await user.gather(held) == [b"0" * 10**6]


async def test_a_dropped_dask_worker_is_lost_for_the_scheduler(scheduler, client, holds):
    async with Worker(scheduler.address, name="mine-0", nthreads=1, dashboard=False) as worker:
        await holds(lambda: client.fleet.observed)
        worker.periodic_callbacks["heartbeat"].stop()
        await client.drop(["mine-0"])
        await holds(lambda: not scheduler.workers)


async def test_without_an_answer_it_is_not_known_what_workers_hold(scheduler, client, monkeypatch):
    async def no_answer(*_, **__):
        raise OSError("gone")

    monkeypatch.setattr(client, "call", no_answer)
    with pytest.raises(OSError, match="gone"):
        await client.held(["mine-0"])


async def test_the_end_of_a_scheduler_that_does_not_answer_is_not_waited_for(scheduler, client):
    async def silent():
        await asyncio.Event().wait()

    scheduler.handlers["terminate"] = silent
    await asyncio.wait_for(client.terminate(0.1, "closed"), 60)


# -- what adaptive scaling asks


class Comm:
    """A scheduler that answers as the test says."""

    def __init__(self):
        self.questions = []

    async def call(self, op, limit=None):
        assert op == "cml_demand"
        question = asyncio.get_running_loop().create_future()
        self.questions.append(question)
        return await question


@pytest.fixture
def asked():
    client = SchedulerClient(Fleet(Options.read(name="mine"), "m1"), False, lambda _: None)
    client.comm, client.connected = Comm(), True
    client.call = client.comm.call
    return client


async def asking(client, max_age=0.0):
    task = asyncio.create_task(client.demand(max_age))
    for _ in range(5):
        await asyncio.sleep(0)
    return task


async def test_managers_ask_for_the_work(scheduler, client, holds):
    async with Client(scheduler.address, asynchronous=True) as user:
        future = user.submit(abs, 1, resources={"GPU": 1})
        await holds(lambda: scheduler.unrunnable)
        [work] = (await client.demand())["work"]
        assert (work["resources"], work["unrunnable"]) == ({"GPU": 1}, 1)
        async with rpc(scheduler.address) as other:
            assert len((await other.cml_demand())["work"]) == 1
        del future


async def test_questions_at_one_time_share_an_answer(asked):
    tasks = [await asking(asked) for _ in range(3)]
    [question] = asked.comm.questions
    question.set_result({"work": []})
    assert await asyncio.gather(*tasks) == [{"work": []}] * 3
    assert len(asked.comm.questions) == 1


async def test_a_recent_answer_is_used_again(asked):
    first = await asking(asked)
    asked.comm.questions[0].set_result({"work": []})
    await first
    assert await asked.demand(1000) == {"work": []}
    assert len(asked.comm.questions) == 1
    again = await asking(asked)
    assert len(asked.comm.questions) == 2
    asked.comm.questions[1].set_result({"work": [1]})
    assert await again == {"work": [1]}


async def test_an_error_reaches_all_waiting_tasks_but_no_later_request(asked):
    tasks = [await asking(asked) for _ in range(3)]
    asked.comm.questions[0].set_exception(OSError("gone"))
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, OSError)
    later = await asking(asked)
    asked.comm.questions[1].set_result({"work": []})
    assert await later == {"work": []}


async def test_a_cancelled_request_does_not_cancel_the_answer_for_others(asked):
    first, second = await asking(asked), await asking(asked)
    first.cancel()
    await asyncio.wait([first])
    asked.comm.questions[0].set_result({"work": []})
    assert await second == {"work": []}
    assert len(asked.comm.questions) == 1
