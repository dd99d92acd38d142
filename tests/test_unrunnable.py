"""Tasks that wait for what no worker offers: the user is told once, and again if they come again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fleets import Cluster

from dask_cml.manager.reconciler import Reconciler


class Client:
    """A scheduler whose tasks the test sets."""

    def __init__(self, leads):
        self.needs, self.restricted, self.looks, self.leads = [], [], 0, leads

    async def demand(self, max_age):
        self.looks += 1
        work = [
            {"resources": resources, "tasks": n, "unrunnable": n, "seconds": 0.5 * n}
            for n, resources in self.needs
        ]
        restricted = [{"names": names, "tasks": n} for n, names in self.restricted]
        return {"work": work, "restricted": restricted, "groups": {}}


@pytest.fixture
def mine():
    mine = Cluster(1, gpu={"options": {"nvidia_gpu": 1}})
    mine.client, mine.told = Client(leads=True), []
    mine.state = SimpleNamespace(
        fleet=mine.fleet, client=mine.client, log=mine.told.append, unrunnable=None, age=""
    )
    mine.look = Reconciler(mine.state)._tell
    return mine


async def test_a_need_of_many_tasks_is_logged_once(mine):
    await mine.look()
    assert (mine.state.unrunnable, mine.told) == (None, [])
    for n in 3, 5:
        mine.client.needs = [(n, {"FPGA": 1})]
        await mine.look()
    assert mine.state.unrunnable == "5 tasks need FPGA=1, which no worker group offers"
    assert mine.told == [
        "Cluster mine cannot run all tasks: 3 tasks need FPGA=1, which no worker group offers"
    ]


async def test_a_need_that_was_met_and_returns_is_logged_again(mine):
    mine.client.needs = [(1, {"GPU": 1})]
    words = "1 task needs GPU=1; worker group gpu offers it, but has no workers: "
    words += "call cluster.scale(1, worker_group='gpu')"
    for n, expected in (0, words), (1, None), (0, words):
        mine.want("scale", "gpu", n)
        await mine.look()
        assert mine.state.unrunnable == expected
    assert mine.told == [f"Cluster mine cannot run all tasks: {words}"] * 2


async def test_a_second_need_is_logged_without_the_first(mine):
    mine.client.needs = [(1, {"FPGA": 1})]
    await mine.look()
    mine.client.needs.append((2, {"LICENSE": 1}))
    await mine.look()
    assert "FPGA" not in mine.told[1]
    assert mine.state.unrunnable.count("; ") == 1


async def test_tasks_for_connected_or_wanted_workers_are_no_problem(mine):
    mine.want("scale", "gpu", 2)
    mine.connected = {"tcp://10.0.0.7:1": "mine-0"}
    mine.answer()
    mine.fleet.workers_info["tcp://10.0.0.7:1"]["host"] = "10.0.0.7"
    mine.client.restricted = [
        (1, [name]) for name in ("mine-0", "10.0.0.7", "tcp://10.0.0.7:1", "mine-gpu-1")
    ]
    await mine.look()
    assert mine.state.unrunnable is None
    mine.client.restricted.append((1, ["tcp://10.0.0.8:1"]))
    await mine.look()
    assert (
        mine.state.unrunnable == "1 task is restricted to tcp://10.0.0.8:1, which the cluster does not have"
    )


async def test_only_the_leader_looks(mine):
    mine.client.leads = False
    mine.client.needs = [(1, {"FPGA": 1})]
    await mine.look()
    assert (mine.client.looks, mine.state.unrunnable, mine.told) == (0, None, [])
