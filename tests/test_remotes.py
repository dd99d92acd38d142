"""Clusters that another process keeps: what a remote shows, and what it does if nobody answers."""

import asyncio
import re
from typing import Any
from unittest import mock

import pytest
from clusters import (
    arrived,
    board_of,
    create_elsewhere,
    id_on_board,
    is_keeper,
    lose_answers,
    move_scheduler,
    rebuild,
    record_of,
    run_command,
    scheduler_number,
    scheduler_of,
    shut_down,
    simulate,
    step_in,
    target,
    unsubscribe,
)
from simulated.testing import eventually, simulated

from dask_cml import CMLError, NoSuchCluster
from dask_cml.protocol import BoardState, Request
from dask_cml.records import store
from dask_cml.scheduler.plugin import CMLSchedulerPlugin
from dask_cml.scheduler.resident import WHO
from dask_cml.sharing.keeper import Link


@pytest.mark.slow
@simulated
async def test_a_remote_sees_the_workers_of_another_scheduler(it):
    async with simulate(name="mine", n_workers=1) as cluster, rebuild("mine") as remote:
        await eventually(lambda: arrived(remote) == 1)
        may_follow = asyncio.Event()

        async def check_later(record):
            await may_follow.wait()
            await check(record)

        check = step_in(remote, "checks the scheduler", check_later)
        it.platform.evict(cluster.sessions[0].id)
        await eventually(lambda: scheduler_number(cluster) == 1 and arrived(cluster) == 1)
        may_follow.set()
        await eventually(lambda: remote.worker_spec.keys() == cluster.worker_spec.keys())
        await eventually(lambda: arrived(remote) == 1)


@simulated
async def test_a_remote_links_to_the_dashboard_of_another_scheduler(it):
    async with simulate(name="mine") as cluster, rebuild("mine") as remote:
        await eventually(lambda: remote.dashboard_link == cluster.dashboard_link)
        it.platform.evict(cluster.sessions[0].id)
        await eventually(lambda: scheduler_number(cluster) == scheduler_number(remote) == 1)
        link = f"https://{it.platform.running['mine-scheduler']}.cml.example.com/status"
        await eventually(lambda: link == remote.dashboard_link == cluster.dashboard_link)


@simulated
async def test_nobody_follows_another_cluster_that_has_the_address_of_a_lost_scheduler(it):
    async with simulate(name="other") as other, simulate(name="mine", n_workers=1) as cluster:
        async with rebuild("mine") as remote:
            for process in cluster, remote:
                move_scheduler(process, other)
            for process in cluster, remote:
                await eventually(lambda process=process: "another cluster, 'other'" in repr(process), 30)
            it.platform.evict(it.platform.running["mine-scheduler"])
            await eventually(lambda: scheduler_number(remote) == 1)
            await eventually(lambda: arrived(cluster) == arrived(remote) == target(remote) == 1)
        assert is_keeper(other)


def break_connection(comm: Any) -> None:
    comm.abort()


def raise_error(comm: Any) -> None:
    raise RuntimeError("of the scheduler")


@pytest.mark.parametrize("fail", [break_connection, raise_error])
@simulated
async def test_a_remote_shows_what_is_wanted_although_the_scheduler_does_not_describe_its_workers(it, fail):
    async with simulate(name="mine", n_workers=1) as cluster, rebuild("mine") as remote:
        handlers = scheduler_of(it, cluster).handlers
        with mock.patch.dict(handlers, subscribe_worker_status=fail):
            await unsubscribe(remote)
            await cluster.scale(2)
            await eventually(lambda: target(remote) == 2)
            await eventually(lambda: "problem: " in repr(remote))
        await eventually(lambda: arrived(remote) == 2 and "problem: " not in repr(remote))


@pytest.mark.slow
@simulated
async def test_a_change_that_a_remote_cannot_write_is_not_remembered(it):
    async with simulate(name="mine", n_workers=2) as cluster, rebuild("mine") as remote:
        await eventually(lambda: arrived(remote) == 2)
        it.sessions.freeze(cluster.sessions[0].id)
        with pytest.raises(CMLError, match="does not answer"):
            await remote.scale_down(["mine-0"])
        await eventually(lambda: scheduler_number(cluster) == scheduler_number(remote) == 1)
        await eventually(lambda: remote.worker_spec.keys() == cluster.worker_spec.keys())
        await eventually(lambda: arrived(remote) == 2)
        assert target(remote) == 2


@simulated
async def test_a_remote_names_the_lost_scheduler_that_does_not_answer(it):
    async with simulate(name="mine") as cluster, rebuild("mine") as remote:
        lost = store.read("mine").scheduler.address
        it.platform.evict(cluster.sessions[0].id)
        with pytest.raises(CMLError, match=f"at {lost} does not answer"):
            await remote.scale(1)
        assert scheduler_number(remote) == 1


