"""One session each for scheduler and worker: launched, watched, closed."""

import asyncio
import json
from datetime import datetime, timezone

import dask.config
import pytest
from clusters import stopped_clock
from distributed import Scheduler
from distributed.core import Status
from schedulers import RECORD, prepare, scheduler_in
from simulated.faults import HTTPError
from simulated.platform import SimulatedPlatform
from simulated.testing import eventually

from dask_cml import CMLError, SchedulerTimeout, SessionFailed
from dask_cml.layout import STARTED_FOLDER, scheduler_file
from dask_cml.options import Options
from dask_cml.scheduler import plugin
from dask_cml.sessions import process, workers_api
from dask_cml.sessions.plan import Place
from dask_cml.sessions.process import CMLScheduler, CMLWorker, Phase
from dask_cml.sessions.workers_api import WorkersAPI
from dask_cml.timing import timing


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(process, "_POLL_INTERVAL", 0.01)
    monkeypatch.setattr(process, "_ANSWER_TIMEOUT", 1)
    monkeypatch.setattr(workers_api, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(workers_api, "_LONGEST_PAUSE", 0.004)
    with dask.config.set({"cml.api.poll-interval": "10ms", "cml.api.retries": 3}):
        yield


@pytest.fixture
def stub():
    """The platform, with another session of the user's that must run on. Tests say how ours get on."""
    stub = SimulatedPlatform(advances=False)
    [others] = stub.launch_workers(1, 1, 1)
    stub.calls.clear()
    yield stub
    assert () not in stub.arguments("stop_workers")
    assert stub.live == [others["id"]]


@pytest.fixture
def api(stub):
    api = WorkersAPI(stub)
    yield api
    stub.heal()
    api.end()


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    return folder


@pytest.fixture
def make(api, folder):
    return lambda **options: CMLScheduler(api, read(**options), Place(folder))


@pytest.fixture
def make_worker(api, folder):
    def make_worker(name="mine-0", address="tcp://10.0.0.1:8786", **options):
        options = read(**options)
        return CMLWorker(address, name, api=api, options=options, place=Place(folder))

    return make_worker


@pytest.fixture
async def running():
    async with Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address=":0") as scheduler:
        await plugin.dask_setup(scheduler)
        yield scheduler


@pytest.fixture
def clock(monkeypatch):
    """The time by which sessions are late: it passes when a test says so."""
    return stopped_clock(monkeypatch, process)


@pytest.fixture
def connects_to(monkeypatch):
    """The addresses at which a scheduler was looked for."""
    addresses = []
    real = process.ask_with_keys

    def ask(address, *rest, **more):
        addresses.append(address)
        return real(address, *rest, **more)

    monkeypatch.setattr(process, "ask_with_keys", ask)
    return addresses


def read(**options):
    return Options.read(**{"name": "mine", "scheduler_timeout": 600, **options})


def write_scheduler_file(folder, address, number=0):
    new = folder / "new"
    new.write_text(json.dumps({"id": "x", "address": address}))
    new.rename(folder / scheduler_file(number))


async def begin(stub, scheduler):
    """Start it, and wait until its session is launched and looked at."""
    starting = asyncio.create_task(scheduler.start())
    await eventually(lambda: starting.done() or stub.count("list_workers") >= 2)
    return starting


async def listings(stub, n):
    enough = stub.count("list_workers") + n
    await eventually(lambda: stub.count("list_workers") >= enough)


async def test_start_returns_once_the_scheduler_answers(stub, make, folder, running):
    scheduler = make(
        nvidia_gpu=2,
        launch_options={"kernel": "r"},
        scheduler_cpu=2,
        scheduler_memory=8,
        scheduler_nvidia_gpu=1,
        scheduler_launch_options={"kernel": "python3"},
    )
    starting = await begin(stub, scheduler)
    assert not starting.done()
    [sent] = stub.arguments("launch_workers")
    assert (sent["cpu"], sent["memory"], sent["nvidia_gpu"], sent["kernel"]) == (2, 8, 1, "python3")
    write_scheduler_file(folder, running.address)
    await asyncio.gather(starting, scheduler)
    await scheduler
    assert stub.count("launch_workers") == 1
    assert scheduler.address == running.address
    assert scheduler.status == Status.running
    assert stub.arguments("stop_workers") == []


