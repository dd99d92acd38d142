"""A quota is a ceiling: what it refuses is tried again, and what is queued comes."""

import asyncio
import time

import dask
import pytest
from clusters import arrived, connected, lines_of, log_of, simulate, supplied, target
from distributed import Client
from simulated.testing import eventually, simulated
from workbench import quota, workbench

from dask_cml import LaunchRefused


async def slowly(n):
    await asyncio.sleep(1000.0)
    return n


@simulated
async def test_a_refused_launch_is_shown_with_cmls_reason_and_tried_again(it):
    async with simulate(name="night") as cluster:
        it.platform.configure({"sessions": 3})
        cluster.scale(4)
        await eventually(lambda: "Cluster night launched 2 of 4 workers: " in log_of(cluster))
        await eventually(lambda: arrived(cluster) == 2)
        for shown in (log_of(cluster), repr(cluster), cluster._repr_html_(), cluster.problem):
            assert "exceeded quota" in shown
        assert target(cluster) == 4
        it.platform.configure()
        await eventually(lambda: arrived(cluster) == 4)
        await eventually(lambda: cluster.problem is None)
        assert log_of(cluster).count("exceeded quota") == 1


@pytest.mark.slow
@simulated
async def test_one_session_a_minute_is_tried_and_all_others_once_cml_launches_it(it):
    async with simulate(name="night") as cluster:
        it.platform.configure({"sessions": 2})
        cluster.scale(5)
        await eventually(lambda: "launched 1 of 5 workers" in log_of(cluster))
        asked = it.platform.count("launch_workers")
        await asyncio.sleep(600.0)
        assert 8 <= it.platform.count("launch_workers") - asked <= 11
        it.platform.configure()
        await eventually(lambda: arrived(cluster) == 5, seconds=90.0)


@simulated
async def test_scale_tries_at_once(it):
    with dask.config.set({"cml.quota-retry": "1h"}):
        async with simulate() as cluster:
            it.platform.configure({"sessions": 2})
            cluster.scale(3)
            await eventually(lambda: "launched 1 of 3 workers" in log_of(cluster))
            it.platform.configure()
            await asyncio.sleep(60.0)
            assert arrived(cluster) == 1
            cluster.scale(3)
            await eventually(lambda: arrived(cluster) == 3, seconds=30.0)


@simulated
async def test_a_start_takes_all_or_is_refused_and_without_workers_takes_what_it_gets(it):
    it.platform.configure({"sessions": 3})
    with pytest.raises(LaunchRefused, match="exceeded quota"):
        await simulate(n_workers=4)
    await eventually(lambda: it.platform.live == [])
    async with simulate(n_workers=0) as cluster:
        cluster.scale(4)
        await eventually(lambda: arrived(cluster) == 2)


@simulated
async def test_a_lost_worker_whose_replacement_is_refused_stays_wanted(it):
    async with supplied(n_workers=3) as cluster:
        it.platform.configure({"sessions": 2})
        for session in [session.id for session in cluster.sessions if session.role == "worker"][:2]:
            it.platform.evict(session)
        await eventually(lambda: "1 of 3 workers launched" in (cluster.problem or ""))
        assert target(cluster) == 3
        it.platform.configure()
        await eventually(lambda: arrived(cluster) == 3)


@simulated
async def test_the_quota_of_one_group_keeps_no_other_from_its_sessions(it):
    it.platform.configure({"nvidia_gpu": 1})
    async with simulate(name="night", worker_groups={"gpu": {"nvidia_gpu": 1}}) as cluster:
        cluster.scale(3, worker_group="gpu")
        await eventually(lambda: "launched 1 of 3 workers" in log_of(cluster))
        cluster.scale(2)
        await eventually(lambda: connected(cluster) >= {"night-0", "night-1"})


@pytest.mark.slow
@simulated
async def test_adapting_asks_for_no_more_than_the_quota_has_allowed_lately(it):
    it.platform.configure({"sessions": 4})
    async with simulate(name="night") as cluster, Client(cluster, asynchronous=True) as client:
        cluster.adapt(0, 10)
        futures = client.map(slowly, range(100))
        await eventually(lambda: target(cluster) == arrived(cluster) == 3)
        asked = it.platform.count("launch_workers")
        await asyncio.sleep(50.0)
        assert target(cluster) == 3
        assert it.platform.count("launch_workers") - asked <= 2
        it.platform.configure()
        await eventually(lambda: arrived(cluster) == 10)
        del futures


@pytest.mark.slow
@simulated
async def test_a_queued_session_is_no_failure_and_nothing_is_launched_in_its_place(it):
    it.platform.configure({"sessions": 2}, waits_for_room=True)
    async with simulate(name="night", n_workers=3) as cluster:
        await eventually(lambda: arrived(cluster) == 1)
        await asyncio.sleep(1200.0)  # longer than each time limit of a start
        assert len(it.platform.all) == 4
        assert "lost" not in log_of(cluster)
        assert target(cluster) == 3
        it.platform.configure()
        await eventually(lambda: arrived(cluster) == 3)
        assert len(it.platform.all) == 4


