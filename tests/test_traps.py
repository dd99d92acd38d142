"""What SpecCluster does wrong for sessions: each holds for CMLCluster and not for the plain base class."""

import asyncio
import contextlib
import dataclasses
import functools
from concurrent.futures import CancelledError

import pytest
from clusters import connected
from distributed import Client
from distributed.deploy.spec import SpecCluster
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster, LaunchRefused
from dask_cml.layout import LOGS_FOLDER, STARTED_FOLDER
from dask_cml.options import Options, state_directory
from dask_cml.private_files import make_folder
from dask_cml.sessions.plan import Place
from dask_cml.sessions.process import CMLScheduler, CMLWorker
from dask_cml.sessions.workers_api import WorkersAPI

pytestmark = pytest.mark.usefixtures("light")


class PlainCluster(SpecCluster):
    """The base class on the same scheduler and workers."""

    def __init__(self, module, n_workers=0, **options):
        options = Options.read(**options)
        folder = state_directory() / options.name
        for path in (folder.parent, folder, folder / STARTED_FOLDER, folder / LOGS_FOLDER):
            make_folder(path)
        self.api = WorkersAPI(module)
        self.options = options
        shared = {"api": self.api, "options": options, "place": Place(folder)}
        worker = {"cls": CMLWorker, "options": shared}
        if options.processes > 1:
            worker["group"] = [f"-{i}" for i in range(options.processes)]
        super().__init__(
            scheduler={"cls": CMLScheduler, "options": shared},
            worker=worker,
            workers={self._new_worker_name(i): worker for i in range(n_workers)},
            asynchronous=True,
            name=options.name,
        )

    def _new_worker_name(self, worker_number):
        return f"{self.options.name}-{worker_number}"


def session_of(it, key):
    [session_id] = [session.id for session in it.platform.live_sessions if session.key == key]
    return session_id


async def scaling_down_moves_the_data_first(make, it, holds):
    cluster = await make(n_workers=3)
    async with Client(cluster, asynchronous=True) as client:
        await client.wait_for_workers(3)
        futures = await client.scatter([*range(30)])
        cluster.scale(1)
        await holds(lambda: len(connected(cluster)) == 1)
        assert await asyncio.wait_for(client.gather(futures), 60) == [*range(30)]


async def a_lost_worker_is_replaced_under_a_fixed_scale(make, it, holds):
    cluster = await make(n_workers=1)
    await holds(lambda: len(connected(cluster)) == 1)
    [first] = connected(cluster)
    it.platform.evict(session_of(it, first))
    await holds(lambda: connected(cluster) and connected(cluster) != {first})


async def a_lost_session_of_several_processes_is_replaced(make, it, holds):
    cluster = await make(n_workers=1, processes=2, worker_args=[])
    await holds(lambda: len(connected(cluster)) == 2)
    lost = connected(cluster)
    it.platform.evict(session_of(it, f"{cluster.name}-0"))
    await holds(lambda: len(connected(cluster) - lost) == 2)


async def a_refused_launch_is_tried_again_by_the_same_scale(make, it, holds):
    cluster = await make()
    it.platform.refuse()
    cluster.scale(1)
    await holds(lambda: it.platform.count("launch_workers") == 2)
    await holds(lambda: not cluster._lock.locked())
    cluster.scale(1)
    await holds(lambda: len(connected(cluster)) == 1)


async def a_worker_that_never_registers_is_replaced(make, it, holds):
    it.platform.doom("silent", key="-0")
    cluster = await make(n_workers=1)
    [hung] = cluster.workers.values()
    hung.options = dataclasses.replace(hung.options, worker_timeout=20.0)
    await holds(lambda: len(connected(cluster)) == 1)


async def a_failed_start_keeps_the_class_of_its_cause(make, it, holds):
    it.platform.configure({"sessions": 0})
    with pytest.raises(RuntimeError) as caught:
        await make(n_workers=1)
    assert type(caught.value) is LaunchRefused


async def a_failed_start_of_a_worker_leaves_no_session(make, it, holds):
    it.platform.configure({"sessions": 1})
    with pytest.raises(LaunchRefused):
        await make(n_workers=1)
    assert not it.platform.live


async def memory_is_counted_in_gibibytes(make, it, holds):
    cluster = await make(memory=4)
    cluster.scale(memory="9 GiB")
    await holds(lambda: len(cluster.workers) == 3)


SCENARIOS = [
    scaling_down_moves_the_data_first,
    a_lost_worker_is_replaced_under_a_fixed_scale,
    a_lost_session_of_several_processes_is_replaced,
    a_refused_launch_is_tried_again_by_the_same_scale,
    a_worker_that_never_registers_is_replaced,
    a_failed_start_keeps_the_class_of_its_cause,
    a_failed_start_of_a_worker_leaves_no_session,
    memory_is_counted_in_gibibytes,
]


async def play(scenario, make, it, holds):
    made = []

    def make_and_remember(**options):
        made.append(make(security=False, **options))
        return made[-1]

    try:
        await scenario(make_and_remember, it, holds)
    finally:
        for cluster in made:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(cluster.close(), 120)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@simulated
async def test_it_holds_for_cmlcluster(it, scenario):
    await play(scenario, functools.partial(CMLCluster, asynchronous=True, quiet=True), it, eventually)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@simulated
async def test_it_does_not_hold_for_the_base_class(it, scenario):
    apis = []

    def make(**options):
        plain = PlainCluster(it.platform, **options)
        apis.append(plain.api)
        return plain

    held = True
    try:
        await play(scenario, make, it, functools.partial(eventually, seconds=100.0))
    except (AttributeError, LookupError, NameError, TypeError):  # of the test itself
        raise
    except (Exception, CancelledError):
        held = False
    for api in apis:  # what the base class leaves
        await api.close()
    assert not held