async def test_a_session_that_ends_first_fails_the_start_with_its_status_and_output(stub, make):
    scheduler = make()
    scheduler.plan.log.parent.mkdir(parents=True)
    scheduler.plan.log.write_text("".join(f"line {i}\n" for i in range(1000)))
    starting = await begin(stub, scheduler)
    stub.set(scheduler.session_id, "timedout", message="Evicted:\n  the node is gone")
    with pytest.raises(SessionFailed) as caught:
        await starting
    assert str(caught.value).startswith(
        f"the scheduler's session {scheduler.session_id} ended before its scheduler answered, its status is "
        "timedout (Evicted: the node is gone); the last lines of its output:\nline 985\n"
    )
    assert str(caught.value).endswith("line 998\nline 999")


async def test_the_scheduler_has_its_time_from_when_its_session_runs(stub, make, folder, running, clock):
    scheduler = make(scheduler_timeout=60)
    starting = await begin(stub, scheduler)
    for status, seconds in ("scheduling", 100), ("starting", 100), ("running", 50):
        stub.set(scheduler.session_id, status)
        await listings(stub, 2)
        clock.now += seconds
        await listings(stub, 2)
        assert not starting.done()
    # Nothing in this process runs meanwhile, so it looks once more.
    clock.now += 20
    write_scheduler_file(folder, running.address)
    await starting


