"""Workers that are closed: they move their data to others first, and stay while no other can take it."""

from __future__ import annotations

import asyncio

import dask
import pytest
from clusters import arrived, lines_of, log_of, rebuild, scheduler_of, simulate, target
from distributed import Client
from simulated.testing import eventually, simulated

from dask_cml.core import retirement

PROCESSES = {"processes": 2, "cpu": 2, "worker_args": []}


class Counter:
    n = 0

    def add(self, n):
        self.n += n
        return self.n


def dask_names(cluster):
    """The names of the connected Dask workers."""
    return {worker["name"] for worker in cluster.scheduler_info["workers"].values()}


@pytest.mark.parametrize("who", ["keeper", "remote"])
@simulated
async def test_a_worker_stays_until_another_can_take_its_data(it, who):
    async with (
        simulate(name="mine", n_workers=1) as cluster,
        rebuild("mine") as remote,
        Client(cluster, asynchronous=True) as client,
    ):
        await eventually(lambda: arrived(cluster) == 1)
        [data] = await client.scatter(["data"])
        it.platform.doom("silent")
        cluster.scale(2)
        await eventually(lambda: {*cluster.workers} == {"mine-0", "mine-1"})
        await {"keeper": cluster, "remote": remote}[who].scale_down(["mine-0"])
        words = "waiting for the data of mine-0"
        await eventually(lambda: cluster.problem == remote.problem == words)
        assert f"problem: {words}" in repr(cluster)
        assert f"problem: {words}" in repr(remote)
        await asyncio.sleep(10)
        assert lines_of(cluster) == ["Worker mine-0 stays until other workers can take its data"]
        assert target(cluster) == target(remote) == 1
        assert await data == "data"
        cluster.scale(2)
        await eventually(lambda: {*cluster.workers} == {"mine-1", "mine-2"})
        assert await data == "data"
        await eventually(lambda: cluster.problem is remote.problem is None)


@simulated
async def test_without_any_wanted_worker_the_last_one_stops_with_its_data(it):
    async with (
        simulate(name="mine", n_workers=1) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await eventually(lambda: arrived(cluster) == 1)
        [data] = await client.scatter(["data"])
        cluster.scale(0)
        await eventually(lambda: not cluster.workers)
        assert len(it.platform.live) == 1
        assert data.status == "cancelled"


@simulated
async def test_the_only_data_moves_to_a_worker_that_connects_while_its_worker_is_retired(it):
    async with (
        simulate(name="mine", n_workers=1) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await eventually(lambda: dask_names(cluster) == {"mine-0"})
        data = client.submit(lambda: "data", pure=False)
        assert await data == "data"
        with it.platform.held("list_workers"):  # the retirement asks for the sessions at its end
            await cluster.scale_down(["mine-0"])
            await cluster.scale(1)
            await eventually(lambda: dask_names(cluster) == {"mine-0", "mine-1"})
        await eventually(lambda: {*cluster.workers} == {"mine-1"})
        assert await data == "data"


@simulated
async def test_the_only_data_moves_to_a_worker_of_another_group_that_connects_later(it):
    async with simulate(name="mine") as cluster, Client(cluster, asynchronous=True) as client:
        await cluster.add_worker_group("big", n_workers=1)
        await eventually(lambda: arrived(cluster) == 1)
        [data] = await client.scatter(["data"])
        cluster.scale(1)
        cluster.scale(0, worker_group="big")
        await eventually(lambda: {*cluster.workers} == {"mine-0"} and not cluster.problem)
        assert await data == "data"


@simulated
async def test_many_workers_leave_a_few_at_a_time_after_all_have_moved_their_data(it, monkeypatch):
    """The scheduler tells all workers of each one that leaves, and is held meanwhile."""
    monkeypatch.setattr(retirement, "_AT_ONCE", 2)
    async with (
        simulate(name="mine", n_workers=6) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await eventually(lambda: arrived(cluster) == 6)
        data = await client.scatter([f"data {i}" for i in range(12)])
        holding = {name for names in (await client.who_has(data)).values() for name in names}
        assert len(holding) == 6
        handlers = scheduler_of(it, cluster).handlers
        retire, calls = handlers["retire_workers"], []

        async def note(names, **arguments):
            calls.append((len(names), arguments.get("remove", True)))
            return await retire(names=names, **arguments)

        handlers["retire_workers"] = note
        cluster.scale(1)
        await eventually(lambda: len(cluster.workers) == 1)
        assert calls == [(5, False), (2, True), (2, True), (1, True)]
        assert await client.gather(data) == [f"data {i}" for i in range(12)]
        assert len(dask_names(cluster)) == 1


@pytest.mark.parametrize("op", ["retire_workers", "cml_held"])
@simulated
async def test_no_session_is_stopped_while_the_scheduler_does_not_answer(it, op):
    async with (
        simulate(name="mine", n_workers=1) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await eventually(lambda: arrived(cluster) == 1)
        [data] = await client.scatter(["data"])
        questions = []

        async def reset(**arguments):
            questions.append(arguments)
            raise ConnectionResetError("the other side closed the connection")

        handlers = scheduler_of(it, cluster).handlers
        answer, handlers[op] = handlers[op], reset
        it.platform.doom("silent")
        cluster.scale(2)
        await eventually(lambda: len(cluster.workers) == 2)
        await cluster.scale_down(["mine-0"])
        await eventually(lambda: len(questions) > 1)
        assert await data == "data"
        assert "mine-0" in cluster.workers
        handlers[op] = answer
        cluster.scale(2)
        await eventually(lambda: {*cluster.workers} == {"mine-1", "mine-2"})
        assert await data == "data"


@simulated
async def test_a_session_that_keeps_one_of_its_workers_is_not_lost(it):
    """The scheduler retires the other one, and Dask moves no actors."""
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "300ms"}):
        async with (
            simulate(name="mine", n_workers=2, **PROCESSES) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            await eventually(lambda: len(dask_names(cluster)) == 4)
            counters = [
                await client.submit(Counter, actor=True, workers=[name], pure=False)
                for name in ("mine-0-0", "mine-1-0")
            ]
            cluster.scale(1)
            await eventually(lambda: "stays until other workers can take its data" in log_of(cluster))
            await eventually(lambda: len(dask_names(cluster)) == 3)
            await asyncio.sleep(20)
            assert len(lines_of(cluster)) == 1
            assert {*cluster.workers} == {"mine-0", "mine-1"}
            assert target(cluster) == 1
            assert [await counter.add(1) for counter in counters] == [1, 1]


@simulated
async def test_a_session_that_lacks_a_worker_is_replaced_as_soon_as_another_can_take_its_data(it):
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "300ms"}):
        async with (
            simulate(name="mine", n_workers=1, **PROCESSES) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            await eventually(lambda: len(dask_names(cluster)) == 2)
            data = client.submit(lambda: [1, 2], workers=["mine-0-1"], pure=False)
            assert await data == [1, 2]
            await client.retire_workers(names=["mine-0-0"])
            await eventually(lambda: dask_names(cluster) == {"mine-1-0", "mine-1-1"})
            await eventually(lambda: {*cluster.workers} == {"mine-1"})
            assert await data == [1, 2]
