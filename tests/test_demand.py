"""What work the scheduler knows, by the resources that it needs, and how it spreads that."""

import contextlib
from types import SimpleNamespace

import dask
import pytest
from distributed import Client, Event, Scheduler, Worker
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from dask_cml.scheduler import demand
from dask_cml.scheduler.balance import balance
from dask_cml.scheduler.demand import known_demand

PLAIN = ()
GPU = (("GPU", 1),)


@pytest.fixture
async def scheduler():
    async with Scheduler(port=0, dashboard=False, dashboard_address="127.0.0.1:0") as running:
        yield running


@pytest.fixture
async def client(scheduler):
    async with Client(scheduler.address, asynchronous=True) as connected:
        yield connected


@contextlib.asynccontextmanager
async def workers(scheduler, **resources):
    """Dask workers of one thread, by name, with these resources."""
    async with contextlib.AsyncExitStack() as stack:
        for name, offered in resources.items():
            options = {"name": name.replace("_", "-"), "resources": offered, "dashboard": False}
            await stack.enter_async_context(
                Worker(scheduler.address, nthreads=1, memory_limit="1 GiB", **options)
            )
        yield


@contextlib.asynccontextmanager
async def held(scheduler):
    try:
        yield "go"
    finally:
        async with Client(scheduler.address, asynchronous=True) as client:
            await Event("go", client=client).set()


def wait_for(event, i=0):
    Event(event).wait()
    return i


def tasks(answer):
    """The numbers of tasks, and of unrunnable ones, by the resources that they need."""
    return {tuple(work["resources"].items()): (work["tasks"], work["unrunnable"]) for work in answer["work"]}


def seconds(answer):
    return {tuple(work["resources"].items()): work["seconds"] for work in answer["work"]}


async def test_tasks_without_workers_are_counted_by_the_resources_that_they_need(scheduler, client, holds):
    assert known_demand(scheduler, "mine") == {"work": [], "restricted": [], "groups": {}}
    futures = client.map(abs, range(30), key="plain")
    futures += client.map(abs, range(3), key="gpu", resources={"GPU": 1})
    futures += client.map(abs, range(2), key="both", resources={"LICENSE": 2, "GPU": 1})
    with dask.config.set({"distributed.scheduler.default-task-durations": {"told": "1 minute"}}):
        for key in "told-1", "seen-1", "late-1":
            futures.append(client.submit(abs, 1, key=key, resources={"FPGA": 1}))
        await holds(lambda: len(scheduler.unrunnable) + len(scheduler.queued) == 38)
    scheduler.task_prefixes["seen"].duration_average = 7.0
    scheduler.task_prefixes["late"].max_exec_time = 100.0
    answer = known_demand(scheduler, "mine")
    both, fpga = (("GPU", 1), ("LICENSE", 2)), (("FPGA", 1),)
    assert {needs: n for needs, (n, _) in tasks(answer).items()} == {PLAIN: 30, GPU: 3, both: 2, fpga: 3}
    assert tasks(answer)[GPU] == (3, 3)
    # Dask takes a task of which it knows nothing to last 0.5 s.
    assert seconds(answer) == {PLAIN: 15.0, GPU: 1.5, both: 1.0, fpga: 60 + 7 + 200}
    assert answer["groups"] == {}


async def test_processing_and_queued_tasks_and_sessions_by_group(scheduler, client, holds):
    async with (
        workers(scheduler, mine_0={}, mine_1={}, mine_gpu_0={"GPU": 2}, other_0={}),
        held(scheduler) as event,
    ):
        plain = client.map(wait_for, [event] * 40, range(40), key="plain")
        gpu = [client.submit(wait_for, event, key=f"gpu-{i}", resources={"GPU": 1}) for i in range(5)]
        await holds(lambda: sum(len(worker.processing) for worker in scheduler.workers.values()) == 13)
        answer = known_demand(scheduler, "mine")
        foreign = len(next(w for w in scheduler.workers.values() if w.name == "other-0").processing)
        assert foreign
        assert tasks(answer)[PLAIN] == (40 - foreign, 0)
        assert tasks(answer)[GPU] == (5, 0)
        assert seconds(answer)[GPU] == pytest.approx(2.5)
        assert {name: (group["sessions"], group["busy"]) for name, group in answer["groups"].items()} == {
            "default": (2, 2),
            "gpu": (1, 1),
        }
        assert answer["groups"]["default"]["limit"] == 2 * 2**30
    del plain, gpu


