"""The scheduler's session is lost: the keeper launches another one, and all others follow it."""

import asyncio
import contextlib
import errno
import json
import os
import shutil
import time
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import dask
import pytest
from clusters import (
    NOTEBOOK,
    arrived,
    ask_scheduler,
    board_of,
    create_and_kill,
    create_elsewhere,
    create_in,
    cut_off,
    delay_requests,
    folder_of,
    is_connected,
    is_keeper,
    is_subscribed,
    lines_of,
    log_of,
    look_now,
    manager,
    observe,
    rebuild,
    run_command,
    scheduler_number,
    scheduler_of,
    simulate,
    step_in,
    step_out,
    supplied,
    target,
    until_written,
)
from distributed import Client, Scheduler
from distributed.core import Status
from distributed.deploy.cluster import Cluster
from simulated.faults import Mishap
from simulated.testing import eventually, simulated

from dask_cml import CMLError, address, protocol
from dask_cml.layout import board_file
from dask_cml.options import state_directory
from dask_cml.records import store
from dask_cml.records.operations import end_all
from dask_cml.records.store import Maker
from dask_cml.scheduler import plugin
from dask_cml.scheduler.resident import WHO
from dask_cml.sessions.plan import Place
from dask_cml.sessions.process import CMLScheduler
from dask_cml.sessions.workers_api import WorkersAPI
from dask_cml.sharing import failover
from dask_cml.sharing import keeper as sharing_keeper
from dask_cml.sharing.keeper import Link
from dask_cml.timing import timing

pytestmark = pytest.mark.usefixtures("light")


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """Less than a hundredth of the pauses between schedulers."""
    monkeypatch.setattr(failover, "_PAUSES", (0.0, 0.1))
    monkeypatch.setattr(timing, "retry", 0.1)
    with dask.config.set({"cml.api.poll-interval": "200ms", "cml.api.watch-interval": "500ms"}):
        yield


async def lose_scheduler(platform, wait_until):
    """Kill the scheduler's session, and wait for the next scheduler."""
    lost = store.read("lab").scheduler
    platform.evict(lost.session)
    await wait_until(lambda: store.read("lab").scheduler.number > lost.number)
    await wait_until(lambda: store.read("lab").scheduler.address is not None)


def stands(it, cluster, n):
    """Whether the cluster has `n` workers, and nothing else runs."""
    return (
        is_connected(cluster)
        and arrived(cluster) == n
        and len(it.platform.live) == n + 1
        and {*it.platform.running} == {"lab-scheduler", *cluster.workers}
    )


@pytest.mark.slow
@pytest.mark.parametrize("keeper", ["waits", "vanishes"])
@simulated
async def test_a_request_that_only_the_lost_scheduler_knew_is_wanted_of_the_next(it, keeper):
    creator = await create_elsewhere(it, name="lab", n_workers=2) if keeper == "vanishes" else None
    async with AsyncExitStack() as stack:
        one = simulate(name="lab", n_workers=2) if creator is None else rebuild("lab", shutdown_on_close=True)
        cluster = remote = await stack.enter_async_context(one)
        if creator is None:
            remote = await stack.enter_async_context(rebuild("lab"))
            await eventually(lambda: arrived(remote) == 2)
            heal = cut_off(cluster)
        else:
            creator.freeze()
        await remote.scale(3)
        await remote.scale_down(["lab-0"])
        await remote.add_worker_group("big", n_workers=1)
        remote.adapt(4, 5, worker_group="big")
        await until_written(remote)
        revision = board_of(remote).revision
        await eventually(lambda: store.read("lab").scheduler.revision >= revision)
        it.platform.evict(it.platform.running["lab-scheduler"])
        if creator is None:
            heal()
        await eventually(lambda: scheduler_number(cluster) == 1 and stands(it, cluster, 6))
        assert is_keeper(cluster)
        assert target(cluster) == 2
        if creator is not None:
            creator.kill()


@pytest.mark.slow
@simulated
async def test_the_next_scheduler_keeps_the_age_and_the_limit_of_hours(it):
    with dask.config.set({"cml.limits.hours": 48}):
        cluster = simulate(name="lab")
        await cluster
    async with cluster:
        await lose_scheduler(it.platform, eventually)
        await eventually(lambda: store.read("lab").scheduler.hours == 48)
        wanted = json.loads((state_directory() / "lab" / board_file(1)).read_text())
        assert (wanted["created"], wanted["hours"]) == (store.read("lab").created.isoformat(), 48)
        await eventually(lambda: stands(it, cluster, 0) and "0.0 of 48 h" in repr(cluster))


