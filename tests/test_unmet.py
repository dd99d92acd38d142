"""Tasks that wait for what no worker offers are told to the user."""

from __future__ import annotations

from dask_cml.manager.fleet import Fleet
from dask_cml.manager.unmet import UnmetWork
from dask_cml.options import Options


class Client:
    """A scheduler whose tasks the test sets."""

    def __init__(self):
        self.needs, self.restricted, self.looks = [], [], 0
        self.info = {"workers": {"tcp://10.0.0.7:1": {"name": "mine-0", "host": "10.0.0.7"}}}

    async def demand(self, cluster, max_age):
        assert cluster == "mine"
        self.looks += 1
        work = [
            {"resources": resources, "unrunnable": n, "queued": 0, "processing": 0, "seconds": 0.5 * n}
            for n, resources in self.needs
        ]
        restricted = [{"names": names, "tasks": n} for n, names in self.restricted]
        return {"work": work, "restricted": restricted, "groups": {}}


def watched(leads=True):
    client, told = Client(), []
    fleet = Fleet(Options.read(name="mine"), {"gpu": Options.read(name="mine", nvidia_gpu=1)})
    fleet.resize(1)
    return UnmetWork(fleet, client, lambda: leads, told.append), fleet, client, told


async def test_a_need_is_told_once_however_many_tasks_have_it():
    unmet, _, client, told = watched()
    await unmet.look()
    assert (unmet.words, told) == (None, [])
    client.needs = [(3, {"FPGA": 1})]
    await unmet.look()
    client.needs = [(5, {"FPGA": 1})]
    await unmet.look()
    assert unmet.words == "5 tasks need FPGA=1, which no worker group offers"
    assert told == ["Cluster mine cannot run all tasks: 3 tasks need FPGA=1, which no worker group offers"]


async def test_what_is_met_and_comes_again_is_told_again():
    unmet, fleet, client, told = watched()
    client.needs = [(1, {"GPU": 1})]
    words = "1 task needs GPU=1; worker group gpu offers it, but has no workers: "
    words += "call cluster.scale(1, worker_group='gpu')"
    await unmet.look()
    assert unmet.words == words
    fleet.resize(1, group="gpu")
    await unmet.look()
    assert unmet.words is None
    fleet.resize(0, group="gpu")
    await unmet.look()
    assert unmet.words == words
    assert told == [f"Cluster mine cannot run all tasks: {words}"] * 2


async def test_a_need_beside_another_is_told_alone():
    unmet, _, client, told = watched()
    client.needs = [(1, {"FPGA": 1})]
    await unmet.look()
    client.needs.append((2, {"LICENSE": 1}))
    await unmet.look()
    assert "FPGA" not in told[1]
    assert unmet.words.count("; ") == 1


async def test_tasks_for_workers_that_are_there_or_on_their_way_are_no_trouble():
    unmet, fleet, client, _ = watched()
    fleet.resize(2, group="gpu")
    client.restricted = [(1, [name]) for name in ("mine-0", "10.0.0.7", "tcp://10.0.0.7:1", "mine-gpu-1")]
    await unmet.look()
    assert unmet.words is None
    client.restricted.append((1, ["tcp://10.0.0.8:1"]))
    await unmet.look()
    assert unmet.words == "1 task is restricted to tcp://10.0.0.8:1, which the cluster does not have"


async def test_who_does_not_lead_asks_and_says_nothing():
    unmet, _, client, told = watched(leads=False)
    client.needs = [(1, {"FPGA": 1})]
    await unmet.look()
    assert (client.looks, unmet.words, told) == (0, None, [])
