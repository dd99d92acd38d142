"""One process hands a cluster to another: what was asked for is carried out, once, and nothing is lost."""

import asyncio
from typing import Any

import pytest
from clusters import (
    NIGHT,
    NOTEBOOK,
    SCHEDULERS_SESSION,
    arrived,
    ask_when_taking_over,
    create_elsewhere,
    create_in,
    delay_requests,
    found_by_dask_ctl,
    is_keeper,
    keep_busy,
    leave_alone,
    limits,
    log_of,
    manager,
    n_connected,
    observe,
    rebuild,
    run_command,
    shut_down,
    simulate,
    target,
)
from distributed import Client
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster

pytestmark = pytest.mark.usefixtures("light")

#: The environment of a process in another session than that of the tests.
OTHER = {"CDSW_ENGINE_ID": "other12345678901"}


async def addresses_of(client: Client) -> dict[str, str]:
    workers = (await client.scheduler.identity())["workers"]
    return {worker["name"]: address for address, worker in workers.items()}


def seen(cluster: CMLCluster) -> list[tuple[str, str, str]]:
    return [(session.id, session.name, session.status) for session in cluster.sessions]


@pytest.mark.slow
@simulated
async def test_who_scales_while_it_takes_over_ends_adaptive_scaling(it):
    creator = await create_elsewhere(it, name="lab", n_workers=1)
    asked: list[Any] = []
    async with rebuild("lab", shutdown_on_close=True) as remote:
        remote.adapt(1, 10, interval="1s")
        await eventually(lambda: limits(remote) == (1, 10))
        delay_requests(remote, 1.0)
        ask_when_taking_over(remote, lambda: asked.append(remote.scale(3)))
        creator.kill()
        await eventually(lambda: is_keeper(remote) and asked)
        await asked[0]
        await eventually(lambda: arrived(remote) == 3)
        await asyncio.sleep(120.0)
        assert (limits(remote), target(remote), arrived(remote)) == (None, 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("busy", [0.0, 1.0])
@simulated
async def test_scale_after_a_worker_was_closed_by_its_name_counts(it, busy):
    creator = await create_elsewhere(it, name="lab", n_workers=3)
    async with rebuild("lab", shutdown_on_close=True) as remote:
        await eventually(lambda: arrived(remote) == 3)
        if busy:
            creator.pause(busy, threads=False)
        await remote.scale_down(["lab-0"])
        await remote.scale(3)
        await asyncio.sleep(60.0)
        reached = target(remote), arrived(remote), "lab-0" in it.platform.running
        await remote.shutdown()
    assert reached == (3, 3, False)


@pytest.mark.slow
@simulated
async def test_the_worker_to_close_stays_the_same_if_its_manager_dies_meanwhile(it):
    creator = await create_elsewhere(it, name="lab", security=True, n_workers=3)
    async with (
        rebuild("lab", shutdown_on_close=True) as remote,
        Client("cml://lab", asynchronous=True) as client,
    ):
        await eventually(lambda: arrived(remote) == 3)
        addresses = await addresses_of(client)
        [data] = await client.scatter([bytes(10_000_000)], workers=[addresses["lab-1"]])
        await client.scatter([bytes(100)], workers=[addresses["lab-0"]])
        for name in ("lab-0", "lab-2"):  # they do not take the data for a while
            keep_busy(it, name, 40.0)
        await remote.scale_down(["lab-1"])
        await eventually(lambda: target(remote) == 2)
        await asyncio.sleep(1.0)
        creator.kill()
        await eventually(lambda: is_keeper(remote))
        await asyncio.sleep(200.0)
        running, status = {*it.platform.running}, data.status
        await remote.shutdown()
    assert (running, status) == ({"lab-scheduler", "lab-0", "lab-2"}, "finished")


@pytest.mark.slow
@simulated
async def test_a_manager_that_was_stopped_for_a_minute_does_nothing_to_its_successors_workers(it):
    """The scheduler is busy when it goes on, so it cannot hear at once that it was replaced."""
    creator = it.process("creator", NOTEBOOK)
    first = await create_in(creator, name="lab", security=True, n_workers=1)
    await asyncio.sleep(30.0)
    both = 0
    async with rebuild("lab") as other, Client("cml://lab", asynchronous=True) as client:
        await eventually(lambda: arrived(other) == 1)
        creator.pause(60.0)
        loop = asyncio.get_running_loop()
        goes_on = loop.time() + 60.0
        await eventually(lambda: is_keeper(other))
        await other.scale(3)
        await eventually(lambda: arrived(other) == 3)
        address = (await addresses_of(client))["lab-2"]
        [data] = await client.scatter([[1, 2, 3]], workers=[address])
        before = dict(it.platform.running)
        await asyncio.sleep(goes_on - 0.5 - loop.time())
        keep_busy(it, "lab-scheduler", 8.0)
        while loop.time() < goes_on + 20.0:
            await asyncio.sleep(0.1)
            both += is_keeper(first) and is_keeper(other)
        await asyncio.sleep(60.0)
        after, status = dict(it.platform.running), data.status
        await other.shutdown()
    assert both == 0
    assert after == before
    assert status == "finished"


@pytest.mark.slow
@simulated
async def test_a_manager_that_was_stopped_in_the_middle_of_a_step_launches_nothing_again(it):
    creator = it.process("creator", NOTEBOOK)
    first = await create_in(creator, name="lab", security=True, n_workers=1)
    async with rebuild("lab") as other:
        with it.platform.held("list_workers"):
            creator.call(first.scale, 3)
            await eventually(lambda: target(other) == 3)
            await asyncio.sleep(1.0)
            creator.pause(60.0)
        await eventually(lambda: is_keeper(other) and arrived(other) == 3)
        launched = {*it.platform.all}
        assert len(launched) == 4
        await asyncio.sleep(120.0)
        assert {*it.platform.all} == {*it.platform.live} == launched
        await other.shutdown()


@pytest.mark.slow
@simulated
async def test_a_manager_that_regains_a_cluster_knows_what_was_done_meanwhile(it):
    creator = it.process("creator", NOTEBOOK)
    first = await create_in(creator, name="lab", security=True, n_workers=1)
    creator.pause(60.0)
    other = await rebuild("lab")
    async with Client("cml://lab", asynchronous=True) as client:
        await eventually(lambda: is_keeper(other))
        await other.scale(2)
        await eventually(lambda: arrived(other) == 2)
        await other.scale_down(["lab-0"])
        await eventually(lambda: {*it.platform.running} == {"lab-scheduler", "lab-1"})
        [data] = await client.scatter([[1, 2, 3]])
        await other.leave()
        before, launched = dict(it.platform.running), len(it.platform.all)
        assert not is_keeper(first)
        await eventually(lambda: is_keeper(first))
        await asyncio.sleep(60.0)
        after, status = dict(it.platform.running), data.status
        reached = target(first), arrived(first), first.problem, len(it.platform.all)
    creator.kill()
    await shut_down("lab")
    assert (after, status) == (before, "finished")
    assert reached == (1, 1, None, launched)
    assert "lost" not in log_of(first)


@pytest.mark.slow
@simulated
async def test_a_manager_that_regains_a_cluster_launches_no_queued_session_again(it):
    creator = it.process("creator", NOTEBOOK)
    first = await create_in(creator, name="lab", n_workers=1)
    it.platform.configure({"sessions": 2}, waits_for_room=True)
    creator.pause(60.0)
    other = await rebuild("lab")
    await eventually(lambda: is_keeper(other))
    await other.scale(3)
    await eventually(lambda: len(it.platform.live) == 4)
    await other.leave()
    queued = {*it.platform.live}
    assert not is_keeper(first)
    await eventually(lambda: is_keeper(first))
    await asyncio.sleep(60.0)
    assert {*it.platform.all} == {*it.platform.live} == queued
    it.platform.configure()
    await eventually(lambda: arrived(first) == 3)
    assert {*it.platform.live} == queued
    creator.kill()
    await shut_down("lab")


@pytest.mark.slow
@simulated
async def test_what_a_manager_says_that_regains_a_cluster_replaces_what_the_one_before_said(it):
    creator = it.process("creator", NOTEBOOK)
    first = await create_in(creator, name="lab", n_workers=1)
    await asyncio.sleep(30.0)
    observer = await observe("lab")
    await eventually(lambda: seen(observer) == seen(first))
    creator.pause(60.0)

    async def keep_for_a_while() -> None:
        other = await rebuild("lab")
        await eventually(lambda: is_keeper(other))
        it.platform.configure({"sessions": 2})
        await other.scale(2)
        await eventually(lambda: other.problem is not None)
        await other.scale(1)
        it.platform.configure()
        await other.leave()

    await it.process("other", NOTEBOOK).start(keep_for_a_while())
    await eventually(lambda: is_keeper(first))
    await eventually(lambda: seen(observer) == seen(first) and observer.problem == first.problem, 60.0)
    await observer.leave()
    creator.kill()
    await shut_down("lab")


@pytest.mark.slow
@simulated
async def test_who_leaves_a_cluster_that_lives_on_leaves_the_rest_to_its_schedulers_session(it, caplog):
    cluster = await simulate(**NIGHT, n_workers=1)
    await eventually(lambda: arrived(cluster) == 1)
    with it.platform.held("launch_workers"):
        cluster.scale(2)
        await asyncio.sleep(1.0)
        await cluster.close()
    assert "not launched" not in caplog.text
    await eventually(lambda: n_connected("night") == 2, 120.0)
    await eventually(lambda: manager("night") == SCHEDULERS_SESSION)
    await shut_down()


@pytest.mark.slow
@simulated
async def test_who_leaves_a_cluster_of_a_killed_creator_leaves_the_rest_to_its_schedulers_session(it):
    creator = await create_elsewhere(it, name="lab", security=True, n_workers=1)
    creator.kill()
    async with rebuild("lab") as other:
        await eventually(lambda: is_keeper(other))
        other.scale(0)
        other.scale(2)
    while "no process. Its scheduler's session takes over" not in await run_command("info", "lab"):
        await asyncio.sleep(1.0)
    await eventually(lambda: n_connected("lab") == 2, 60.0)
    assert manager("lab") == SCHEDULERS_SESSION
    await shut_down("lab")


@pytest.mark.slow
@simulated
async def test_a_cluster_that_lives_on_is_managed_while_a_monitor_connects_every_ten_seconds(it):
    async def monitor() -> None:
        while True:
            async with rebuild("night"):
                await asyncio.sleep(1.0)
            await asyncio.sleep(9.0)

    await leave_alone(it, n_workers=2)
    watching = it.process("monitor", OTHER).start(monitor())
    await eventually(lambda: manager("night") == SCHEDULERS_SESSION, 120.0)
    it.platform.evict(it.platform.running["night-0"])
    await eventually(lambda: "night-2" in it.platform.running and n_connected("night") == 2, 120.0)
    await asyncio.sleep(60.0)
    assert manager("night") == SCHEDULERS_SESSION
    watching.cancel()
    await shut_down()


@simulated
async def test_dask_ctls_list_does_not_manage_a_cluster(it):
    await leave_alone(it, n_workers=1)
    await eventually(lambda: manager("night") is None)
    [listed] = await found_by_dask_ctl()
    async with listed:
        await asyncio.sleep(8.0)
        assert not is_keeper(listed)
        assert manager("night") is None
    await eventually(lambda: manager("night") == SCHEDULERS_SESSION, 60.0)
    await shut_down()


@pytest.mark.slow
@simulated
async def test_dask_ctl_scales_a_cluster_that_lives_on(it):
    await leave_alone(it, n_workers=1)
    await eventually(lambda: manager("night") == SCHEDULERS_SESSION)
    [found] = await found_by_dask_ctl()
    async with found:
        await found.scale(2)
        await eventually(lambda: n_connected("night") == 2)
    assert manager("night") == SCHEDULERS_SESSION
    await shut_down()


@pytest.mark.slow
@pytest.mark.parametrize("after", [0.0, 60.0])
@simulated
async def test_dask_cml_adapt_returns_whoever_manages_the_cluster(it, after):
    """Right after its creation nobody does, later its scheduler's session."""
    await leave_alone(it)
    await asyncio.sleep(after)
    printed = await asyncio.wait_for(run_command("adapt", "night", 1, 3), 60.0)
    assert printed == "Cluster night adapts between 1 and 3 workers\n"
    await eventually(lambda: n_connected("night") == 1)
    await eventually(lambda: manager("night") == SCHEDULERS_SESSION)
    async with Client("cml://night", asynchronous=True) as client:
        futures = client.map(asyncio.sleep, [3600] * 100, pure=False)
        await eventually(lambda: n_connected("night") == 3)
        await client.cancel(futures)
        await eventually(lambda: n_connected("night") == 1)
    await shut_down()


@pytest.mark.slow
@simulated
async def test_dask_cml_adapt_says_if_nobody_is_to_manage_the_cluster(it):
    creator = await create_elsewhere(it, name="lab", security=True)
    creator.kill()
    await eventually(lambda: manager("lab") is None)
    printed = await asyncio.wait_for(run_command("adapt", "lab", 0, 3), 60.0)
    assert "Cluster lab adapts between 0 and 3 workers as soon as a process manages it" in printed
    assert "CMLCluster.from_name('lab')" in printed
    while "adapts between 0 and 3" not in (listed := await run_command("list")):
        await asyncio.sleep(1.0)
    later = "adapts between 0 and 3 as soon as a process manages it"
    assert later in listed
    assert later in await run_command("info", "lab")
    async with rebuild("lab", shutdown_on_close=True) as cluster:
        await eventually(lambda: is_keeper(cluster))
        assert limits(cluster) == (0, 3)
        while "as soon as" in (listed := await run_command("list")):
            await asyncio.sleep(1.0)
        assert "adapts between 0 and 3" in listed


@simulated
async def test_dask_cml_adapt_leaves_it_to_the_notebook_that_manages_the_cluster(it):
    async with simulate(name="lab", security=True) as cluster:
        await run_command("adapt", "lab", 1, 3)
        await eventually(lambda: arrived(cluster) == 1)
        assert limits(cluster) == (1, 3)
        assert is_keeper(cluster)