@contextlib.asynccontextmanager
async def in_another_session(it):
    """A remote in another session, to which the platform does not list the cluster's sessions."""
    remotes, leave = asyncio.Queue(), asyncio.Event()

    async def follow():
        async with rebuild("lab") as other:
            remotes.put_nowait(other)
            await leave.wait()

    following = it.process("another", {"CDSW_ENGINE_ID": "anothersession00"}).start(follow())
    yield await remotes.get()
    leave.set()
    await following


@pytest.mark.slow
@simulated
async def test_a_scheduler_that_is_busy_or_unreachable_is_not_replaced(it, caplog):
    async def busy(op, *_, **__):
        asked.append(op)
        raise asyncio.TimeoutError("no answer within 10 s")

    async with supplied(name="lab", n_workers=1, silence_logs=False) as cluster:
        asked = []
        step_in(cluster, "asks the scheduler", busy)
        look_now(cluster)
        await eventually(lambda: len(set(asked)) > 1)
        step_out(cluster, "asks the scheduler")
        await eventually(lambda: is_connected(cluster))
        assert "Cannot manage" not in caplog.text, asked

        heal, session = cut_off(cluster), cluster.scheduler.session_id
        it.platform.say("list_workers", [{"id": session, "status": "succeeded"}])  # a wrong answer
        await eventually(lambda: cluster.scheduler.info["status"] == "succeeded")
        heal()
        await eventually(lambda: is_connected(cluster))
        await asyncio.sleep(20.0)

        it.files.stale, heal = True, cut_off(cluster)
        folder = state_directory() / "lab"
        await eventually(lambda: f"problem: cannot read the record in {folder}" in repr(cluster))
        await asyncio.sleep(100.0)
        heal()
        await eventually(lambda: is_connected(cluster))
        it.files.stale = False

        # The platform archives old sessions, also those that run.
        await eventually(lambda: cluster.scheduler.is_listed)
        it.platform.set(session, listed=False)
        await asyncio.sleep(10 * timing.unlisted)
        heal = cut_off(cluster)
        await asyncio.sleep(20.0)
        heal()
        await eventually(lambda: is_connected(cluster))
        await asyncio.sleep(60.0)
        cluster.scale(2)
        await eventually(lambda: stands(it, cluster, 2))
        assert store.read("lab").scheduler.number == scheduler_number(cluster) == 0
        assert cluster.status == Status.running

        # What a process says of its own connection is no news for clients.
        assert "Cluster lab not connected for" in log_of(cluster)
        cluster._tell("a line")
        events = scheduler_of(it, cluster).get_events
        await eventually(lambda: [event["text"] for _, event in events(protocol.LINES)] == ["a line"])


def end_session(it, session):
    """End a user's session, and so the worker sessions that it has launched. They get notice of that."""
    it.sessions.crash(it.platform.running["lab-scheduler"])
    it.platform.end_session(session)


@pytest.mark.slow
@simulated
async def test_a_process_that_launches_the_next_scheduler_gives_no_name_again_and_owns_the_sessions(it):
    """The keeper and the scheduler are lost together, as when the keeper's session ends."""
    env = {"CDSW_ENGINE_ID": "anothersession00"}
    options = {"name": "lab", "n_workers": 2, "worker_groups": {"gpu": {}}, "shutdown_on_close": False}
    creator = await create_elsewhere(it, env=env, **options)
    async with rebuild("lab", shutdown_on_close=True) as mine:
        for group in ("default", "gpu"):
            for n in (4, 0, 2):
                await mine.scale(n, worker_group=group)
                await eventually(lambda n=n, group=group: mine.worker_groups[group].n_arrived == n)
        await eventually(lambda: len(it.platform.live) == 5)
        before = len(it.platform.all)
        creator.kill()
        end_session(it, "anothersession00")
        await eventually(lambda: is_keeper(mine) and stands(it, mine, 4))
        assert len(it.platform.all) == before + 5
        assert "another session" not in log_of(mine)
        assert mine.problem is None
        heal = cut_off(mine)
        await eventually(lambda: manager("lab") == WHO)
        heal()
        await eventually(lambda: is_keeper(mine), 2 * timing.stay)


