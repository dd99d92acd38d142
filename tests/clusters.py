"""Clusters on the local platform, records of clusters without processes, and what tests see of either."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from distributed import Scheduler
from simulated.process import SimulatedProcess
from simulated.shell import shell
from simulated.testing import eventually
from simulated.world import World

from dask_cml import CMLCluster, CMLError, output
from dask_cml.discovery import discover
from dask_cml.errors import SchedulerTimeout
from dask_cml.layout import STARTED_FOLDER, scheduler_file
from dask_cml.options import state_directory
from dask_cml.protocol import Rank
from dask_cml.records import store
from dask_cml.records.store import Record, end_file
from dask_cml.sessions.entry import Launch
from dask_cml.sharing.sharing import name_others

#: The time at which recorded sessions were launched.
LAUNCHED = 1790000000
#: What the first scheduler of a cluster without worker groups begins with.
WANTED: dict[str, Any] = {"report": {}}
#: Options of clusters without nannies and without the dashboard, for fixtures that several tests share.
LIGHT = {"worker_args": ["--no-nanny"], "scheduler_args": ["--no-dashboard"], "quiet": True}
#: The environment of processes in the session of the tests.
NOTEBOOK = {"CDSW_ENGINE_ID": "notebook12345678"}
#: The options of a cluster that lives on without its creator.
NIGHT: dict[str, Any] = {"name": "night", "security": True, "shutdown_on_close": False}
#: Who manages it when nobody is connected, in the words of ``dask cml info``.
SCHEDULERS_SESSION = "its scheduler's session"


def stopped_clock(monkeypatch: Any, module: ModuleType) -> SimpleNamespace:
    """Return the clock of a module, which passes when a test changes its `now`."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(module, "time", clock)
    return clock


def make(cls: type[CMLCluster] = CMLCluster, **options: Any) -> CMLCluster:
    return cls(**{"platform": "local", "quiet": True, "asynchronous": True, **options})


def simulate(cls: type[CMLCluster] = CMLCluster, **options: Any) -> CMLCluster:
    """Return a cluster on the simulated platform, whose schedulers have no keys."""
    return make(cls, **{"platform": "auto", "security": False, **options})


@contextlib.asynccontextmanager
async def supplied(*cls: type[CMLCluster], n_workers: int, **options: Any) -> AsyncIterator[CMLCluster]:
    """Simulate a cluster, all workers of which are there when the block begins."""
    async with simulate(*cls, n_workers=n_workers, **options) as cluster:
        await eventually(lambda: arrived(cluster) == n_workers)
        yield cluster


async def create_elsewhere(
    it: World, cls: type[CMLCluster] = CMLCluster, env: Mapping[str, str] = NOTEBOOK, **options: Any
) -> SimulatedProcess:
    """Let another process create a cluster in the simulated world, by default in this session. Return it."""
    creator = it.process("creator", env)
    await create_in(creator, cls, **options)
    return creator


async def create_and_kill(it: World, **options: Any) -> None:
    """Let another process of this session create a cluster in the simulated world, and kill it."""
    creator = await create_elsewhere(it, **options)
    creator.kill()


async def leave_alone(it: World, **options: Any) -> None:
    """Let another process create the cluster ``night``, which lives on, and kill it."""
    await create_and_kill(it, **{**NIGHT, **options})


async def shut_down(name: str = "night") -> None:
    await (await rebuild(name)).shutdown()


def scheduler_of(it: World, cluster: CMLCluster) -> Scheduler:
    [scheduler] = it.sessions.program(cluster.sessions[0].id)
    return scheduler


async def create_and_leave(**options: Any) -> None:
    async with make(shutdown_on_close=False, **options):
        pass


def rebuild(name: str, **options: Any) -> CMLCluster:
    """Return another object for a running cluster, which connects when it is awaited."""
    return CMLCluster.from_name(name, quiet=True, asynchronous=True, **options)


