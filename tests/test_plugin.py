"""The scheduler's plugin: its board as others read and write it, its keeper, and its end."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from distributed import Client, Scheduler, Worker
from distributed.core import Status, rpc
from schedulers import WATCH, begin_with, post, prepare, report, scheduler_in

from dask_cml.layout import FOLDER, NUMBER, board_file, scheduler_file
from dask_cml.protocol import Rank
from dask_cml.scheduler import plugin
from dask_cml.sessions.plan import PRELOAD
from dask_cml.timing import timing


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(plugin, "_REST", 0.01)
    monkeypatch.setattr(timing, "scheduler_look", 0.05)


@pytest.fixture
def folder(tmp_path):
    return prepare(tmp_path / "mine", keeper="keeper")


@pytest.fixture
async def scheduler(folder):
    async with scheduler_in(folder) as running:
        yield running


@pytest.fixture
async def comm(scheduler):
    async with rpc(scheduler.address) as connected:
        yield connected


def file_of(folder, number=0):
    return json.loads((folder / scheduler_file(number)).read_text())


# -- start


@pytest.mark.parametrize("exists", [False, True], ids=["of a deleted cluster", "with an invalid file"])
async def test_a_scheduler_without_the_plugin_closes(tmp_path, monkeypatch, caplog, exists):
    """Nobody else would end it."""
    folder = tmp_path / "mine"
    if exists:
        (prepare(folder) / board_file(0)).write_text("{")
    monkeypatch.setenv(FOLDER, str(folder))
    monkeypatch.setenv(NUMBER, "0")
    scheduler = Scheduler(port=0, dashboard=False, dashboard_address="127.0.0.1:0", preload=[PRELOAD])
    await scheduler
    await asyncio.wait_for(scheduler.finished(), 120)
    assert ("its cluster was deleted" in caplog.text) != exists
    assert ("Traceback" in caplog.text) == exists


async def test_a_scheduler_without_its_file_or_of_another_release_does_not_start(tmp_path):
    """Rather than begin with nothing, which would stop all workers."""
    begin_with(tmp_path / "mine", 0, protocol=1)
    for folder, error in (tmp_path, FileNotFoundError), (tmp_path / "mine", RuntimeError):
        with pytest.raises(
            error, match=r"board-0|its cluster speaks protocol 1 of dask-cml, and this session"
        ):
            async with scheduler_in(folder):
                pass


# -- the board


async def test_the_next_scheduler_begins_with_the_report_the_mail_and_the_posted_numbers(folder):
    async with scheduler_in(folder) as running, rpc(running.address) as comm:
        await comm.cml_post(**post(7, kind="add group", group="gpu", options={"cpu": 2}))
        groups = {"default": {"target": 1}, "gpu": {"options": {"cpu": 2}}}
        await comm.cml_report(**report(report={"groups": groups, "taken": 1}))
        board = await comm.cml_post(**post(8, kind="scale", n=2, group="gpu"))
    last = file_of(folder)
    assert (len(last["mail"]), last["posted"]) == (1, {"a": 8})
    begin_with(folder, 1, term=2, **{name: last[name] for name in ("report", "mail", "posted")})
    async with scheduler_in(folder, number=1) as running, rpc(running.address) as comm:
        begun = await comm.cml_watch(**WATCH)
        for part in "groups", "mail", "report":
            assert begun[part] == board[part]
        await comm.cml_post(**post(kind="scale", n=5, group="gpu", sender="b"))
        again = await comm.cml_post(**post(8, kind="scale", n=2, group="gpu"))
        assert again["groups"]["gpu"]["target"] == 5


# -- the keeper


async def keeper_after(comm, watcher, rank=Rank.OWNER):
    """Return who keeps the cluster after a process has watched it."""
    return (await comm.cml_watch(**{**WATCH, "watcher": watcher, "rank": int(rank)}))["keeper"]


async def until_kept(comm, watcher, rank=Rank.OWNER):
    while await keeper_after(comm, watcher, rank) != watcher:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("kept_by", "rank", "can_launch", "takes_over"),
    [
        (Rank.RESIDENT, Rank.OWNER, True, True),
        (Rank.RESIDENT, Rank.OWNER, False, True),
        (Rank.RESIDENT, Rank.USER, True, False),
        (Rank.RESIDENT, Rank.USER, False, True),
        (Rank.RESIDENT, Rank.COMMAND, False, False),
        (Rank.RESIDENT, Rank.OBSERVER, False, False),
        (Rank.USER, Rank.OWNER, False, True),
        (Rank.USER, Rank.USER, False, False),
        (Rank.USER, Rank.RESIDENT, False, False),
        (None, Rank.OWNER, False, True),
        (None, Rank.RESIDENT, False, True),
        (None, Rank.USER, False, False),
        (None, Rank.COMMAND, False, False),
        (None, Rank.OBSERVER, False, False),
    ],
)
async def test_who_keeps_leaves_the_cluster_to_a_process_of_a_better_rank_that_stays(
    tmp_path, monkeypatch, kept_by, rank, can_launch, takes_over
):
    """A notebook of another session gets it only if the scheduler's session cannot launch."""
    monkeypatch.setattr(timing, "stay", 1000.0)
    async with scheduler_in(prepare(tmp_path / "mine")) as running, rpc(running.address) as comm:
        keeper = None if kept_by is None else "resident"
        if kept_by is not None:
            assert await keeper_after(comm, keeper, Rank.RESIDENT) == keeper
            barred = report(keeper="resident", term=2, report={"is_barred": not can_launch})
            await comm.cml_report(**barred)
        if kept_by is Rank.USER:
            keeper = "user"
            monkeypatch.setattr(timing, "stay", 0.0)
            await until_kept(comm, keeper, kept_by)
            monkeypatch.setattr(timing, "stay", 1000.0)
        at_once = "one" if kept_by is None and takes_over else keeper
        assert await keeper_after(comm, "one", rank) == at_once
        monkeypatch.setattr(timing, "stay", 0.0)
        if takes_over:
            await asyncio.wait_for(until_kept(comm, "one", rank), timing.lease / 2)
        else:
            await asyncio.sleep(3 * timing.scheduler_look)
            assert await keeper_after(comm, "one", rank) == keeper