@pytest.mark.slow
@simulated
async def test_a_remote_of_another_session_leaves_a_crashed_scheduler_to_the_keeper_and_a_newer_one_alone(it):
    newer = SimpleNamespace(**{**vars(protocol), "PROTOCOL": protocol.PROTOCOL + 1})
    async with simulate(name="lab", n_workers=1) as cluster, in_another_session(it) as other:
        await eventually(lambda: arrived(other) == 1)
        it.sessions.crash(cluster.sessions[0].id)
        await eventually(lambda: scheduler_number(other) == 1 and is_connected(other))
        await eventually(lambda: stands(it, cluster, 1))
        assert (is_keeper(cluster), is_keeper(other)) == (True, False)
        # The package was upgraded while they ran, and the keeper has connected to it.
        with (
            mock.patch.object(plugin, "protocol", newer),
            mock.patch.object(sharing_keeper, "protocol", newer),
        ):
            step_in(cluster, "checks the scheduler's release", lambda *_: None)
            await lose_scheduler(it.platform, eventually)
            await eventually(lambda: stands(it, cluster, 1))
            said = f"speaks protocol {newer.PROTOCOL} of dask-cml"
            await eventually(lambda: said in repr(other), 30)
            await asyncio.sleep(2 * timing.silence)
            assert log_of(other).count(said) == 1
            assert other.status == Status.running
            step_out(cluster, "checks the scheduler's release")
        assert stands(it, cluster, 1)


@simulated
async def test_launches_of_the_next_scheduler_that_hang_do_not_come_true_as_many_schedulers(it):
    async with supplied(name="lab", n_workers=1) as cluster:
        launched = len(it.platform.all)
        it.platform.plan("launch_workers", *[Mishap(before=900.0)] * 3)
        it.platform.evict(it.platform.running["lab-scheduler"])
        await asyncio.sleep(1000)
        await eventually(lambda: stands(it, cluster, 1))
        assert len(it.platform.all) - launched <= 3


@simulated
async def test_what_is_asked_for_while_the_next_scheduler_is_refused_is_known_to_whoever_launches_it(it):
    async with supplied(name="lab", n_workers=1) as cluster:
        it.platform.configure({"sessions": 0})
        it.platform.evict(it.platform.running["lab-scheduler"])
        await eventually(lambda: store.read("lab").scheduler.number == 1)
        cluster.scale(2)
        await eventually(lambda: store.read("lab").scheduler.groups["default"].target == 2)
        it.platform.configure()
        await eventually(lambda: stands(it, cluster, 2))


@simulated
async def test_prune_leaves_a_cluster_alone_whose_manager_replaces_its_scheduler(it):
    creator = await create_elsewhere(it, name="lab", n_workers=1)
    async with rebuild("lab") as cluster:
        creator.kill()
        await eventually(lambda: is_keeper(cluster) and store.read("lab").launcher.lives())
        with mock.patch.object(failover, "_PAUSES", (10.0,)):
            it.platform.evict(it.platform.running["lab-scheduler"])
            assert "its manager or creator still runs" in await run_command("prune")
            async with rebuild("lab") as remote:
                assert scheduler_number(remote) == 1
        await eventually(lambda: stands(it, cluster, 1))
        await cluster.shutdown()


@simulated
async def test_a_scheduler_is_replaced_soon_whose_session_ends_after_its_connection_has_broken(it):
    async with supplied(name="lab", n_workers=1) as cluster:
        session = cluster.sessions[0].id
        it.sessions.processes[session].kill()
        await asyncio.sleep(1.0)
        it.platform.evict(session)
        broken = mock.Mock(side_effect=OSError)  # the connection, again
        with mock.patch.object(Cluster, "_watch_worker_status", broken):
            await eventually(lambda: scheduler_number(cluster) == 1, 6.0)
            await eventually(lambda: is_connected(cluster) and "lab-1" in it.platform.running)
        it.platform.evict(it.platform.running["lab-1"])
        await eventually(lambda: "lab-2" in it.platform.running and is_subscribed(cluster))


