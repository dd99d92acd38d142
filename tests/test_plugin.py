"""The scheduler's plugin: its board as others read and write it, its keeper, and its end."""

import asyncio
import json
import os
import re
import shutil
import threading
import time

import dask
import pytest
from clusters import new_record
from conftest import PATIENCE
from distributed import Client, Scheduler, Worker
from distributed.core import Status, rpc
from schedulers import WATCH, begin_with, post, prepare, report, scheduler_in

from dask_cml.layout import FOLDER, NUMBER, board_file, scheduler_file
from dask_cml.protocol import Rank, Request
from dask_cml.records import store
from dask_cml.scheduler import plugin
from dask_cml.scheduler.plugin import Board, StateFile
from dask_cml.sessions.plan import PRELOAD
from dask_cml.timing import timing


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(plugin, "_REST", 0.01)
    monkeypatch.setattr(timing, "scheduler_look", 0.05)
    monkeypatch.setattr(timing, "save", 0.02)


@pytest.fixture
def folder(tmp_path):
    with dask.config.set({"cml.state-directory": str(tmp_path)}):
        yield prepare(tmp_path / "mine", keeper="keeper")


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


async def test_the_next_scheduler_begins_with_the_report_and_the_posted_numbers(folder):
    async with scheduler_in(folder) as running, rpc(running.address) as comm:
        await comm.cml_post(**post(7, kind="add group", group="gpu", options={"cpu": 2}))
        groups = {"default": {"target": 1}, "gpu": {"options": {"cpu": 2}}}
        await comm.cml_report(**report(report={"groups": groups, "taken": 1}))
        board = await comm.cml_post(**post(8, kind="scale", n=2, group="gpu"))
        assert (await comm.cml_live_on(watcher="a"))["posted"] == 8
    last = file_of(folder)
    assert (len(last["mail"]), last["posted"]) == (1, {"a": 8})
    begin_with(folder, 1, term=2, **{name: last[name] for name in ("report", "posted")})
    async with scheduler_in(folder, number=1) as running, rpc(running.address) as comm:
        begun = await comm.cml_watch(**WATCH)
        assert begun["report"] == board["report"]
        await comm.cml_post(**post(kind="scale", n=5, group="gpu", sender="b"))
        again = await comm.cml_post(**post(8, kind="scale", n=2, group="gpu"))
        assert [letter["request"]["n"] for letter in again["mail"]] == [5]


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
    monkeypatch.setattr(timing, "lease", 240.0)
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


async def until(comm, board, condition):
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


async def test_a_worker_that_connects_after_the_notice_to_its_session_leaves_too(scheduler, comm):
    async with Worker(scheduler.address, name="mine-0-0", nthreads=1, dashboard=False) as first:
        await comm.cml_notice(names=["mine-0-0", "mine-0-1"])
        await asyncio.wait_for(first.finished(), PATIENCE)
        async with Worker(scheduler.address, name="mine-0-1", nthreads=1, dashboard=False) as second:
            await asyncio.wait_for(second.finished(), PATIENCE)
    last = await comm.cml_last(names=["mine-0-0", "mine-0-1"])
    assert [about["noticed"] for about in last.values()] == [True, True]


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
            await client.restart(wait_for_workers=False)  # which forgets all tasks
    last = file_of(folder, 2)
    [failure] = last["activity"].pop("failures")
    assert failure.startswith("b-1: TypeError")
    assert last["restarts"] == 0
    assert last["activity"] == {"most_workers": 2, "tasks_done": 9, "tasks_failed": 3}


async def test_it_is_written_when_something_changes_also_after_an_error_and_not_otherwise(
    folder, holds, monkeypatch, caplog
):
    write, errors = plugin.write_file, []

    def may_fail(path, content):  # on a file system with a clock of its own
        if errors:
            raise errors.pop()
        write(path, content)
        os.utime(path, (time.time() + 1200,) * 2)

    monkeypatch.setattr(plugin, "write_file", may_fail)
    async with scheduler_in(folder) as running:
        board, written = running.plugins["dask-cml"], folder / scheduler_file(0)
        assert file_of(folder)["orphan_timeout"] is None
        errors.append(OSError("No space left on device"))
        board._watchers.timeout = 7000.0
        board._publish()
        await holds(lambda: file_of(folder)["orphan_timeout"] == 7000.0)
        assert "State of the cluster not written: No space left on device" in caplog.text
        await holds(lambda: board._known[-1] and board._saved == board._state())
        os.utime(written, (0, 0))
        await asyncio.sleep(0.2)
        assert written.stat().st_mtime == 0
        board._restarts += 1  # of which no watcher hears
        await holds(lambda: file_of(folder)["restarts"] == 1)
        assert file_of(folder)["workers"]["idle_since"] > time.time() + 600


async def test_a_cancelled_write_does_not_replace_a_later_one(folder, holds, monkeypatch):
    """As when the scheduler closes: the last state says why, and nobody may take it for lost."""
    replace, goes_on, waiting = os.replace, threading.Event(), []

    def replaces_late(*arguments, **options):
        if not waiting:
            waiting.append(True)
            goes_on.wait(PATIENCE)
        replace(*arguments, **options)

    async with scheduler_in(folder) as running:
        monkeypatch.setattr(os, "replace", replaces_late)
        await holds(lambda: waiting)
        running.plugins["dask-cml"]._lifetime.closed = "idle for 1 s"
        closing = asyncio.create_task(running.close())
        await asyncio.wait([closing], timeout=0.5)
        goes_on.set()
        await closing
    await holds(lambda: len(os.listdir(folder)) == 2)  # no temporary file
    assert file_of(folder)["closed"] == "idle for 1 s"


