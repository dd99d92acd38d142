"""Lost workers are replaced, and what they held is computed again."""

import asyncio
import re
import time
from itertools import pairwise

import dask
import pytest
from clusters import arrived, board_of, connected, log_of, make, simulate, supplied
from distributed import Client, KilledWorker, NannyPlugin, wait
from simulated.testing import eventually, simulated

from dask_cml.local import processes


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        ("fails", "lost: it never connected; the platform says failed"),
        ("silent", "lost: it did not connect within 20 s"),
        ("evicted", "lost: evicted or killed by the platform, which says failed"),
        ("closed", "closed"),
    ],
)
@simulated
async def test_a_lost_session_is_replaced_and_the_cause_is_reported(it, fate, words):
    if fate in ("fails", "silent"):
        it.platform.doom(fate, key="-0")
    async with simulate(name="mine", n_workers=1, worker_timeout=20) as cluster:
        if fate in ("evicted", "closed"):
            await eventually(lambda: arrived(cluster) == 1)
        if fate == "evicted":
            it.platform.evict(it.platform.running["mine-0"])
        if fate == "closed":
            async with Client(cluster, asynchronous=True) as client:
                await client.retire_workers(names=["mine-0"])
        await eventually(lambda: connected(cluster) == {"mine-1"})
        assert log_of(cluster) == f"Worker mine-0 {words}; launching a replacement"