@simulated
async def test_a_replaced_keeper_replaces_the_scheduler_of_a_cluster_at_once_that_nobody_keeps(it):
    async with supplied(name="lab", n_workers=1) as cluster:
        heal = cut_off(cluster)
        await eventually(lambda: manager("lab") is None)
        it.sessions.crash(cluster.sessions[0].id)
        heal()
        await eventually(lambda: scheduler_number(cluster) == 1, timing.succession / 2)


@pytest.mark.slow
@simulated
async def test_a_scheduler_that_vanishes_unlisted_is_replaced_as_soon_as_its_session_says_so(it):
    await create_and_kill(it, name="lab", n_workers=1)
    async with in_another_session(it) as other:
        await eventually(lambda: manager("lab") == WHO and arrived(other) == 1)
        lost = other.sessions[0].id
        it.sessions.processes[lost].freeze()
        it.platform.evict(lost)
        await asyncio.sleep(3 * timing.silence)
        assert scheduler_number(other) == 0
        assert "not connected to the scheduler" in repr(other)
        assert "Cluster lab not connected for" in log_of(other)
        it.sessions.crash(lost)
        await eventually(lambda: scheduler_number(other) == 1 and is_connected(other), 30.0)
    await end_all(store.records())


@pytest.mark.slow
@simulated
async def test_a_request_of_an_outage_is_not_taken_for_a_repeat_of_a_later_one(it, caplog):
    async with simulate(name="lab", n_workers=1) as former, rebuild("lab") as other:
        for group in "extra", "gone":
            await former.add_worker_group(group)
        await eventually(lambda: arrived(former) == 1)
        heal = cut_off(former)
        await eventually(lambda: is_keeper(other))
        former.scale(1, worker_group="gone")  # which is refused then, and the others are posted nevertheless
        former.scale(1, worker_group="extra")
        await other.delete_worker_group("gone")
        await lose_scheduler(it.platform, eventually)
        await asyncio.sleep(3 * timing.silence)
        assert store.read("lab").scheduler.number == 1  # whom the former keeper does not replace
        await eventually(lambda: not is_keeper(former), seconds=300.0)
        heal()
        while not is_connected(former):
            former.scale(2)
            await asyncio.sleep(0.02)
        former.scale(2)
        await eventually(lambda: arrived(other) == 2 and other.worker_groups["extra"].n_workers == 1)
        assert is_keeper(other)
    assert "Cluster lab not changed: invalid worker_group='gone'" in caplog.text


@pytest.mark.slow
@simulated
async def test_the_last_board_of_an_earlier_scheduler_is_not_taken_for_that_of_the_lost_one(it):
    async def scale_up():
        keeper.scale(3)

    creator = it.process("creator", NOTEBOOK)
    keeper = await create_in(creator, name="lab", n_workers=1)
    async with rebuild("lab", shutdown_on_close=True) as remote:
        for n in [2, 1] * 10:  # many changes
            await remote.scale(n)
            await asyncio.sleep(1.0)
        step_in(remote, "joins a scheduler", mock.AsyncMock(side_effect=OSError("no route to host")))
        await lose_scheduler(it.platform, eventually)
        await eventually(lambda: scheduler_number(remote) == 1 and arrived(keeper) == 1)
        await creator.start(scale_up())
        await eventually(lambda: arrived(keeper) == 3)
        await until_written(keeper)
        creator.kill()
        it.platform.evict(store.read("lab").scheduler.session)
        await eventually(lambda: scheduler_number(remote) == 2)
        step_out(remote, "joins a scheduler")
        await eventually(lambda: is_keeper(remote) and stands(it, remote, 3))


@pytest.mark.slow
@simulated
async def test_who_launches_another_scheduler_carries_out_what_nobody_has_heard_of(it):
    async with simulate(name="lab", n_workers=1) as former:
        async with rebuild("lab") as other:
            await eventually(lambda: arrived(former) == 1)
            heal = cut_off(former)
            await eventually(lambda: is_keeper(other))
            former.scale(2)
            await lose_scheduler(it.platform, eventually)
            await eventually(lambda: not is_keeper(former), seconds=300.0)
        await lose_scheduler(it.platform, eventually)
        heal()
        await eventually(lambda: is_keeper(former) and arrived(former) == 2, seconds=300.0)