def cut_off(cluster: Any, seconds: float = 0.0) -> Callable[[], None]:
    """Break the network between a cluster and its scheduler, until the returned function is called."""

    async def no_connection(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(seconds)
        raise OSError("no route to host")

    def heal() -> None:
        del link._watch, link.ask

    link = cluster.sharing.link
    link._watch = link.ask = no_connection
    link._watching.abort()
    return heal


def is_connected(cluster: Any) -> bool:
    return bool(cluster.sharing.link.connected)


async def ask_scheduler(cluster: Any, op: str) -> Any:
    return await cluster.sharing.link.ask(op)


def scheduler_number(cluster: Any) -> int:
    return int(cluster.place.number)


def folder_of(cluster: Any) -> Path:
    folder: Path = cluster.place.folder
    return folder


def who_gave_up(cluster: Any) -> Mapping[str, Any]:
    """Return the worker groups that launch no more sessions after failures."""
    gave_up: Mapping[str, Any] = cluster.sharing.role.view.gave_up
    return gave_up


def board_of(cluster: Any) -> Any:
    return cluster.sharing.link.board


async def until_written(cluster: Any) -> None:
    await cluster.sharing.written()


def lines_of(cluster: CMLCluster) -> list[str]:
    """Return the lines that a cluster has reported to its user, also in an event loop."""
    return [line for _, line in cluster._cluster_manager_logs]


def log_of(cluster: CMLCluster) -> str:
    """Return these lines as one text, after they are written to the cluster's own log, too."""
    lines = lines_of(cluster)
    output.flush()
    return "\n".join(lines)


def live(platform: ModuleType) -> list[dict[str, Any]]:
    return [
        session
        for session in platform.sessions()
        if session["status"] == "running" and not session["stop_requested"]
    ]


def arrived(cluster: CMLCluster) -> int:
    return sum(group.n_arrived for group in cluster.worker_groups.values())


def connected(cluster: CMLCluster) -> set[str]:
    return {worker["name"] for worker in cluster.scheduler_info["workers"].values()}


def target(cluster: CMLCluster) -> int:
    return cluster.worker_groups["default"].n_workers


def has(cluster: CMLCluster, n: int) -> bool:
    """Whether a keeper or a remote sees so many requested and connected workers."""
    return arrived(cluster) == target(cluster) == len(cluster.scheduler_info["workers"]) == n


def limits(cluster: CMLCluster, group: str = "default") -> tuple[int, int | None] | None:
    """Return the limits of a worker group's adaptive scaling. None: it has a fixed size."""
    adapting = adapting_of(cluster, group)
    return None if adapting is None else (adapting["minimum"], adapting["maximum"])


def adapting_of(cluster: CMLCluster, group: str = "default") -> dict[str, Any] | None:
    """Return all settings of a worker group's adaptive scaling. None: it has a fixed size."""
    return cluster.groups.limits(group)


def name_of(session: dict[str, Any]) -> str:
    return session["name"].rpartition(" ")[0]


def sessions(**keys: str) -> dict[str, Launch]:
    """Return the sessions of a record, from the keys by id."""
    return {id: Launch(id, key, None, LAUNCHED, started=LAUNCHED) for id, key in keys.items()}


def new_record(name: str, **fields: Any) -> Record:
    return Record(name, folder=state_directory() / name, **fields)


def write_record(record: Record) -> Path:
    """Write a record with what its scheduler and its sessions would have written. Return its folder."""
    if record.folder == Path():
        record = replace(record, folder=state_directory() / record.name)
    folder = record.folder
    store.claim(record, {"report": _content(record)["report"]})
    if record.scheduler.address is not None:
        write_scheduler(record, folder)
    store.write_sessions(record, record.launches.values())
    for launch in record.launches.values():
        if launch.started is not None:
            take_name(record, launch.id, launch.started)
    return folder


def launch(record: Record, *ids: str, key: str = "a-0", waiting=(), began=None, ended=None) -> None:
    """Write sessions into a record, as the keeper does that has launched them."""
    ends = [end_file(session_id, at) for session_id, at in (ended or {}).items()]
    store.write_sessions(record, [Launch(session_id, key, None, LAUNCHED) for session_id in ids], ends)
    for session_id in {*ids, *(began or ())} - {*waiting}:
        take_name(record, session_id, (began or {}).get(session_id, LAUNCHED))


def take_name(record: Record, session_id: str, at: float) -> None:
    """Let a session of a record start, which takes a name of its own."""
    taken = record.folder / STARTED_FOLDER / session_id
    if not taken.exists():
        taken.touch(0o600)
        taken.write_text(session_id)
        os.utime(taken, (at, at))


def sign_of(name: str) -> Path:
    """Return the file of a cluster's last scheduler, whose time is the scheduler's last sign of life."""
    return state_directory() / name / scheduler_file(store.read(name).scheduler.number)


def end(record: Record, *ids: str, at: int = LAUNCHED + 60) -> None:
    store.write_sessions(record, [], [end_file(session_id, at) for session_id in ids])


def _content(record: Record) -> dict[str, Any]:
    content = asdict(record.scheduler)
    return {**content, "report": {"groups": content.pop("groups"), **content["report"]}}


def write_scheduler(record: Record, folder: Path) -> None:
    new = folder / "new"
    new.touch(0o600)
    new.write_text(json.dumps(_content(record)))
    os.replace(new, folder / scheduler_file(record.scheduler.number))


async def create_in(
    process: SimulatedProcess, cls: type[CMLCluster] = CMLCluster, **options: Any
) -> CMLCluster:
    """Let a process of the simulated world create a cluster, and keep it until the process ends."""

    async def create() -> None:
        async with simulate(cls, **options) as cluster:
            while arrived(cluster) < target(cluster):
                await asyncio.sleep(0.1)
            created.set_result(cluster)
            await asyncio.Event().wait()

    created: asyncio.Future[CMLCluster] = asyncio.get_running_loop().create_future()
    process.start(create())
    return await created


class Named(CMLCluster):
    """A cluster whose subclass names the workers."""

    def _new_worker_name(self, worker_number: int) -> str:
        return f"a-w{worker_number}"


class ObservedCluster(CMLCluster):
    """A cluster of another process, which this process shows. The cluster can still become an orphan."""

    _rank = Rank.OBSERVER


async def observe(name: str) -> CMLCluster:
    """Return an object that only shows a running cluster, as dask-ctl has it."""
    cluster: CMLCluster = await ObservedCluster.from_name(name, quiet=True, asynchronous=True)
    return cluster


async def found_by_dask_ctl() -> list[CMLCluster]:
    """Return objects for the running clusters as dask-ctl makes them, which connect when they are awaited."""
    found = [item async for item in discover()]
    return [cls.from_name(name, quiet=True, asynchronous=True) for name, cls in found]


async def run_command(*words: object) -> str:
    """Run a command of ``dask cml`` in this event loop, and return what it prints."""
    return await shell(*words)


def is_keeper(cluster: CMLCluster) -> bool:
    """Return whether this process manages a cluster, and may act for it."""
    return cluster.keeps


def manages(cluster: CMLCluster) -> bool:
    """Return whether a process manages a cluster as far as it knows, also without a recent answer."""
    return cluster.sharing.is_keeper


def manager(name: str) -> str | None:
    """Return who manages a cluster, in the words of ``dask cml info``. None: nobody."""
    return store.read(name).scheduler.manager


def n_connected(name: str) -> int:
    return store.read(name).scheduler.workers.workers


def keep_busy(it: World, name: str, seconds: float) -> None:
    """Keep the event loop of a session's program busy, as a large graph does in a scheduler."""
    it.sessions.processes[it.platform.running[name]].pause(seconds, threads=False)


def delay_requests(cluster: CMLCluster, seconds: float) -> None:
    """Let what users of this process ask for reach the scheduler some seconds later."""
    post = cluster.sharing.link.post

    async def post_later(*arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(seconds)
        return await post(*arguments, **options)

    cluster.sharing.link.post = post_later  # type: ignore[method-assign]


def lose_first_answer(cluster: CMLCluster, *, is_taken: bool = True) -> None:
    """Let the scheduler take the next request of a process, or not, and its answer get lost."""
    link = cluster.sharing.link
    write = link._write

    async def post_in_vain(op: str, **arguments: Any) -> None:
        link._write = write
        if is_taken:
            await link.ask(op, **arguments)
        await asyncio.sleep(10.0)
        raise SchedulerTimeout("no answer")

    link._write = post_in_vain


def lose_answers(cluster: CMLCluster) -> None:
    """Let the scheduler take what a manager reports from now on, and its answers get lost."""
    report = cluster.sharing.link.report

    async def report_in_vain(**values: Any) -> Any:
        await report(**values)
        raise CMLError("the scheduler does not answer")

    cluster.sharing.link.report = report_in_vain  # type: ignore[method-assign]


def ask_when_taking_over(cluster: CMLCluster, ask: Callable[[], Any]) -> None:
    """Ask for something at the moment at which this process begins to manage a cluster."""
    succeed = cluster.sharing._succeed

    async def ask_and_succeed(board: Any) -> None:
        cluster.sharing._succeed = succeed  # type: ignore[method-assign]
        ask()
        await succeed(board)

    cluster.sharing._succeed = ask_and_succeed  # type: ignore[method-assign]


def waits(cluster: CMLCluster) -> list[float]:
    return cluster.processes.waits(cluster.sessions)


def wanted(cluster: CMLCluster, group: str = "default") -> list[str]:
    return cluster.processes.known(group)


def id_on_board(cluster: CMLCluster) -> str:
    return cluster.sharing.link.id


def break_connection(cluster: CMLCluster) -> None:
    """Break the connection on which a process hears of the scheduler, as if nobody acknowledged messages."""
    cluster.sharing.link._watching.abort()  # type: ignore[union-attr]


def move_scheduler(cluster: CMLCluster, other: CMLCluster) -> None:
    """Let a process that loses its connection find another cluster's scheduler at the address of its own."""
    cluster.sharing.link.address = other.sharing.link.address
    break_connection(cluster)


#: Moments at which tests step in: the part of a cluster that acts then, and its function.
MOMENTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    # of every process
    "asks the scheduler": (lambda cluster: cluster.sharing.link, "ask"),
    "checks the scheduler's release": (lambda cluster: cluster.sharing.link, "_check"),
    "sends a report": (lambda cluster: cluster.sharing.link, "report"),
    "joins a scheduler": (lambda cluster: cluster.sharing.link, "join"),
    "checks the scheduler": (lambda cluster: cluster.sharing.failover, "check"),
    "takes the board": (lambda cluster: cluster.sharing, "_take_board"),
    "follows the board": (lambda cluster: cluster.sharing.role, "take"),
    # of the keeper
    "looks for losses": (lambda cluster: cluster.look, "find_losses"),
    "looks for sessions": (lambda cluster: cluster.processes, "find_unused"),
    "looks for absent workers": (lambda cluster: cluster.processes, "absent"),
    "asks whether a group adapts": (lambda cluster: cluster.groups, "adapts"),
    "resizes a group": (lambda cluster: cluster.groups, "resize"),
    "drops workers": (lambda cluster: cluster.groups, "drop"),
    "notes a launch": (lambda cluster: cluster.sharing.keeper.journal, "enter"),
    "tells its user": (lambda cluster: cluster.look, "tell"),
    "stops sessions": (lambda cluster: cluster.processes, "stop"),
    "lets the sessions go": (lambda cluster: cluster.processes, "close"),
    "reports": (lambda cluster: cluster.sharing.keeper, "publish"),
    "writes the record": (lambda cluster: cluster.sharing.keeper.journal, "write"),
}


def step_in(cluster: CMLCluster, moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Call a function instead of what a cluster calls at a moment. Return what it has called."""
    part, name = MOMENTS[moment]
    owner = part(cluster)
    original: Callable[..., Any] = getattr(owner, name)
    setattr(owner, name, function)
    return original


def step_out(cluster: CMLCluster, moment: str) -> None:
    """Let a cluster do again at a moment what it does without ``step_in``."""
    part, name = MOMENTS[moment]
    delattr(part(cluster), name)


def recorded(cluster: Any) -> Record | None:
    """Return the record that a cluster has for other processes. None: it is not shared."""
    found: Record | None = cluster.place.record
    return found


def record_of(cluster: Any) -> Record | None:
    found: Record | None = cluster.sharing.record
    return found


def follows(cluster: Any) -> bool:
    """Return whether a process shows what another one does that manages the cluster."""
    return not cluster.sharing.is_keeper


def spec_of(cluster: CMLCluster, group: str) -> dict[str, Any]:
    return cluster.groups.spec(group)


def forget_session(cluster: CMLCluster, session: str) -> None:
    cluster.api.forget(session)


def start_time(cluster: CMLCluster, group: str) -> float:
    return cluster.processes.start_time(group)


def look_now(cluster: Any) -> None:
    """Let the next look come at once."""
    cluster.look.woken.set()


async def n_supplied(cluster: CMLCluster, group: str) -> int:
    """Return how many sessions adaptive scaling counts for a group."""
    snapshot = await cluster.groups.demand.snapshot()
    return snapshot.supply(group).sessions


def dashboard_listener(cluster: Any) -> Any:
    [listener] = cluster.sharing._forwarder._sockets.values()
    return listener


def name_other_clusters(cluster: Any) -> None:
    """Tell the user which other clusters this process has, as at the start of a cluster."""
    name_others(cluster)


async def take_board(cluster: Any, **changes: Any) -> None:
    """Let the keeper take a board with changes, as if users had made them."""
    change_known_board(cluster, **changes)
    await cluster.sharing.keeper.take()


def change_known_board(cluster: Any, **changes: Any) -> None:
    """Change what a process knows of the board, without a word to the scheduler."""
    cluster.sharing.link.board = replace(board_of(cluster), **changes)


async def launch_late(cluster: Any, name: str) -> str:
    """Let a second launch of a worker be answered, and return its session."""
    launched = await cluster.api.launch(cluster.workers[name].plan)
    return str(launched["id"])


async def ends_of(cluster: Any) -> Any:
    """Return when a process says that the cluster's sessions end."""
    return await cluster.sharing.ends()


async def stop_managing(cluster: Any) -> None:
    await cluster.sharing.keeper.publish(leaves=True)
    await cluster.sharing.yield_cluster()


async def unsubscribe(cluster: Any) -> None:
    """End the connection on which a process hears of Dask workers, as when it breaks."""
    await cluster.sharing.unsubscribe()


def is_subscribed(cluster: Any) -> bool:
    return bool(cluster.sharing.is_subscribed)


def loop_runs(cluster: Any) -> bool:
    return cluster.loop is not None and bool(cluster.loop.asyncio_loop.is_running())


async def outlive_this_process(cluster: CMLCluster) -> None:
    await cluster.ending.outlive_this_process()
