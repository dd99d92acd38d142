"""Random faults and random calls: whatever happens, the sessions are right in the end.

The sessions are those of the stub, but their schedulers and workers are real ones, in this event loop. Each
episode has its seed, so a failure says how to have it again: ``DASK_CML_SEED=<seed> DASK_CML_EPISODES=1``.
"""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import dask.config
import pytest
from distributed import Client, Scheduler, Worker
from distributed.core import Status
from stub import HTTPError, Stub, StubSession, eventually

from dask_cml import CMLCluster, CMLError
from dask_cml.manager import backoff, lifecycle, reconciler
from dask_cml.sessions import calls

EPISODES = int(os.environ.get("DASK_CML_EPISODES", 4))
# The same in all processes of a run, as each of them collects the tests.
SEED = int(
    os.environ.get("DASK_CML_SEED")
    or random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(10**6)
)
#: What becomes of a session, and how often.
FATES = {"runs": 70, "fails": 6, "succeeds": 6, "hangs": 4, "stuck": 4, "hidden": 5, "refused": 5}
PATIENCE = 120.0


class Simulation(Stub):
    """A platform whose sessions run for real, but in this event loop.

    Parameters
    ----------
    luck : random.Random
        Decides what becomes of sessions and calls.
    """

    def __init__(self, luck: random.Random) -> None:
        super().__init__()
        self.luck = luck
        self.loop = asyncio.get_running_loop()
        # Dask's workers close in it, slowly; in sessions of their own they have one of their own.
        self.loop.set_default_executor(ThreadPoolExecutor(64))
        self.errors = 0.0
        self.fates = {"runs": 1}
        self.fate_of: dict[str, str] = {}
        self.runs: dict[str, asyncio.Task[None]] = {}
        self.killed: set[str] = set()

    @staticmethod
    def shares_host_network() -> bool:
        return True

    def evict(self, session_id: str) -> None:
        with self._lock:
            self.all[session_id].reach("failed")
        self._kill(session_id)

    async def finish(self) -> None:
        """Let what runs in ended sessions end."""
        for session_id in [*self.runs]:
            if not self.all[session_id].live:
                self._kill(session_id)
        await asyncio.gather(*self.runs.values(), return_exceptions=True)

    def _request(self) -> None:
        with self._lock:
            lucky = self.luck.random() >= self.errors
            error = self.luck.choice([HTTPError(503), ConnectionError("lost")])
        if not lucky:
            raise error

    def _launch_one(self, options):
        with self._lock:
            [fate] = self.luck.choices([*self.fates], [*self.fates.values()])
            if fate == "refused":
                self.refuse()
            try:
                described = super()._launch_one(options)
            finally:
                self._refusals.clear()  # where the request got lost, it would be for another session
            if "id" in described:
                self.fate_of[described["id"]] = fate
                if fate == "hidden":
                    self.all[described["id"]].listed = False
                    self.loop.call_soon_threadsafe(self.loop.call_later, 0.2, self._show, described["id"])
            return described

    def _show(self, session_id: str) -> None:
        self.set(session_id, listed=True)

    def _advance(self, session: StubSession) -> None:
        fate = self.fate_of.get(session.id, "runs")
        if fate == "stuck" and "stuck" in self.fates:  # until there is room
            return
        before = session.status
        super()._advance(session)
        if before != "running" and session.status == "running":
            if fate in ("fails", "succeeds"):
                session.reach({"fails": "failed", "succeeds": "succeeded"}[fate])
            elif fate != "hangs":
                self.loop.call_soon_threadsafe(self._start, session)

    def _stop(self, session_id: str):
        response = super()._stop(session_id)
        if session_id in self.all and not self.all[session_id].live:
            self.loop.call_soon_threadsafe(self._kill, session_id)
        return response

    def _start(self, session: StubSession) -> None:
        if session.live and "command = " in session.launched_with["code"]:
            self.runs[session.id] = self.loop.create_task(self._run(session))

    def _kill(self, session_id: str) -> None:
        # Only once: a Worker whose close() is cancelled is never closed.
        if session_id in self.runs and session_id not in self.killed:
            self.killed.add(session_id)
            self.runs[session_id].cancel()

    async def _run(self, session: StubSession) -> None:
        [line] = re.findall(r"^command = (\[.*\])$", session.launched_with["code"], re.M)
        command = ast.literal_eval(line)
        try:
            await {"scheduler": self._schedule, "worker": self._work}[command[3]](command)
        except Exception:
            end = "failed"
        else:
            end = "succeeded"
        with self._lock:
            session.reach(end)

    async def _schedule(self, command: list[str]) -> None:
        port = int(command[command.index("--port") + 1])
        file = Path(command[command.index("--scheduler-file") + 1])
        scheduler = Scheduler(host="127.0.0.1", port=port, dashboard=False, dashboard_address="127.0.0.1:0")
        try:
            await scheduler
            file.with_suffix(".tmp").write_text(json.dumps({"address": scheduler.address}))
            file.with_suffix(".tmp").rename(file)
            await scheduler.finished()
        finally:
            await scheduler.close()

    async def _work(self, command: list[str]) -> None:
        address = command[4]
        if address == "--scheduler-file":
            file = Path(command[5])
            await eventually(file.exists)
            address = address_in(file)
        name = command[command.index("--name") + 1]
        n = int(command[command.index("--nworkers") + 1])
        names = [name] if n == 1 else [f"{name}-{i}" for i in range(n)]
        workers = [
            Worker(address, name=name, nthreads=1, memory_limit=0, dashboard=False, death_timeout=20)
            for name in names
        ]
        try:
            await asyncio.gather(*workers)
            await asyncio.gather(*(worker.finished() for worker in workers))
        finally:
            await asyncio.gather(*(worker.close(executor_wait=False, timeout=1) for worker in workers))