@pytest.mark.slow
@simulated
async def test_a_record_that_cannot_be_written_is_told_once_and_written_later(it, caplog):
    async with supplied(name="lab", n_workers=1) as cluster:
        folder = state_directory()
        folder.chmod(0o770)
        cluster.scale(2)
        await eventually(lambda: "Record of cluster lab not written" in caplog.text)
        await asyncio.sleep(60.0)
        assert caplog.text.count("Record of cluster lab not written") == 1
        folder.chmod(0o700)
        await eventually(lambda: len(store.read("lab").sessions) == 3)


@pytest.mark.slow
@simulated
async def test_an_observer_replaces_no_scheduler_of_a_cluster_without_a_keeper(it):
    await create_and_kill(it, name="lab", n_workers=1, orphan_timeout="1 hour")
    observer = await observe("lab")
    it.platform.evict(newest(it).id)
    await asyncio.sleep(2 * timing.silence)
    assert (observer.status, is_connected(observer)) == (Status.running, False)
    assert [record.name for record in store.records()] == ["lab"]
    assert [session.key for session in it.platform.all.values()].count("scheduler") == 1
    assert await end_all(store.records()) == {"lab": None}


@simulated
async def test_a_lost_scheduler_that_wakes_after_the_next_one_was_refused_is_not_followed(it, monkeypatch):
    async def wakes(self, *arguments):
        if self.place.number == 0:
            return it.platform.count("launch_workers") > 2
        return await answers(self, *arguments)

    answers = CMLScheduler.answers
    async with supplied(name="lab", n_workers=1) as cluster:
        monkeypatch.setattr(CMLScheduler, "answers", wakes)
        it.platform.refuse(times=2, half_made=False)
        it.platform.evict(it.platform.running["lab-scheduler"])
        await eventually(lambda: stands(it, cluster, 1))


@pytest.mark.slow
@simulated
async def test_a_next_scheduler_that_answers_late_is_not_replaced(it, monkeypatch):
    async def schedule_late(*arguments):
        await begun.wait()
        await schedule(*arguments)

    async with supplied(name="mine", n_workers=1, scheduler_timeout=20) as cluster:
        schedule, begun = it.sessions._schedule, asyncio.Event()
        monkeypatch.setattr(failover, "_PAUSES", (0.0, 10.0))
        monkeypatch.setattr(it.sessions, "_schedule", schedule_late)
        it.platform.evict(it.platform.running["mine-scheduler"])
        await eventually(lambda: scheduler_number(cluster) == 1 and len(it.platform.live) == 2, seconds=15.0)
        assert not is_connected(cluster)  # and its worker is launched
        await eventually(lambda: "did not answer within 20 s" in (cluster.problem or ""))
        await asyncio.sleep(3)  # in the pause before another one
        begun.set()
        await eventually(lambda: is_connected(cluster) and arrived(cluster) == 1)
        assert store.read("mine").scheduler.number == scheduler_number(cluster) == 1
        assert is_keeper(cluster)
        it.platform.lose("launch_workers", KeyError("engineId"))
        it.platform.evict(it.platform.running["mine-scheduler"])
        await eventually(lambda: scheduler_number(cluster) > 1 and is_connected(cluster))
        assert scheduler_number(cluster) == 2


@pytest.mark.slow
@simulated
async def test_neither_an_outage_nor_refusals_end_a_cluster_whose_scheduler_was_lost(it):
    with dask.config.set({"cml.scheduler-restarts": 1, "cml.quota-retry": "100ms"}):
        async with supplied(name="lab", n_workers=1) as cluster:
            it.platform.fail("launch_workers", *[OSError("no route to host")] * 10_000)
            it.platform.evict(it.platform.running["lab-scheduler"])
            await asyncio.sleep(1800.0)
            assert cluster.status == Status.running
            assert "CML did not launch lab-scheduler" in cluster.problem
            assert "(1 of 1 in a row" in log_of(cluster)
            it.platform.heal()
            it.platform.refuse(times=6, half_made=False)
            await eventually(lambda: "CML refused to launch lab-scheduler" in (cluster.problem or ""))
            await eventually(lambda: stands(it, cluster, 1), seconds=900.0)
            [lost] = [line for line in log_of(cluster).splitlines() if "lost, with tasks" in line]
            assert "CML refused" not in lost