def test_an_old_scheduler_writes_nothing_without_its_folder_and_into_a_new_cluster_of_its_name(folder):
    file = StateFile(folder, 0)
    file.begin()
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        file.write({})
    assert not folder.exists()
    prepare(folder, keeper="k2")
    with pytest.raises(OSError, match="another cluster has its name"):
        file.write({})
    assert os.listdir(folder) == [board_file(0)]


def test_the_sign_of_life_is_the_age_of_the_last_schedulers_file(folder):
    record = new_record(folder.name)
    assert store.silence(record) is store.silence(new_record("gone")) is None
    for number in 9, 10:
        StateFile(folder, number).write({})
    now = (folder / scheduler_file(10)).stat().st_mtime
    os.utime(folder / scheduler_file(9), (now, now - 3600))
    assert store.silence(record) < 60
    os.utime(folder / scheduler_file(10), (now, now - 130))
    assert 130 <= store.silence(record) < 3600


LIMITS = {"minimum": 4, "maximum": 5, "interval": 1.0, "wait_count": 3, "target_duration": 5.0}
ADAPT = Request(kind="adapt", limits=LIMITS)
GPU = Request(kind="add group", group="gpu", n=1, options={"cpu": 2})


def scale(n, group="default"):
    return Request(kind="scale", group=group, n=n)


@pytest.fixture
def board():
    return Board({"groups": {"default": {"target": 1}}}, keeper="keeper")


def post_all(board, *requests, sender="a"):
    for number, request in enumerate(requests, start=board.posted.get(sender, 0) + 1):
        board.post(sender, number, request)


def mail(board):
    return [(letter.number, letter.request) for letter in board.mail]


def targets(board):
    return {name: group.target for name, group in board.groups.items()}


def test_requests_are_kept_in_their_order_and_the_groups_are_as_after_them(board):
    close = Request(kind="close", names=["mine-0"])
    post_all(board, GPU, ADAPT)
    post_all(board, close, scale(3, "gpu"), sender="b")
    assert mail(board) == [(1, GPU), (2, ADAPT), (3, close), (4, scale(3, "gpu"))]
    assert targets(board) == {"default": 4, "gpu": 3}  # within the limits at once
    assert board.groups["default"].adapt == LIMITS
    post_all(board, scale(1), Request(kind="delete group", group="gpu"))
    assert targets(board) == {"default": 1}
    assert board.groups["default"].adapt is None
    post_all(board, ADAPT, Request(kind="stop adapting"))
    assert (targets(board), board.groups["default"].adapt) == ({"default": 4}, None)


def test_a_request_that_is_repeated_undoes_no_later_one(board):
    post_all(board, scale(2))
    post_all(board, scale(5), sender="b")
    before = board.to_json()
    board.post("a", 1, scale(2))
    assert board.to_json() == before
    board.post("a", 2, scale(2))
    assert targets(board) == {"default": 2}


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (scale(1, "no"), "invalid worker_group='no': expected one of 'default', 'gpu'"),
        (Request(kind="delete group", group="no"), "invalid name='no': expected an added group"),
        (GPU, "invalid name='gpu': expected a name that no worker group"),
        (Request(kind="delete group"), r"invalid name='default': expected an added group \('gpu'\);"),
    ],
)
def test_a_request_that_cannot_be_carried_out_changes_nothing_and_may_be_repeated(board, request_, words):
    post_all(board, GPU)
    before = board.to_json()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{words}"):
            board.post("b", 1, request_)
    assert board.to_json() == before
    board.post("b", 1, scale(7))
    assert targets(board) == {"default": 7, "gpu": 1}


def test_a_scheduler_begins_with_the_last_requests_of_as_many_processes_as_it_remembers(monkeypatch):
    monkeypatch.setattr(plugin, "_MOST_SENDERS", 2)
    board = Board({}, posted={"a": 1, "b": 2, "c": 3})
    assert board.posted == {"b": 2, "c": 3}


def test_a_full_mail_takes_no_more_requests_until_some_are_carried_out(board, monkeypatch):
    monkeypatch.setattr(plugin, "_MOST_LETTERS", 2)
    post_all(board, GPU, scale(2))
    with pytest.raises(ValueError, match="no process manages the cluster: 2 requests wait"):
        post_all(board, scale(3, "gpu"))
    board.take_report({"groups": {"gpu": {}}, "taken": 1})
    post_all(board, scale(3, "gpu"))
    assert targets(board) == {"default": 2, "gpu": 3}


def test_mail_is_dropped_with_the_report_that_it_is_carried_out_and_no_other(board):
    post_all(board, scale(2), GPU, scale(3, "gpu"))
    report = {"groups": {"default": {"target": 2}, "gpu": {"target": 1}}, "taken": 2}
    board.take_report(report)
    assert (mail(board), targets(board)) == ([(3, scale(3, "gpu"))], {"default": 2, "gpu": 3})
    # The keeper scales by itself, and its user deletes the group.
    board.take_report({"groups": {"default": {"target": 1}}, "taken": 2})
    assert (len(board.mail), targets(board)) == (1, {"default": 1})
    board.take_report({"groups": {"default": {"target": 1}}, "taken": 3})
    assert mail(board) == []
    post_all(board, scale(5))
    assert mail(board) == [(4, scale(5))]
