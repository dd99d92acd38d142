"""Workers that are closed: they move their data to others first, and stay while no other can take it."""

from __future__ import annotations

import pytest
from clusters import arrived, connected, scheduler_of, simulate
from distributed import Client
from simulated.testing import eventually, simulated

from dask_cml.core import retirement


@simulated
async def test_the_only_data_moves_to_a_worker_that_connects_while_its_worker_is_retired(it):
    async with (
        simulate(name="mine", n_workers=1) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await eventually(lambda: connected(cluster) == {"mine-0"})
        data = client.submit(lambda: "data", pure=False)
        assert await data == "data"
        with it.platform.held("list_workers"):  # the retirement asks for the sessions at its end
            await cluster.scale_down(["mine-0"])
            await cluster.scale(1)
            await eventually(lambda: connected(cluster) == {"mine-0", "mine-1"})
        await eventually(lambda: {*cluster.workers} == {"mine-1"})
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
        assert len(connected(cluster)) == 1


@pytest.mark.slow
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