@simulated
async def test_a_cluster_whose_folder_is_deleted_launches_nothing_more_and_ends(it, caplog):
    async with supplied(name="lab", n_workers=2) as cluster:
        folder = folder_of(cluster)
        shutil.rmtree(folder)
        it.platform.evict(it.platform.running["lab-0"])
        await eventually(lambda: cluster.status == Status.closed, seconds=30.0)
        assert lines_of(cluster)[-1].endswith(f"another process shut it down, or deleted its folder {folder}")
    assert caplog.text.count("launches no more sessions") == 1
    assert it.platform.requests["launch_workers"] == 3
    assert not it.platform.live


@simulated
async def test_a_cluster_that_is_deleted_between_two_schedulers_stays_deleted(it):
    with mock.patch.object(failover, "_PAUSES", (3600.0,)):
        async with simulate(name="lab", n_workers=1) as cluster:
            it.platform.evict(cluster.scheduler.session_id)
            await eventually(lambda: not is_connected(cluster))
            await end_all([store.read("lab")])
            await cluster.close()
    assert not it.platform.running


@pytest.mark.slow
@simulated
async def test_no_question_goes_to_a_scheduler_that_another_one_replaces(it):
    async with simulate(name="lab") as keeper, rebuild("lab") as remote:
        step_in(remote, "joins a scheduler", mock.AsyncMock(side_effect=OSError("no route to host")))
        it.platform.evict(keeper.scheduler.session_id)
        await eventually(lambda: scheduler_number(remote) == 1 and is_connected(keeper))
        # By now, the scheduler of another cluster may have the lost one's address.
        with pytest.raises(OSError, match="has not answered yet"):
            await ask_scheduler(remote, "terminate")


@pytest.mark.slow
@simulated
async def test_another_scheduler_ends_the_launches_of_the_last_one_also_those_that_were_not_answered(it):
    def running():
        return {session.key for session in it.platform.live_sessions if session.status == "running"}

    with dask.config.set({"cml.scheduler-restarts": 9}):
        async with simulate(name="lab") as cluster:
            it.platform.plan("launch_workers", Mishap(before=60.0))
            cluster.scale(1)
            await eventually(lambda: it.platform.count("launch_workers") == 2)
            it.platform.evict(newest(it).id)
            await eventually(lambda: stands(it, cluster, 1), seconds=25.0)
            launched = it.platform.count("launch_workers")
            await eventually(lambda: not it.platform.under_way)
            await asyncio.sleep(30.0)
            assert it.platform.count("launch_workers") == launched
            assert stands(it, cluster, 1)

            it.platform.lose("launch_workers", KeyError("engineId"))  # of a scheduler, then of a worker
            it.platform.evict(newest(it).id)
            await eventually(lambda: scheduler_number(cluster) == 3 and stands(it, cluster, 1))
            before = {*cluster.workers}
            it.platform.plan("launch_workers", Mishap(), Mishap(error=KeyError("engineId")))
            it.platform.evict(newest(it).id)
            await eventually(lambda: "scheduler" in running() and running() - before - {"scheduler"})
            it.platform.evict(newest(it).id)
            await eventually(lambda: store.read("lab").scheduler.number >= 5)
            await eventually(lambda: stands(it, cluster, 1))


@pytest.mark.slow
@simulated
async def test_a_process_does_not_wait_for_its_own_claim_after_a_failure_of_the_file_system(it):
    with dask.config.set({"cml.scheduler-restarts": 1}):
        async with supplied(name="lab", n_workers=1) as cluster:
            link = it.files.link

            def link_and_fail(source, target, **options):
                link(source, target, **options)
                if str(target).endswith("board-1.json"):
                    it.files.stale = True
                    it.loop.call_later(2.0, setattr, it.files, "stale", False)
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

            it.files.link = link_and_fail
            begin = time.monotonic()
            it.platform.evict(cluster.sessions[0].id)
            await eventually(lambda: scheduler_number(cluster) == 2, 3000.0)
            await eventually(lambda: stands(it, cluster, 1))
            assert time.monotonic() - begin < 150.0