@simulated
async def test_an_odd_url_spoils_no_view(it):
    async with simulate(name="lab", n_workers=3) as cluster, rebuild("lab") as remote:
        it.platform.set(cluster.sessions[0].id, app_url="javascript:alert(1)")
        for n in 3, 2:  # at first, and as news
            await cluster.scale(n)
            await eventually(lambda n=n: arrived(cluster) == arrived(remote) == n)
            for shown in cluster, remote:
                await eventually(lambda n=n, shown=shown: f"workers={n}, threads={n}" in repr(shown))
                assert {*re.findall(r"Total threads:</strong>\s+(\d+)", shown._repr_html_())} == {str(n)}
        await eventually(lambda: {session.name for session in remote.sessions[1:]} == {*cluster.worker_spec})
        await eventually(lambda: "running" in remote.sessions[2].status)
        assert remote.sessions[0].app_url is None


@simulated
async def test_who_cannot_succeed_a_keeper_leaves_the_cluster_to_another_process(it, monkeypatch):
    creator = await create_elsewhere(it, name="mine", n_workers=1, orphan_timeout="10 minutes")
    async with rebuild("mine") as first:
        read_again = store.read_again

        def read_again_in_others(record):
            if record is record_of(first):
                raise CMLError("the record cannot be read here")
            return read_again(record)

        monkeypatch.setattr(store, "read_again", read_again_in_others)
        creator.kill()
        await eventually(lambda: board_of(first).keeper in (None, id_on_board(first)))
        async with rebuild("mine") as second:
            await eventually(lambda: is_keeper(second))
            assert not is_keeper(first)
            await second.shutdown()


@pytest.mark.slow
@simulated
async def test_a_request_that_the_scheduler_has_by_a_report_is_not_posted_again_by_who_leaves(it):
    """Another user may have asked for something else meanwhile."""
    async with simulate(name="mine", security=True, shutdown_on_close=False, n_workers=1) as cluster:
        lose_answers(cluster)
        await cluster.scale(3)
        await eventually(lambda: store.read("mine").scheduler.groups["default"].target == 3)
        await run_command("scale", "mine", 2)
        await eventually(lambda: target(cluster) == 2)
    await eventually(lambda: store.read("mine").scheduler.manager == WHO)
    await asyncio.sleep(10.0)
    assert store.read("mine").scheduler.groups["default"].target == 2
    await shut_down("mine")


async def test_the_answer_of_a_replaced_scheduler_does_not_count_for_a_request():
    async def ask(op, *_, **message):
        asked.append((link.address, message["number"]))
        if len(asked) == 1:  # another scheduler is joined meanwhile
            link.forget()
            link.address, link.board, link.connected = "tcp://10.0.0.2:8786", BoardState(revision=3), True
            return {"revision": 500, "keeper": "another"}
        return {"revision": 4, "keeper": "me"}

    asked, link = [], Link("me", "mine", "somebody")
    link.address, link.connected, link.ask = "tcp://10.0.0.1:8786", True, ask
    await link.post(1, Request(kind="scale", n=5))
    assert asked == [("tcp://10.0.0.1:8786", 1), ("tcp://10.0.0.2:8786", 1)]
    assert (link.board.revision, link.board.keeper) == (4, "me")


@pytest.mark.slow
@simulated
async def test_a_cluster_is_found_whose_scheduler_names_no_session(it, monkeypatch):
    def without_session(self):
        return {**state(self), "session": None}

    state = CMLSchedulerPlugin._state
    monkeypatch.setattr(CMLSchedulerPlugin, "_state", without_session)
    async with simulate(name="lab", n_workers=1) as cluster, rebuild("lab") as remote:
        await eventually(lambda: arrived(remote) == 1)
        await asyncio.sleep(60.0)
        await remote.scale(2)
        await eventually(lambda: arrived(remote) == arrived(cluster) == 2)
        assert remote.problem is None
    assert not it.platform.live


@simulated
async def test_who_connects_waits_for_no_list_of_a_platform_that_hangs(it):
    async with simulate(name="mine"):
        with it.platform.hangs("list_workers", times=1000):
            began = asyncio.get_running_loop().time()
            async with rebuild("mine"):
                assert asyncio.get_running_loop().time() - began < 1


@pytest.mark.parametrize("seconds", [0, 60])
@simulated
async def test_who_connects_while_the_scheduler_is_replaced_reaches_the_next_one(it, seconds):
    await create_elsewhere(it, name="mine", n_workers=1)
    with it.platform.hangs("launch_workers", times=1000) as answer:
        loop = asyncio.get_running_loop()
        began, answering = loop.time(), loop.call_later(seconds, answer)
        it.platform.evict(it.platform.running["mine-scheduler"])
        async with rebuild("mine") as remote:
            assert loop.time() - began < 25 + seconds
            assert scheduler_number(remote) == 1
            await remote.shutdown()
        answering.cancel()


@simulated
async def test_who_connects_reads_at_once_that_the_cluster_is_deleted_meanwhile(it):
    await create_elsewhere(it, name="mine")
    it.sessions.processes[it.platform.running["mine-scheduler"]].pause(600.0)
    connecting = asyncio.create_task(rebuild("mine").__aenter__())
    await asyncio.sleep(1.0)
    await run_command("delete", "mine")
    assert not connecting.done()
    with pytest.raises(NoSuchCluster):
        await asyncio.wait_for(connecting, 5.0)