@simulated
async def test_the_cluster_shows_how_many_sessions_are_queued_for_how_long_and_cancels_them(it):
    it.platform.configure({"sessions": 2}, waits_for_room=True)
    async with simulate(name="night", n_workers=5) as cluster:
        await eventually(lambda: "workers=1 (4 queued for 20 s" in repr(cluster), seconds=60.0)
        assert "4 queued for " in cluster._repr_html_()
        await eventually(lambda: "Cluster night: 4 of 5 worker sessions queued" in log_of(cluster))
        waiting = [session for session in cluster.sessions if session.waits_for]
        assert len(waiting) == 4
        assert all(session.waits_for >= 10.0 for session in waiting)
        [first] = connected(cluster)
        cluster.scale(3)
        await eventually(lambda: len(it.platform.live) == 4)
        assert connected(cluster) == {first}
        it.platform.configure()
        await eventually(lambda: arrived(cluster) == 3)
        await eventually(lambda: "queued" not in repr(cluster))


@pytest.mark.slow
@simulated
async def test_adapting_asks_for_no_more_while_a_session_has_been_queued_for_a_minute(it):
    it.platform.configure({"sessions": 2}, waits_for_room=True)
    async with simulate(name="night") as cluster, Client(cluster, asynchronous=True) as client:
        cluster.scale(2)
        await eventually(lambda: arrived(cluster) == 1)
        await asyncio.sleep(90.0)
        cluster.adapt(0, 10)
        futures = client.map(slowly, range(100))
        await asyncio.sleep(60.0)
        assert len(it.platform.all) == 3
        it.platform.configure()
        await eventually(lambda: arrived(cluster) == 10)
        del futures


@simulated
async def test_sessions_start_one_by_one_where_cml_would_hold_gangs_back(it, monkeypatch):
    monkeypatch.setenv("ENV_GANG_MIN_MEMBER", "3")
    async with supplied(n_workers=2):
        variables = [arguments["env"] for arguments in it.platform.arguments("launch_workers")]
        assert {env["ENV_DISABLE_GANG_SCHEDULER"] for env in variables} == {"true"}


@pytest.mark.slow
@simulated
async def test_workers_that_start_before_a_queued_scheduler_wait_for_it(it):
    it.platform.doom("waits", key="scheduler")
    it.platform.configure({"sessions": 0}, waits_for_room=True)
    began = time.monotonic()
    starting = asyncio.ensure_future(simulate(n_workers=2))
    await eventually(lambda: len(it.platform.live) == 3)
    await asyncio.sleep(600.0)
    assert not starting.done()
    it.platform.configure()
    async with await starting as cluster:
        await eventually(lambda: arrived(cluster) == 2)
        assert time.monotonic() - began > 600.0
        assert len(it.platform.all) == 3


@simulated
async def test_what_exceeds_a_limit_of_the_site_is_refused_with_the_limit_and_launches_nothing(it):
    with dask.config.set({"cml.limits.sessions": 3}):
        with pytest.raises(ValueError, match=r"invalid n_workers=4: expected at most 2, because cml\.limits"):
            await simulate(n_workers=4)
        assert it.platform.all == {}
        async with simulate(n_workers=1) as cluster:
            for ask, words in (
                (lambda: cluster.scale(3), "n=3"),
                (lambda: cluster.adapt(minimum=3), "minimum=3"),
            ):
                with pytest.raises(ValueError, match=rf"invalid {words}: expected at most 2, because cml"):
                    ask()
            await eventually(lambda: arrived(cluster) == 1)
            await asyncio.sleep(30.0)
            assert target(cluster) == len(it.platform.running) - 1 == 1


@pytest.mark.slow
@simulated
async def test_adapting_keeps_within_the_limits_of_the_site_and_says_so(it):
    with dask.config.set({"cml.limits.sessions": 3}):
        async with simulate(name="night") as cluster, Client(cluster, asynchronous=True) as client:
            cluster.adapt(maximum=10)
            futures = client.map(slowly, range(100))
            await eventually(lambda: arrived(cluster) == 2)
            await asyncio.sleep(60.0)
            assert len(it.platform.live) == 3
            words = "Cluster night adapts to 2 of 10 workers, because cml.limits.sessions is 3"
            assert any(line.startswith(words) for line in lines_of(cluster))
            del futures


@simulated
async def test_a_new_cluster_that_needs_more_than_the_quota_leaves_says_so_once(it):
    it.platform.latency = 1.0
    async with workbench() as platform:
        platform.quotas = [quota(most=("8", "64", "0"), used=("7.5", "8", "0"))]
        async with simulate(name="night", n_workers=2, cpu=1, memory=1) as cluster:
            line = "Cluster night: its workers need 2 vCPU, but your quota leaves 0.5 vCPU"
            assert lines_of(cluster) == [line]
            cluster.scale(3)
            await eventually(lambda: arrived(cluster) == 3)
            assert lines_of(cluster) == [line]