def address_in(scheduler_file: Path) -> str:
    return json.loads(scheduler_file.read_text())["address"]


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """What is seconds in real life is hundredths here."""
    for module, name, value in (
        (backoff, "_FIRST_PAUSE", 0.01),
        (backoff, "_LONGEST_PAUSE", 0.05),
        (reconciler, "_LOOK_INTERVAL", 0.2),
        (calls, "_FIRST_PAUSE", 0.01),
        (calls, "_LONGEST_PAUSE", 0.05),
    ):
        monkeypatch.setattr(module, name, value)
    settings = {
        "cml.state-directory": str(tmp_path),
        "cml.api.poll-interval": "20ms",
        "cml.api.retries": 12,
        "cml.quota-retry": "200ms",
        "distributed.deploy.lost-worker-timeout": "300ms",
        "distributed.scheduler.allowed-failures": 1000,
        "distributed.worker.profile.enabled": False,
        "temporary-directory": str(tmp_path),
    }
    with dask.config.set(settings):
        yield


class Episode:
    """One cluster's life, as its seed has it.

    Parameters
    ----------
    seed : int
        Decides what is done and what goes wrong.
    """

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chance = random.Random(seed)
        self.platform = Simulation(random.Random(seed + 1))
        self.done: list[str] = []
        [others] = self.platform.launch_workers(1, cpu=1, memory=1, code="another's work")
        self.others = others["id"]
        monkeypatch.setattr(lifecycle, "load_platform", lambda platform: self.platform)
        processes = self.chance.choice([1, 1, 2])
        groups = {"other": self.group(3 - processes)} if self.chance.random() < 0.5 else {}
        self.cluster = CMLCluster(
            n_workers=self.chance.randrange(4),
            cpu=processes,
            processes=processes,
            worker_groups=groups,
            worker_timeout="4s",
            scheduler_timeout="20s",
            pending_timeout="4s",
            security=False,  # the simulated schedulers have no keys
            asynchronous=True,
            quiet=True,
        )

    def group(self, processes: int) -> dict[str, int]:
        return {"n_workers": self.chance.randrange(3), "cpu": processes, "processes": processes}

    async def play(self) -> None:
        self.platform.fates = self.chance.choice([FATES, FATES, {"runs": 1}])
        self.platform.errors = self.chance.choice([0.0, 0.1, 0.3])
        start = asyncio.ensure_future(self.cluster._ready())
        try:
            if self.chance.random() < 0.1:
                await asyncio.sleep(self.chance.random() * 0.3)
                self.note("close during the start")
                await self.cluster.close()
            with suppress(CMLError):  # as its first sessions may be refused or fail
                await start
            if self.cluster.status == Status.running:
                await self.live()
        finally:
            self.note("close")
            await asyncio.wait_for(asyncio.gather(*[self.cluster.close()] * 2), PATIENCE)
            await self.platform.finish()
        self.check_the_end()

    def note(self, what: str) -> None:
        self.done.append(
            f"{what} [{self.platform.errors:.0%} errors, {self.platform.count('launch_workers')} launches]"
        )

    async def live(self) -> None:
        async with Client(self.cluster, asynchronous=True) as self.client:
            self.futures = []
            for _ in range(self.chance.randint(3, 12)):
                action = self.chance.choice(ACTIONS)
                self.note(action.__name__)
                await action(self)
                await asyncio.sleep(self.chance.choice([0, 0, 0.02, 0.1, 0.3]))
                if self.cluster.status != Status.running:
                    break
            if self.chance.random() < 0.2:
                return  # is closed in the middle of it
            self.platform.fates, self.platform.errors = {"runs": 1}, 0.0
            # What hung has its few seconds; what comes in its place has them on no loaded machine.
            for group in self.cluster._fleet._groups.values():
                patience = {"worker_timeout": PATIENCE, "pending_timeout": PATIENCE}
                group.options = dataclasses.replace(group.options, **patience)
            self.platform.configure(quota=None)
            await self.settle()

    # -- what may happen

    def ask(self, function, *args, **options) -> None:
        """Ask the cluster for something, which it refuses only if it has ended by itself."""
        try:
            function(*args, **options)
        except CMLError:
            assert self.cluster.status in (Status.closing, Status.closed)

    def any_group(self) -> str:
        return self.chance.choice([*self.cluster.worker_groups])

    async def scale(self) -> None:
        self.ask(self.cluster.scale, self.chance.randrange(5), worker_group=self.any_group())

    async def scale_in_threads(self) -> None:
        numbers = [self.chance.randrange(5) for _ in range(4)]
        await asyncio.gather(*[asyncio.to_thread(self.ask, self.cluster.scale, n) for n in numbers])

    async def scale_by_another_manager(self) -> None:
        with suppress(CMLError, OSError):  # the cluster may end meanwhile
            name = self.cluster.name
            async with CMLCluster.from_name(name, asynchronous=True, quiet=True) as other:
                other.scale(self.chance.randrange(5), worker_group=self.chance.choice([*other.worker_groups]))
                await asyncio.sleep(self.chance.choice([0, 0.1, 0.3]))

    async def scale_twice(self) -> None:
        await self.scale()
        await self.scale()

    async def adapt(self) -> None:
        minimum = self.chance.randrange(3)
        maximum = minimum + self.chance.randrange(3)
        group = self.any_group()
        options = {"worker_group": group, "interval": "50ms", "wait_count": 2}
        self.ask(self.cluster.adapt, minimum=minimum, maximum=maximum, **options)

    async def scale_down(self) -> None:
        keys = [*self.cluster.worker_spec]
        names = self.chance.sample(keys, self.chance.randint(0, len(keys)))
        with suppress(CMLError):
            await self.cluster.scale_down(names)

    async def add_group(self) -> None:
        with suppress(CMLError, ValueError):  # there may be one
            await self.cluster.add_worker_group("late", **self.group(self.chance.choice([1, 2])))

    async def delete_group(self) -> None:
        # The first may wait for long while nothing can be launched or stopped.
        with suppress(CMLError, ValueError, asyncio.TimeoutError):
            await asyncio.wait_for(self.cluster.delete_worker_group(self.any_group()), 1.0)

    async def submit(self) -> None:
        self.futures += self.client.map(lambda i: i**2, range(5), pure=False)

    async def forget(self) -> None:
        self.futures.clear()

    async def retire(self) -> None:
        names = sorted(self.cluster.observed)
        if names:
            with suppress(OSError):
                await self.client.retire_workers(names=[self.chance.choice(names)], close_workers=True)

    async def evict(self) -> None:
        sessions = [each.id for each in self.cluster.sessions if each.role == "worker"]
        if sessions:
            self.platform.evict(self.chance.choice(sessions))

    async def evict_all(self) -> None:
        for each in self.cluster.sessions:
            if each.role == "worker":
                self.platform.evict(each.id)

    async def evict_scheduler(self) -> None:
        if self.chance.random() < 0.2:
            self.platform.evict(self.cluster.sessions[0].id)

    async def change_errors(self) -> None:
        self.platform.errors = self.chance.choice([0.0, 0.0, 0.1, 0.3])

    async def change_quota(self) -> None:
        self.platform.configure(quota=self.chance.choice([None, {"sessions": self.chance.randint(2, 5)}]))

    async def outage(self) -> None:
        self.platform.errors, before = 1.0, self.platform.errors
        await asyncio.sleep(self.chance.random() * 0.3)
        self.platform.errors = before

    # -- what must be

    async def settle(self) -> None:
        """When nothing goes wrong any more, the next wish comes true, as far as no data is lost by that."""
        wanted = {group: self.chance.randrange(4) for group in self.cluster.worker_groups}
        for group, n in wanted.items():
            if self.chance.random() < 0.3:
                self.note(f"wants {n} of {group} by adapt")
                options = {"worker_group": group, "interval": "50ms", "wait_count": 2}
                self.ask(self.cluster.adapt, minimum=n, maximum=n, **options)
            else:
                self.note(f"wants {n} of {group}")
                self.ask(self.cluster.scale, n, worker_group=group)
        told = len(self.cluster._cluster_manager_logs)

        def settled() -> bool:
            if [*self.lost_schedulers()]:  # the cluster will hear of it
                return False
            # A worker whose data no other could take stays, and the cluster wants one more from then on.
            logs = self.cluster._cluster_manager_logs[told:]
            stays = any("kept: no other worker" in line for _, line in logs)
            targets = {name: each.n_workers for name, each in self.cluster.worker_groups.items()}
            return self.has(wanted) or (stays and self.has(targets))

        await eventually(lambda: self.cluster.status == Status.closed or settled(), PATIENCE)
        if self.cluster.status == Status.closed:
            assert [*self.lost_schedulers()], "the cluster ended by itself, but its scheduler is there"
        elif any(wanted.values()):
            results = await asyncio.wait_for(self.client.gather(self.futures), PATIENCE)
            assert results == [i**2 for i in range(5)] * (len(results) // 5)

    def has(self, wanted: dict[str, int]) -> bool:
        cluster = self.cluster
        n = sum(wanted.values())
        processes = {name: each.processes for name, each in cluster.worker_groups.items()}
        if wanted != {name: each.n_arrived for name, each in cluster.worker_groups.items()}:
            return False
        running = {
            each
            for each in self.platform.live
            if self.platform.all[each].launched_with["code"] != "another's work"
        }
        return (
            len(cluster.workers) == len(cluster.worker_spec) == len(cluster._arrived) == n
            and running - {cluster.scheduler.session_id} == {w.session_id for w in cluster.workers.values()}
            and len(cluster.scheduler_info["workers"])
            == sum(wanted[name] * processes[name] for name in wanted)
        )

    def lost_schedulers(self):
        for each in self.platform.all.values():
            if "'scheduler'" in each.launched_with["code"] and each.status == "failed":
                yield each.id

    def check_the_end(self) -> None:
        assert self.cluster.status == Status.closed
        assert self.platform.live == [self.others]
        stops = self.platform.arguments("stop_workers")
        assert all(stops), "an empty call stops every session of the user's"
        assert self.others not in {each for ids in stops for each in ids}
        assert len(os.listdir(dask.config.get("cml.state-directory"))) <= 1
        ours = [task for task in asyncio.all_tasks() if "dask_cml" in str(task.get_coro())]
        assert ours == []


ACTIONS = [
    *[Episode.scale] * 3,
    Episode.scale_twice,
    Episode.scale_in_threads,
    Episode.scale_by_another_manager,
    *[Episode.adapt] * 2,
    Episode.scale_down,
    Episode.add_group,
    Episode.delete_group,
    *[Episode.submit] * 2,
    Episode.forget,
    Episode.retire,
    *[Episode.evict] * 2,
    Episode.evict_all,
    Episode.evict_scheduler,
    *[Episode.change_errors] * 2,
    Episode.change_quota,
    Episode.outage,
]


# The scheduler says so in its own process, where it is no error.
@pytest.mark.filterwarnings("ignore:Scheduler already contains a plugin")
@pytest.mark.parametrize("seed", range(SEED, SEED + EPISODES))
async def test_an_episode_ends_well(monkeypatch, seed):
    print(f"DASK_CML_SEED={seed} DASK_CML_EPISODES=1")
    start = time.monotonic()
    episode = Episode(seed, monkeypatch)
    try:
        await episode.play()
    except BaseException:
        print("\n".join(episode.done))
        raise
    finally:
        print(f"{time.monotonic() - start:.1f} s, {len(episode.platform.calls)} calls of the API")