@simulated
async def test_results_of_a_lost_worker_are_computed_again_and_usage_counts_it(it):
    async with supplied(name="night", n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        futures = client.map(lambda n: n**2, range(20))
        await wait(futures)
        it.platform.evict(it.platform.running["night-0"])
        await eventually(lambda: connected(cluster) == {"night-1", "night-2"})
        assert await client.gather(futures) == [n**2 for n in range(20)]
        assert (await cluster.usage()).total.lost == {"killed": 1}


@simulated
async def test_the_tasks_of_a_node_that_fails_run_elsewhere_before_dask_notices(it):
    async with supplied(name="night", n_workers=2) as cluster, Client(cluster, asynchronous=True) as client:
        future = client.submit(abs, -1, workers=["night-0"], allow_other_workers=True)
        assert await future == 1
        it.sessions.freeze(it.platform.running["night-0"])  # no connection ends
        await eventually(lambda: "night-0" not in connected(cluster), seconds=20.0)
        assert await future == 1


@simulated
async def test_the_first_replacement_launches_at_once_and_the_next_ones_after_growing_pauses(it):
    async with simulate(name="night") as cluster:
        it.platform.doom("fails", times=4)
        cluster.scale(1)
        await eventually(lambda: connected(cluster) == {"night-4"})
        _scheduler, *workers = sorted(session.created_at for session in it.platform.all.values())
        first, *later = [(after - at).total_seconds() for at, after in pairwise(workers)]
        assert first < 10.0
        assert 2.0 <= later[0] < later[1] < later[2] < 60.0
        assert later[1] >= 4.0
        assert later[2] >= 8.0


@pytest.mark.slow
@simulated
async def test_after_five_failures_in_a_row_the_cluster_stops_trying_until_scale(it):
    async with supplied(name="night", n_workers=1) as cluster:
        it.platform.doom("fails", times=5)
        cluster.scale(2)
        words = "no new workers after 5 failures in a row"
        await eventually(lambda: words in (cluster.problem or ""))
        assert f"problem: {words}" in repr(cluster)
        assert words.replace("no", "Cluster night launches no") in log_of(cluster)
        await asyncio.sleep(1200.0)
        assert len(it.platform.all) == 7
        await cluster.scale_down(["night-0"])  # which is no scaling
        await asyncio.sleep(60.0)
        assert len(it.platform.all) == 7
        assert words in cluster.problem
        cluster.scale(1)
        await eventually(lambda: connected(cluster) == {"night-6"})
        await eventually(lambda: cluster.problem is None)


@pytest.mark.slow
@simulated
async def test_a_worker_that_stays_connected_resets_the_count_of_failures(it):
    async with simulate(name="night") as cluster:
        cluster.scale(1)
        for _ in range(3):
            it.platform.doom("fails", times=3)
            if len(it.platform.running) > 1:
                [lost] = [session for name, session in it.platform.running.items() if "scheduler" not in name]
                it.platform.evict(lost)
                await eventually(lambda: not connected(cluster))
            await eventually(lambda: arrived(cluster) == 1)
            await asyncio.sleep(45.0)
        assert "launches no new workers" not in log_of(cluster)


@pytest.mark.slow
@simulated
async def test_losses_during_a_task_do_not_count(it):
    async with simulate(name="night", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        future = client.submit(asyncio.sleep, 36000)
        for _ in range(7):
            await eventually(lambda: arrived(cluster) == 1)
            while not any((await client.processing()).values()):
                await asyncio.sleep(0.1)
            [lost] = [session for name, session in it.platform.running.items() if "scheduler" not in name]
            it.platform.evict(lost)
            await eventually(lambda: not connected(cluster))
        await eventually(lambda: arrived(cluster) == 1)
        await future.cancel()


@simulated
async def test_a_bad_task_costs_at_most_four_sessions_and_is_given_up(it):
    with dask.config.set({"distributed.scheduler.allowed-failures": 3}):
        cluster = await simulate(name="night", n_workers=1)
    async with cluster, Client(cluster, asynchronous=True) as client:
        bad = client.submit(asyncio.sleep, 36000, key="bad")
        lost = 0
        while bad.status == "pending":
            if any((await client.processing()).values()):
                running = {name for name in it.platform.running if "scheduler" not in name}
                it.platform.evict(it.platform.running[running.pop()])
                lost += 1
                await eventually(lambda: not connected(cluster))
            await asyncio.sleep(0.1)
        assert lost == 4
        with pytest.raises(KilledWorker, match="bad"):
            await bad
        assert await client.submit(sum, [1, 2]) == 3
        assert "while it ran `bad`" in log_of(cluster)


@simulated
async def test_programs_read_what_happens_to_sessions_from_the_topic_cml(it):
    killed = "evicted or killed by the platform, which says failed"
    expected = [
        *((action, "night-0", None) for action in ("launched", "waiting", "connected")),
        ("lost", "night-0", killed),
        *((action, "night-1", None) for action in ("launched", "connected", "stopped")),
    ]
    it.platform.configure({"sessions": 1}, waits_for_room=True)
    async with simulate(name="night", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:

        async def told():
            events = []
            while not {*expected} <= {*events}:
                await asyncio.sleep(1.0)
                found = [event for _, event in await client.get_events("cml")]
                events = [(event["action"], event["session"], event.get("cause")) for event in found]
            return events

        await asyncio.sleep(60.0)
        it.platform.configure()
        await eventually(lambda: connected(cluster) == {"night-0"})
        it.platform.evict(it.platform.running["night-0"])
        await eventually(lambda: connected(cluster) == {"night-1"})
        cluster.scale(0)
        events = await asyncio.wait_for(told(), 60.0)
        assert [event for event in events if event in expected] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_evicted", "worker_args", "pauses"),
    [(True, None, False), (True, None, True), (False, None, False), (False, [], False)],
    ids=["", "paused", "all", "nannies"],
)
async def test_results_survive_an_eviction_with_notice_and_are_not_computed_again(
    platform, light, holds, tmp_path, is_evicted, worker_args, pauses
):
    def compute(n, path):
        open(f"{path}/{n}", "x").close()  # fails if it is computed again
        return n

    def pause(dask_worker):
        if dask_worker.name == "night-0":
            dask_worker.memory_manager.memory_pause_fraction = 1e-6

    platform.configure(stop_grace=30)
    async with (
        make(name="night", n_workers=2, worker_args=worker_args) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(2)
        futures = client.map(compute, range(40), path=str(tmp_path))
        await wait(futures)
        if pauses:  # as with full memory
            await client.run(pause)
            while "'status': 'paused'" not in str(await client.scheduler.identity()):
                await asyncio.sleep(0.05)
        [lost, _] = [session.id for session in cluster.sessions if session.role == "worker"]
        if is_evicted:
            await asyncio.to_thread(platform.evict, lost, notice=True)
        else:  # all of its processes get notice
            for process in await asyncio.to_thread(processes.find, lost):
                process.terminate()
        await holds(lambda: "evicted, with notice; launching a replacement" in log_of(cluster))
        assert await client.gather(futures) == [*range(40)]
        await holds(lambda: arrived(cluster) == 2)


@pytest.mark.slow
async def test_a_program_that_ends_by_itself_is_named_with_its_status_and_its_task(platform, light, holds):
    def crashes():
        import os

        print("no licence", flush=True)
        os._exit(3)

    with dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        async with make(name="night", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
            with pytest.raises(KilledWorker):
                await client.submit(crashes, key="train-1")
            await holds(lambda: arrived(cluster) == 1 and "Worker night-0 " in log_of(cluster))
            words = r"Worker night-0 lost: its program failed with exit status 3 while it ran `train-1`: .*"
            assert re.search(words, log_of(cluster))


@pytest.mark.images
async def test_a_task_that_takes_too_much_memory_is_named_and_its_worker_restarted(platform, holds):
    def grow():
        import time

        import psutil

        blocks = []
        while True:  # it stays below the limit of its session until its nanny looks
            if psutil.Process().memory_info().rss < 720 << 20:
                blocks.append(b"1" * (20 << 20))
            time.sleep(0.05)

    with dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        async with (
            make(name="night", n_workers=1, memory=1, cpu=1) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            with pytest.raises(KilledWorker):
                await client.submit(grow, key="train-1")
            await holds(lambda: "restarted" in log_of(cluster))
            words = (
                r"worker night-0 was restarted: out of memory, 0\.\d\d of 0\.73 GiB while it ran `train-1`; "
                r"give workers more memory \(memory=\) or fewer threads \(nthreads=\), or work on smaller "
                r"chunks"
            )
            assert re.fullmatch(f"Cluster night: {words}", log_of(cluster))
            assert re.search(f"problem: {words}", repr(cluster))
            assert await client.submit(sum, [1, 2]) == 3  # the session runs on
            assert len(cluster.sessions) == len(platform.sessions()) == 2


@pytest.mark.images
async def test_a_restart_that_you_ask_for_prints_no_line_and_keeps_the_session(platform, holds):
    class Restarting(NannyPlugin):  # within this function, because sessions cannot import this module
        restart = True

    with dask.config.set({"distributed.deploy.lost-worker-timeout": "1ms"}):  # the nanny lives
        async with make(name="night", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
            await client.wait_for_workers(1)
            sessions = {session.id for session in cluster.sessions}
            restarts = (
                client.restart,
                lambda: client.restart_workers([*cluster.scheduler_info["workers"]]),
                lambda: client.register_plugin(Restarting()),
            )
            for moves, restart in zip((3, 5, 7), restarts, strict=True):
                busy = client.submit(time.sleep, 20, pure=False)  # the nanny kills a process that stays
                while busy.key not in str(await client.processing()):
                    await asyncio.sleep(0.05)
                await restart()
                await holds(lambda n=moves: board_of(cluster).moves >= n and arrived(cluster) == 1)
                assert not board_of(cluster).news
                assert await client.submit(sum, [1, 2], pure=False) == 3
            assert {session.id for session in cluster.sessions} == sessions
            assert log_of(cluster) == ""
