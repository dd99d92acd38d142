"""History, hours and cost: what is left of clusters that have ended, and what they have used."""

import asyncio
import os
import signal

import dask
import pytest
from clusters import arrived, create_and_kill, make, rebuild, simulate, supplied
from distributed import Client, KilledWorker
from distributed.core import Status
from shells import run
from simulated.shell import shell, shell_json
from simulated.testing import eventually, simulated

from dask_cml import CMLError

pytestmark = pytest.mark.usefixtures("light")

LAB = {"name": "lab", "security": True}


async def the_only_one():
    [ended] = await shell_json("history")
    return ended


async def close(cluster):
    await cluster.close()


async def end_when_idle(cluster):
    await eventually(lambda: cluster.status == Status.closed)


async def shut_down_as_a_client(cluster):
    async with Client("cml://lab", asynchronous=True) as client:
        await client.shutdown()
    await eventually(lambda: cluster.status == Status.closed)


async def delete(cluster):
    await shell("delete", "lab", "--reason", "the month is over")
    await eventually(lambda: cluster.status == Status.closed)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (close, "closed by "),
        (end_when_idle, "idle for 60 s"),
        (shut_down_as_a_client, "shut down by a client at "),
        (delete, "the month is over"),
    ],
)
@simulated
async def test_the_history_says_who_closed_a_cluster_or_why_it_ended(it, end, why):
    cluster = await simulate(**LAB, idle_timeout="60s")
    await end(cluster)
    assert (await the_only_one())["why"].startswith(why)


@simulated
async def test_it_says_so_after_an_error_in_a_block_and_a_start_that_fails(it):
    with pytest.raises(ZeroDivisionError):
        async with simulate(**LAB):
            raise ZeroDivisionError("no luck")
    assert (await the_only_one())["why"].endswith(" after ZeroDivisionError: no luck")
    it.platform.configure({"cpu": 0.5})
    with pytest.raises(CMLError):
        await simulate(name="day")
    assert "it did not start: CML refused to launch" in await shell("history", "day")


@simulated
async def test_a_cluster_that_ended_with_its_session_is_listed_before_it_is_removed(it):
    await create_and_kill(it, **LAB, n_workers=1, orphan_timeout="never")
    it.platform.end_session("notebook12345678")
    while not await shell_json("history"):
        await asyncio.sleep(1.0)
    before = await the_only_one()
    assert before["why"] == "its scheduler's session ended"
    assert await shell("prune") == "Cluster lab deleted\n"
    after = await the_only_one()
    assert (after["why"], after["id"]) == (before["why"], before["id"])


@pytest.mark.slow
@simulated
async def test_usage_counts_ended_and_lost_sessions_of_each_group_and_works_after_close(it):
    async with supplied(**LAB, n_workers=2, cpu=2, memory=4, scheduler_cpu=1, scheduler_memory=2) as cluster:
        await asyncio.sleep(300.0)
        it.platform.evict(it.platform.running["lab-0"])
        await eventually(lambda: "lab-2" in it.platform.running and arrived(cluster) == 2)
        cluster.scale(0)
        await eventually(lambda: {*it.platform.running} == {"lab-scheduler"})
        await asyncio.sleep(300.0)
    used = await cluster.usage()
    assert used.total.sessions == 4
    assert used.total.hours * 60 == pytest.approx(20, abs=2)  # 10 min of the scheduler, 5 of two workers
    assert used.total.vcpu_hours * 60 == pytest.approx(30, abs=3)
    assert used.total.gib_hours * 60 == pytest.approx(60, abs=6)
    head, scheduler, default, total = str(used).splitlines()
    columns = "group sessions hours vCPU hours GiB hours GPU hours lost"
    assert " ".join(head.split()) == columns
    assert (scheduler.split()[:2], default.split()[:2]) == (["scheduler", "1"], ["default", "3"])
    assert "1 killed" in default
    ended = await the_only_one()
    assert ended["usage"]["total"]["hours"] == pytest.approx(used.total.hours, abs=0.01)
    assert total.split()[:2] == ["total", "4"]