@pytest.mark.slow
@simulated
async def test_a_process_that_died_after_its_claim_is_not_waited_for(it):
    dead = {**vars(Maker.this_process()), "pid": it.process("dead").pid}
    it.processes[-1].kill()
    async with simulate(name="lab", n_workers=1) as cluster:
        record = store.read("lab")
        content = {"cluster": "lab", "record": record.id, "groups": {"default": {"options": {}, "target": 1}}}
        assert store.claim_scheduler(record, 1, {**content, "maker": dead})
        await eventually(lambda: store.read("lab").scheduler.number == 2)
        await eventually(lambda: stands(it, cluster, 1))
        assert target(cluster) == 1


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["claimed", "refused"])
@simulated
async def test_who_leaves_after_its_claim_and_before_its_launch_is_not_waited_for(it, moment):
    cluster = await simulate(name="lab", n_workers=1)
    async with rebuild("lab", shutdown_on_close=True) as other:
        await eventually(lambda: arrived(other) == 1)
        it.platform.refuse(times=9 * (moment == "refused"), half_made=False)
        it.platform.evict(it.platform.running["lab-scheduler"])
        await eventually(lambda: store.read("lab").scheduler.number == 1)
        await eventually(lambda: moment == "claimed" or "refused" in str(cluster.problem))
        await cluster.leave()
        it.platform.heal()
        await eventually(lambda: scheduler_number(other) == 2 and stands(it, other, 1), 100.0)


@pytest.mark.slow
@simulated
async def test_who_leaves_while_it_replaces_a_scheduler_launches_no_more_workers(it):
    with dask.config.set({"cml.api.threads": 1}):
        cluster = await simulate(name="lab", n_workers=3)
        n = it.platform.count("launch_workers")
        it.platform.plan("launch_workers", Mishap(), Mishap(before=2.0))
        it.platform.evict(it.platform.running["lab-scheduler"])
        await eventually(lambda: it.platform.count("launch_workers") == n + 2)
        await cluster.leave()
        assert it.platform.count("launch_workers") == n + 2
        await cluster.shutdown()


@pytest.mark.slow
@simulated
async def test_what_a_faster_process_wanted_counts_although_it_died_after_its_claim(it, monkeypatch):
    dead = {**vars(Maker.this_process()), "pid": it.process("dead").pid}
    it.processes[-1].kill()
    claim = store.claim_scheduler

    def lose(record, number, board):
        monkeypatch.undo()
        groups = {"default": {"options": {}, "target": 3, "adapt": None}}
        report = {**board["report"], "groups": groups}
        assert claim(record, number, {**board, "keeper": "other", "maker": dead, "report": report})
        return claim(record, number, board)

    async with supplied(name="lab", n_workers=1) as cluster:
        monkeypatch.setattr(store, "claim_scheduler", lose)
        it.platform.evict(it.platform.running["lab-scheduler"])
        await eventually(lambda: scheduler_number(cluster) == 2 and arrived(cluster) > 0, 300.0)
        assert target(cluster) == 3


@pytest.mark.slow
@simulated
async def test_who_waits_for_the_next_scheduler_has_a_longer_time_limit_and_launches_none(it, caplog):
    async def wait():
        await cluster

    def launched():
        return [session.key for session in it.platform.all.values()].count("scheduler")

    async with (
        simulate(name="lab", n_workers=1, pending_timeout=4, scheduler_timeout=3) as cluster,
        Client("cml://lab", asynchronous=True, timeout=5) as client,
    ):
        await client.wait_for_workers(1)
        with it.platform.held("launch_workers"):
            it.platform.evict(it.platform.running["lab-scheduler"])
            await eventually(lambda: client.status == "connecting" and scheduler_number(cluster) == 1)
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(8)
            assert (client.status, client._timeout) == ("connecting", 5)
        await waiting
        await eventually(lambda: stands(it, cluster, 1))
        assert launched() == 2
        assert await client.submit(pow, 2, 2) == 4
        assert client._timeout == 5
        with mock.patch.object(address, "RECONNECT_TIMEOUT", 9.0), it.platform.held("launch_workers"):
            it.platform.evict(it.platform.running["lab-scheduler"])
            await eventually(lambda: client.status == "closed", seconds=40.0)
        await eventually(lambda: stands(it, cluster, 1))
    assert "Failed to reconnect to scheduler after 16.00 seconds" in caplog.text


def newest(it):
    return [session for session in it.platform.all.values() if session.key == "scheduler"][-1]


async def test_another_scheduler_at_the_old_address_is_not_taken_for_the_lost_one():
    lost = SimpleNamespace(place=Place(Path("mine"), record="of the cluster"))
    async with Scheduler(dashboard_address=":0", port=0, host="127.0.0.1") as stranger:
        assert not await CMLScheduler.answers(lost, stranger.address, 60.0)
        with pytest.raises(CMLError, match="belongs to another cluster"):
            await Link("me", "mine", "somebody").join(stranger.address, None, lost.place.record)