@pytest.mark.slow
async def test_sessions_that_only_run_tasks_of_other_groups_are_lent(scheduler, client, holds):
    async with workers(scheduler, mine_gpu_0={"GPU": 1}, mine_gpu_1={"GPU": 1}), held(scheduler) as event:
        by_name = {worker.name: worker for worker in scheduler.workers.values()}
        one, other = by_name["mine-gpu-0"], by_name["mine-gpu-1"]
        plain = client.map(wait_for, [event] * 2, range(2))
        await holds(lambda: one.processing and other.processing)

        def borrowed():
            return known_demand(scheduler, "mine")["groups"]["gpu"]["borrowed"]

        assert borrowed() == ["mine-gpu-0", "mine-gpu-1"]
        [task] = one.processing
        one.executing[task] = demand._BORROWED_SECONDS + 1
        assert borrowed() == ["mine-gpu-1"]
        one.executing.clear()
        gpu = client.submit(wait_for, event, resources={"GPU": 1}, workers=[other.address])
        await holds(lambda: len(other.processing) == 2)
        assert borrowed() == ["mine-gpu-0"]
    del plain, gpu


async def test_a_session_of_several_processes_counts_once_and_is_busy_if_a_plugin_keeps_it(
    scheduler, client, holds
):
    class Keeps(SchedulerPlugin):
        name = "keeps"

        def valid_workers_downscaling(self, scheduler, workers):
            return [worker for worker in workers if worker.name != "mine-1-1"]

    def busy():
        [group] = known_demand(scheduler, "mine")["groups"].values()
        return group["sessions"], group["busy"], group["borrowed"], group["managed"]

    async with (
        workers(scheduler, mine_0_0={}, mine_0_1={}, mine_1_0={}, mine_1_1={}),
        held(scheduler) as event,
    ):
        assert busy() == (2, 0, [], 0)
        scheduler.add_plugin(Keeps())
        assert busy() == (2, 1, [], 0)
        await client.scatter(b"0" * 10**6, hash=False)
        assert busy()[3] >= 10**6
        future = client.submit(wait_for, event, workers=["mine-0-1"])
        await holds(lambda: any(worker.processing for worker in scheduler.workers.values()))
        assert busy()[:2] == (2, 2)
    del future


class Task:
    """As much of a TaskState as is looked at."""

    host_restrictions, loose_restrictions, actor = None, False, False

    def __init__(self, resources=None, restriction=None, key=0):
        self.key, self.priority = key, (key,)
        self.prefix = SimpleNamespace(duration_average=1.0, max_exec_time=-1)
        self.resource_restrictions, self.worker_restrictions = resources, restriction


def known(unrunnable=(), queued=(), processing=()):
    """What is known of tasks that no client has sent."""
    worker = SimpleNamespace(
        name="mine-0",
        address="address",
        status=Status.running,
        processing=processing,
        long_running=(),
        resources={},
        actors=(),
        executing={},
        occupancy=sum(task.prefix.duration_average for task in processing),
        nbytes=0,
        memory_limit=2**30,
        extra={},
    )
    scheduler = SimpleNamespace(queued=queued, unrunnable=unrunnable, workers={"address": worker}, plugins={})
    return known_demand(scheduler, "mine")


def test_a_sample_of_many_tasks_counts_for_all(monkeypatch):
    looked = []
    monkeypatch.setattr(demand, "duration_of", lambda _, task: looked.append(task) or 1.0)
    regular = [Task(resources={"GPU": 1} if i % 10 == 5 else None) for i in range(200_000)]
    assert tasks(known(unrunnable=regular))[GPU] == (pytest.approx(20_000, rel=0.1),) * 2
    looked.clear()
    both = [Task(resources={"GPU": 1} if i % 3 else None) for i in range(50_000)]
    answer = known(unrunnable=both * 4, queued=[Task()] * 50_000, processing=both * 6)
    assert len(looked) <= 2 * demand._MOST_OTHERS + demand._MOST_QUEUED
    counted = tasks(answer)
    assert counted[PLAIN][0] == pytest.approx(50_000 + 500_000 / 3, rel=0.01)
    assert sum(unrunnable for _, unrunnable in counted.values()) == pytest.approx(200_000, rel=0.01)
    assert sum(n for n, _ in counted.values()) == pytest.approx(550_000, rel=0.01)
    assert sum(seconds(answer).values()) == pytest.approx(550_000, rel=0.01)