async def test_a_keeper_that_leaves_hands_the_cluster_over_at_once_and_its_late_report_changes_nothing(
    scheduler, comm
):
    await keeper_after(comm, "keeper")
    assert await keeper_after(comm, "other") == "keeper"
    left = await comm.cml_report(**report(report={"problem": "left"}, leaves=True))
    assert (left["keeper"], left["term"], left["report"]) == ("other", 3, {"problem": "left"})
    for keeper, term in ("keeper", 1), ("keeper", 3), ("other", 1):
        late = report(keeper=keeper, term=term, report={"problem": "late"}, leaves=True)
        answer = await comm.cml_report(**late)
        assert answer == {"refused": "another process manages the cluster"}
    # Who keeps it now begins with the report of the last one, and knows its own.
    following = {**WATCH, "watcher": "other", "rank": int(Rank.OWNER)}
    assert (await comm.cml_watch(**following))["report"] == {"problem": "left"}
    await comm.cml_report(**report(keeper="other", term=3, report={"problem": "new"}))
    assert (await comm.cml_watch(**following))["report"] == {}
    assert (await comm.cml_watch(**WATCH))["report"] == {"problem": "new"}
    # Processes that only read the file, such as `dask cml info`, see it too.
    assert scheduler.plugins["dask-cml"]._state()["workers"]["problem"] == "new"


# -- Dask workers


async def until(comm, board, condition):
    """Wait for a board."""
    while not condition(board):
        board = await comm.cml_watch(**{**WATCH, "since": board["revision"], "wait": 60})
    return board


async def test_watchers_hear_that_dask_workers_connect_and_leave(scheduler, comm):
    board = await comm.cml_watch(**WATCH)
    async with Client(scheduler.address, asynchronous=True) as client:
        for moves in (board["moves"] + 1, board["moves"] + 3):  # one more connects, and two have left
            async with Worker(scheduler.address, name="mine-0", nthreads=1, dashboard=False):
                board = await until(comm, board, lambda board, moves=moves: board["moves"] == moves)
                await client.scatter(b"x" * 1000)
                held = await comm.cml_held(names=["mine-0", "mine-1"])
                assert {name: {*about} for name, about in held.items()} == {"mine-0": {"last_seen", "nbytes"}}
                assert held["mine-0"]["nbytes"] >= 1000
                assert await comm.cml_last(names=["mine-0"]) == {}
            last = await comm.cml_last(names=["mine-0", "mine-1"])
            assert [(name, about["noticed"]) for name, about in last.items()] == [("mine-0", False)]
    assert await comm.cml_abandoned(names=["mine-0"]) == ("mine-0",)