async def test_a_scheduler_is_found_although_an_earlier_address_takes_connections_and_never_answers(
    stub, make, folder, running, connects_to, monkeypatch
):
    async def keep_silent(reader, writer):
        await reader.read()
        writer.close()

    monkeypatch.setattr(process, "_ANSWER_TIMEOUT", 0.1)
    async with await asyncio.start_server(keep_silent, "127.0.0.1", 0) as server:
        write_scheduler_file(folder, f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        scheduler = make()
        starting = await begin(stub, scheduler)
        await eventually(lambda: len(connects_to) >= 2)
        write_scheduler_file(folder, running.address)
        monkeypatch.setattr(process, "_ANSWER_TIMEOUT", 30)
        await starting
    assert scheduler.address == running.address


async def test_a_start_goes_on_while_lists_fail_or_lack_the_session_and_files_are_incomplete(
    stub, make, folder, running
):
    scheduler = make()
    starting = await begin(stub, scheduler)
    stub.set(scheduler.session_id, "starting")
    await listings(stub, 2)
    stub.set(scheduler.session_id, "running", listed=False)
    await listings(stub, 3)
    assert not starting.done()
    assert scheduler.session.status == "starting"
    stub.fail("list_workers", *[HTTPError(403)] * 5)
    for incomplete in "", '{"type": "Sched', "{}", '{"address": 3}', None, None:
        if incomplete is not None:
            (folder / scheduler_file(0)).write_text(incomplete)
        await listings(stub, 1)
        assert not starting.done()
    write_scheduler_file(folder, running.address)
    await starting


async def test_a_session_of_which_no_list_was_seen_may_be_queued(stub, make, clock):
    stub.fail("list_workers", *[HTTPError(403)] * 1000)
    scheduler = make(pending_timeout=100)
    starting = await begin(stub, scheduler)
    clock.now += 699
    await listings(stub, 3)
    assert not starting.done()
    clock.now += 2
    with pytest.raises(SchedulerTimeout, match=r"(?s)did not answer within 700 s.*403"):
        await starting


@pytest.mark.parametrize(
    ("record", "number", "ours"), [(RECORD, 0, True), ("another", 0, False), (RECORD, 1, False)]
)
async def test_only_the_schedulers_own_answer_counts(stub, api, folder, record, number, ours):
    """On CML an address is soon another scheduler's."""
    stub.first_status = "running"
    place = Place(folder, number, record)
    scheduler = CMLScheduler(api, read(scheduler_timeout=30 if ours else 0.5), place)
    async with scheduler_in(prepare(folder)) as running:
        write_scheduler_file(folder, running.address, number)
        if ours:
            await scheduler.start()
            assert scheduler.address == running.address
        else:
            with pytest.raises(SchedulerTimeout):
                await scheduler.start()


@pytest.mark.parametrize("status", ["running", "succeeded"])
async def test_the_session_that_took_the_name_first_is_the_schedulers(stub, api, folder, monkeypatch, status):
    """The answer to its launch was lost, so another one was launched, which ends."""
    [first] = stub.launch_workers(1, 1, 1)
    stub.set(first["id"], "running")
    scheduler = CMLScheduler(api, read(), Place(folder, 0, RECORD))
    starting = await begin(stub, scheduler)
    second = scheduler.session_id
    started = folder / STARTED_FOLDER / "%2Fscheduler-0"
    started.mkdir(parents=True)  # it cannot be read
    stub.set(second, "running")
    stub.set(second, status)
    await listings(stub, 2)
    started.rmdir()
    started.write_text(first["id"])
    monkeypatch.setenv("CDSW_ENGINE_ID", first["id"])  # in which the scheduler runs
    async with scheduler_in(prepare(folder)) as running:
        write_scheduler_file(folder, running.address)
        await starting
    assert scheduler.session_id == first["id"]
    monkeypatch.delenv("CDSW_ENGINE_ID")
    await api.close()
    assert second not in stub.live


async def test_the_state_of_a_session_is_the_one_that_was_listed_last(stub, api, make_worker, clock):
    before = datetime.now(timezone.utc)
    worker = make_worker(worker_timeout=600)
    assert (worker.session, worker.runs_for) == (None, 0)
    await worker
    session = worker.session
    assert (session.id, session.role, session.name) == (worker.session_id, "worker", "mine-0")
    assert (session.status, session.address) == ("scheduling", None)
    assert session.app_url == f"https://{session.id}.cml.example.com/"
    assert before <= session.since <= datetime.now(timezone.utc)
    # Its time begins when it runs, and it can be reached when it has an address.
    for state, phase, runs_for in (
        ({"status": "scheduling"}, Phase.QUEUED, 0),
        ({"status": "starting"}, Phase.LAUNCHED, 0),
        ({"status": "running"}, Phase.LAUNCHED, 0),
        ({"status": "UNKNOWN"}, Phase.LAUNCHED, 20),
        ({"status": "running", "ip_address": "10.0.0.7"}, Phase.RUNNING, 40),
        ({"status": "STOPPING"}, Phase.LAUNCHED, 60),
        ({"status": "timedout"}, Phase.ENDED, 80),
    ):
        clock.now += 20
        stub.set(session.id, **state)
        assert worker.update(await api.sessions()) is (phase is Phase.ENDED)
        assert not worker.update({}) or phase is Phase.ENDED
        assert (worker.session.status, worker.phase) == (state["status"].lower(), phase)
        assert worker.runs_for == runs_for
    assert worker.session.address == "10.0.0.7"


async def test_a_session_that_the_list_lacks_for_long_and_had_before_is_not_known_to_have_ended(
    stub, api, make_worker, clock
):
    """A new session may be listed late, and one list may be old."""
    worker = make_worker()
    await worker
    stub.set(worker.session_id, "running", listed=False)
    clock.now += 1000
    assert not worker.update(await api.sessions())
    for _ in range(2):
        stub.set(worker.session_id, listed=True)
        assert not worker.update(await api.sessions())
        stub.set(worker.session_id, listed=False)
        assert not worker.update(await api.sessions())
        clock.now += timing.unlisted - 1
        assert not worker.update(await api.sessions())
        assert worker.session.status == "running"
    clock.now += 2
    assert not worker.update(await api.sessions())
    assert worker.session.status == "no longer listed"
    stub.set(worker.session_id, listed=True)
    assert not worker.update(await api.sessions())
    assert worker.session.status == "running"


async def test_close_stops_exactly_its_session_and_may_be_called_again(stub, api, make, make_worker):
    for unlaunched in make(), make_worker():
        await unlaunched.close()
        assert unlaunched.status == Status.closed
    assert stub.calls == []
    first, second, third = (make_worker(f"mine-{n}") for n in range(3))
    await asyncio.gather(first, second, third)
    api.forget(third.session_id)  # it was left to others
    await third.close()
    assert stub.count("stop_workers") == 0
    stub.stop_workers(third.session_id)
    stub.answer_stop(403)
    with pytest.raises(CMLError, match=first.session_id):
        await first.close()
    assert first.status != Status.closed
    await first.close()
    await first.close()
    assert stub.arguments("stop_workers") == [(third.session_id,), *[(first.session_id,)] * 2]
    assert first.status == Status.closed
    assert first.session.status == "stopped"
    assert second.session_id in stub.live
    await asyncio.wait_for(first.finished(), 120)