@pytest.mark.slow
@simulated
async def test_a_request_counts_although_keeper_and_scheduler_end_before_it_is_written(it, monkeypatch):
    creator = await create_elsewhere(it, name="mine", shutdown_on_close=False, worker_groups={"big": {}})
    async with rebuild("mine") as cluster:
        with monkeypatch.context() as patch:
            patch.setattr(plugin.StateFile, "write", lambda *_, **__: None)
            await cluster.scale(3)
            creator.kill()
            it.platform.evict(cluster.sessions[0].id)
        delay_requests(cluster, 60.0)
        with it.platform.held("launch_workers"):
            asked = cluster.scale(1, worker_group="big")
            await eventually(lambda: scheduler_number(cluster) == 1)
            await asyncio.wait_for(asked, 61.0)  # does not wait for the launch
        await eventually(lambda: arrived(cluster) == 4)
        assert target(cluster) == 3
        await cluster.shutdown()


def all_ids(platform):
    return [session.id for session in platform.live_sessions]


@pytest.mark.slow
@simulated
async def test_a_cluster_goes_on_of_which_some_sessions_are_stopped_and_ends_with_all(it):
    with dask.config.set({"cml.scheduler-restarts": 9}):
        cluster = await simulate(name="lab", n_workers=2)
        for n_stopped in 1, 2, 0:
            await eventually(lambda: stands(it, cluster, 2))
            await asyncio.sleep(timing.stray)
            scheduler, *workers = all_ids(it.platform)
            if n_stopped:
                it.platform.stop_workers(*[scheduler, *workers][:n_stopped])
                await eventually(lambda lost=scheduler: lost not in it.platform.live)
            else:
                it.platform.evict(scheduler)
                it.platform.stop_workers(*workers)
    await eventually(lambda: scheduler_number(cluster) == 3 and stands(it, cluster, 2))
    n_launched = it.platform.count("launch_workers")
    it.platform.stop_workers(*all_ids(it.platform))
    await eventually(lambda: cluster.status == Status.closed)
    why = "somebody stopped all its sessions, as `stop_workers()` of CML does"
    assert f"Cluster lab shut down: {why}" in log_of(cluster)
    assert it.platform.count("launch_workers") == n_launched
    assert it.clusters == []

    cluster = await simulate(name="lab", n_workers=2)  # whose workers somebody stops before its scheduler
    await eventually(lambda: arrived(cluster) == 2)
    await asyncio.sleep(timing.stray)
    scheduler, *workers = all_ids(it.platform)
    it.platform.stop_workers(*workers)
    await eventually(lambda: "launching a replacement" in log_of(cluster))
    it.platform.stop_workers(scheduler)
    await eventually(lambda: cluster.status == Status.closed)
    assert not it.platform.live
    assert it.clusters == []


@simulated
async def test_a_cluster_goes_on_if_nobody_can_list_whether_all_its_sessions_were_stopped(it, monkeypatch):
    sessions, errors = WorkersAPI.sessions, [CMLError("not listed")]

    async def fails_once(api):
        if errors:
            raise errors.pop()
        return await sessions(api)

    async with supplied(name="lab", n_workers=1) as cluster:
        monkeypatch.setattr(WorkersAPI, "sessions", fails_once)
        it.platform.stop_workers(*all_ids(it.platform))
        await eventually(lambda: scheduler_number(cluster) == 1 and stands(it, cluster, 1))


@pytest.mark.slow
@simulated
async def test_a_record_that_cannot_be_read_in_time_after_the_claim_costs_no_number(it, monkeypatch):
    refreshed, hanging = store.refreshed, [1.0] * 25

    def hangs_once(record):
        while hanging:
            time.sleep(hanging.pop())
        return refreshed(record)

    async with supplied(name="lab", n_workers=1) as cluster:
        monkeypatch.setattr(store, "refreshed", hangs_once)
        it.platform.evict(it.platform.running["lab-scheduler"])
        await eventually(lambda: scheduler_number(cluster) > 0 and stands(it, cluster, 1))
        assert scheduler_number(cluster) == 1