@pytest.mark.slow
@simulated
async def test_queued_sessions_cost_nothing(it):
    async with simulate(**LAB) as cluster:
        it.platform.configure({"sessions": 1}, waits_for_room=True)
        cluster.scale(1)
        await asyncio.sleep(600.0)
        before = (await cluster.usage()).total.hours
        assert before == pytest.approx(610 / 3600, abs=0.02)  # of the scheduler alone
        assert "1 queued" in await shell("list")


@pytest.mark.slow
@simulated
async def test_another_process_and_info_show_the_same_usage(it):
    async with simulate(**LAB, n_workers=1) as cluster, rebuild("lab") as other:
        await eventually(lambda: arrived(cluster) == 1)
        await asyncio.sleep(60.0)
        assert str(await other.usage()) == str(await cluster.usage())
        total = str(await cluster.usage()).splitlines()[-1]
        assert " ".join(total.split()) in " ".join((await shell("info", "lab")).split())


@pytest.mark.slow
@simulated
async def test_with_prices_info_and_history_show_costs_also_of_past_clusters(it):
    async with simulate(**LAB, scheduler_cpu=2, scheduler_memory=4) as cluster:
        await asyncio.sleep(360.0)
        assert (await cluster.usage()).total.cost is None
        with dask.config.set({"cml.prices": {"cpu": 5, "memory": 2.5}}):
            assert (await cluster.usage()).total.cost == pytest.approx(2.0, abs=0.2)
            assert (await shell_json("info", "lab"))["cost"] == pytest.approx(2.0, abs=0.2)
    assert "cost" not in (await shell("history")).splitlines()[0]
    with dask.config.set({"cml.prices": {"cpu": 10}}):
        assert (await the_only_one())["cost"] == pytest.approx(2.0, abs=0.2)
        assert (await shell("history")).splitlines()[0].split()[-2:] == ["cost", "why"]


@simulated
async def test_the_list_is_limited_to_a_time_and_a_user_and_has_a_total(it):
    for name, user in ("old", "ann"), ("new", "ben"):
        process = it.process(user, {"CDSW_ENGINE_ID": "notebook12345678", "CDSW_CREATOR": user})
        await process.start(create_and_close(name))
        await asyncio.sleep(7200.0)
    assert [ended["name"] for ended in await shell_json("history")] == ["new", "old"]
    assert [ended["name"] for ended in await shell_json("history", "--since", "3h")] == ["new"]
    assert [ended["name"] for ended in await shell_json("history", "--by", "ann")] == ["old"]
    assert (await shell("history")).splitlines()[-1].split()[:2] == ["total", "2"]
    error = await shell("history", "--since", "soon", code=2)
    assert error.endswith(
        "--since='soon': expected seconds as a number above 0, or a time such as 7d or 12h\n"
    )


async def create_and_close(name):
    async with simulate(name=name):
        pass


@simulated
async def test_a_site_can_keep_none(it):
    with dask.config.set({"cml.history.keep": 0}):
        async with simulate(**LAB):
            pass
        assert await shell_json("history") == []


async def test_tasks_failures_and_logs_stay_after_the_end(platform, holds):
    def fail():
        print("before the failure")
        raise ValueError("negative weight")

    def exit_at_once():
        os.kill(os.getpid(), signal.SIGKILL)

    with dask.config.set({"distributed.scheduler.allowed-failures": 0}):
        async with (
            make(name="lab", n_workers=1, cpu=1, memory=1) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            assert await client.submit(sum, [1, 2]) == 3
            with pytest.raises(ValueError, match="negative weight"):
                await client.submit(fail, key="train-1")
            with pytest.raises(KilledWorker):
                await client.submit(exit_at_once, key="train-2")
    after = await cluster.get_logs()
    assert "before the failure" in after["lab-0"]
    shown = await asyncio.to_thread(run, "history", "lab")
    assert "tasks      1 done, 2 failed\n" in shown
    assert "failed     train-1: ValueError('negative weight')\n" in shown
    assert "failed     train-2: the workers that ran it died\n" in shown
    assert "logs       dask cml logs lab\n" in shown
    logs = await asyncio.to_thread(run, "logs", "lab")
    assert logs.startswith("Cluster lab ended at ")
    assert "before the failure" in logs