async def test_watchers_are_told_of_a_worker_that_stays_paused_and_when_it_is_full(
    scheduler, comm, monkeypatch
):
    monkeypatch.setattr(timing, "pause", 0.2)
    async with Worker(scheduler.address, name="mine-0", memory_limit="64 GiB", dashboard=False) as worker:
        board = await comm.cml_watch(**WATCH)
        assert board["problem"] is None
        for callback in "memory_monitor", "heartbeat":
            worker.periodic_callbacks[callback].stop()
        state = scheduler.workers[worker.address]
        state.extra["cml"] = {"max_spill": 10 * 10**9}
        worker.status = Status.paused
        board = await until(comm, board, lambda board: board["problem"])
        words = r"worker mine-0 is paused and starts no tasks: \d+\.\d\d of \d+\.\d\d GiB memory are used; "
        assert re.match(words, board["problem"])
        state.metrics["spilled_bytes"] = {"memory": 9 * 10**9, "disk": 9 * 10**9}
        board = await until(comm, board, lambda board: not re.match(words, board["problem"]))
        assert board["problem"].startswith("worker mine-0 has spilled 9.0 of 10.0 GB and is paused")
        worker.status = Status.running
        await until(comm, board, lambda board: board["problem"] is None)


async def test_a_client_that_waits_in_scatter_counts_as_a_task(scheduler, comm):
    async with Client(scheduler.address, asynchronous=True) as client:
        scattering = asyncio.ensure_future(client.scatter([1, 2, 3], timeout=60))

        async def waits():
            return [(work["tasks"], work["resources"]) for work in (await comm.cml_demand())["work"]]

        while await waits() != [(1, {})]:
            await asyncio.sleep(0.01)
        async with Worker(scheduler.address, name="mine-0", nthreads=1, dashboard=False):
            assert await client.gather(await scattering) == [1, 2, 3]
            assert await waits() == []
        with pytest.raises(asyncio.TimeoutError):  # is not Python's before 3.11
            await client.scatter([4], timeout=0.2)
        assert await waits() == []


async def test_without_a_record_a_worker_whose_session_gets_notice_moves_its_data_too():
    options = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}
    async with (
        Scheduler(port=0, preload=[PRELOAD], **options) as running,
        Worker(running.address, name="mine-0", nthreads=1, dashboard=False) as first,
        Client(running.address, asynchronous=True) as client,
        rpc(running.address) as comm,
    ):
        futures = await client.scatter([1, 2, 3])
        async with Worker(running.address, name="mine-1", nthreads=1, dashboard=False):
            await comm.cml_notice(names=["mine-0", "gone"])
            await asyncio.wait_for(first.finished(), 60)
            assert await client.gather(futures) == [1, 2, 3]


# -- the end


async def test_restarts_in_a_row_count_until_a_task_is_computed_and_sums_go_on(folder):
    before = {"most_workers": 1, "tasks_done": 7, "tasks_failed": 2, "failures": ["a-1: no"]}
    begin_with(folder, 2, restarts=2, activity=before)
    async with scheduler_in(folder, number=2) as scheduler:
        assert (file_of(folder, 2)["restarts"], file_of(folder, 2)["activity"]) == (2, before)
        async with (
            Worker(scheduler.address, name="mine-0"),
            Worker(scheduler.address, name="mine-1"),
            Client(scheduler.address, asynchronous=True) as client,
        ):
            await client.wait_for_workers(2)
            await client.submit(sum, [1, 2])
            failed = client.submit(sum, 1, key="b-1")
            with pytest.raises(TypeError):
                await failed
            scheduler.plugins["dask-cml"]._check_workers()
    last = file_of(folder, 2)
    [failure] = last["activity"].pop("failures")
    assert failure.startswith("b-1: TypeError")
    assert last["restarts"] == 0
    assert last["activity"] == {"most_workers": 2, "tasks_done": 9, "tasks_failed": 3}