def test_an_answer_has_a_limit_however_different_the_tasks_are():
    many = [Task(resources={"MEMORY": i}) for i in range(1000)]
    many += [Task(restriction={f"worker-{i}-{j}" for j in range(100)}) for i in range(1000)]
    answer = known(many)
    assert len(answer["work"]) == demand._MOST_NEEDS
    assert sum(work["seconds"] for work in answer["work"]) == pytest.approx(1000)
    assert len(answer["restricted"]) == demand._MOST_RESTRICTIONS
    assert max(len(tasks["names"]) for tasks in answer["restricted"]) == demand._MOST_NAMES


class Scheduling:
    """A scheduler with workers that offer resources; it moves tasks at once."""

    def __init__(self, *workers, cost=0.0):
        self.running = [Offering(**worker) for worker in workers]
        self.extensions = {"stealing": self}
        self.in_flight = {}
        self.moved = []
        self.cost = cost

    def get_comm_cost(self, task, worker):
        return self.cost

    def move_task_request(self, task, victim, thief):
        victim.processing.remove(task)
        thief.processing.append(task)
        self.moved.append(task.key)

    def balance(self):
        """Return how many tasks each worker has then."""
        balance(self)
        return [len(worker.processing) for worker in self.running]


class Offering:
    def __init__(self, n=0, nthreads=4, needs=None, **resources):
        self.resources, self.nthreads = resources, nthreads
        self.processing = [Task(needs or {"GPU": 1}, key=i) for i in range(n)]
        self.executing = {}


@pytest.mark.parametrize(
    ("workers", "after"),
    [
        ([{"n": 12, "GPU": 1}, {"GPU": 1}, {"GPU": 1}], [4, 4, 4]),
        ([{"n": 12, "GPU": 1}, {"GPU": 2}, {"GPU": 3}], [2, 4, 6]),
        ([{"n": 12, "GPU": 1}, {"GPU": 8, "nthreads": 2}], [4, 8]),
        ([{"n": 2, "GPU": 1}, {"GPU": 1}, {"GPU": 1}], [1, 1, 0]),
        ([{"n": 1, "GPU": 1}, {"GPU": 1}], [1, 0]),
        ([{"n": 5, "GPU": 4}, {"n": 1, "GPU": 4}], [3, 3]),
        ([{"n": 9, "GPU": 1}, {"n": 1, "GPU": 1}], [9, 1]),  # work stealing evens out what is busy
        ([{"n": 9, "GPU": 1}, {"FPGA": 1}, {"GPU": 0.5}], [9, 0, 0]),
        ([{"n": 9, "GPU": 1}, {}], [9, 0]),
        ([{"n": 4, "GPU": 2, "needs": {"GPU": 2}}, {"GPU": 1}, {"GPU": 4}], [2, 0, 2]),
    ],
)
def test_tasks_go_where_their_resources_are_free(workers, after):
    assert Scheduling(*workers).balance() == after


def test_those_that_would_run_last_go_and_none_that_runs():
    scheduling = Scheduling({"n": 6, "GPU": 1}, {"GPU": 1})
    victim = scheduling.running[0]
    victim.executing = {victim.processing[5]: 1.0}
    scheduling.in_flight = {victim.processing[4]: "to another"}
    scheduling.balance()
    assert scheduling.moved == [3]


def test_tasks_for_certain_workers_and_plain_ones_stay():
    scheduling = Scheduling({"n": 6, "GPU": 1}, {"GPU": 1})
    for i, task in enumerate(scheduling.running[0].processing):
        task.worker_restrictions = {"tcp://10.0.0.7:1"} if i < 3 else None
        task.resource_restrictions = {"GPU": 1} if i < 3 else None
    assert scheduling.balance() == [6, 0]


def test_a_task_whose_move_costs_more_than_its_wait_stays_and_all_do_without_work_stealing():
    two = {"n": 6, "GPU": 1}, {"GPU": 1}
    assert Scheduling(*two, cost=7.0).balance() == [6, 0]
    assert Scheduling(*two, cost=5.0).balance() == [3, 3]
    with dask.config.set({"distributed.scheduler.work-stealing": False}):
        assert Scheduling(*two).balance() == [6, 0]
    scheduling = Scheduling(*two)
    scheduling.extensions = {}
    assert scheduling.balance() == [6, 0]
