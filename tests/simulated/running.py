"""Runs what is in the sessions of the simulated platform: real schedulers and workers, in one event loop."""

import asyncio
import contextlib
import contextvars
import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from distributed import Scheduler, Worker
from distributed.security import Security

from dask_cml import wrapper
from dask_cml.layout import WORKER, WORKER_GROUP

from .faults import Luck
from .platform import SimulatedPlatform
from .process import Killed, SimulatedProcess
from .session import SimulatedSession, program_of

#: Seconds that a stopped session has for its own end, at most.
_GRACE = 5.0


class RunningSessions:
    """Lets sessions get on by the clock, and run their programs, each in a process of its own."""

    def __init__(
        self,
        platform: SimulatedPlatform,
        make_process: Callable[[str, Mapping[str, str]], SimulatedProcess],
        luck: Luck,
    ) -> None:
        self.processes: dict[str, SimulatedProcess] = {}
        #: The names that two sessions had at once which both ran a Dask worker.
        self.doubles: list[str] = []
        #: The sessions that took the name of a worker and ran it, and those of Dask workers by their
        #: addresses.
        self.workers: dict[str, list[str]] = {}
        self.addresses: dict[str, str] = {}
        self.are_in_mesh = False
        self._platform, self._make_process, self._luck = platform, make_process, luck
        self._loop = asyncio.get_running_loop()
        self._servers: dict[str, list[Any]] = {}
        self._lives: set[asyncio.Task[None]] = set()

    # -- for the platform

    def launched(self, session: SimulatedSession) -> None:
        fate = self._platform.doom_of(session.key) or self._luck.fate(session.key)
        if fate == "hidden":
            session.change(listed=False)
        self._soon(lambda: self._keep(self._live(session, fate)))

    def stopped(self, session: SimulatedSession) -> None:
        session.reach("stopping")
        self._soon(lambda: self._keep(self._stop(session)))

    def evicted(self, session: SimulatedSession) -> None:
        self._soon(lambda: self._kill(session))

    def _soon(self, function: Callable[[], Any]) -> None:
        # What sessions do belongs to no process that launches or stops them.
        self._loop.call_soon_threadsafe(function, context=contextvars.Context())

    def _keep(self, life: Any) -> None:
        task = asyncio.ensure_future(life)
        self._lives.add(task)
        task.add_done_callback(self._lives.discard)

    # -- for tests

    def freeze(self, session_id: str) -> None:
        """Let the node of a session fail: nobody answers, no connection ends. Soon it is listed as ended."""
        self.processes[session_id].freeze()
        self._loop.call_later(1.0, self._platform.evict, session_id)

    def crash(self, session_id: str) -> None:
        """Kill the program of a session, which the session outlives for as long as it takes to say so."""
        session, process = self._platform.all[session_id], self.processes[session_id]
        process.kill()
        kernel = self._make_process(f"kernel of {session_id}", process.env)
        self._keep(kernel.start(self._end(session)))

    def cut_off(self, session_id: str, seconds: float, refuses: bool = False) -> None:
        """Break the network of a session for some seconds; see :meth:`.SimulatedProcess.cut_off`."""
        self.processes[session_id].cut_off(seconds, refuses)

    def program(self, session_id: str) -> list[Any]:
        """Return the scheduler or the workers that run in a session."""
        return self._servers.get(session_id, [])

    async def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for task in self._lives:
            task.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)

    # -- the life of a session

    async def _live(self, session: SimulatedSession, fate: str) -> None:
        chance = self._luck.chance("times", session.key)
        if fate == "hidden":  # also one that ends before
            self._loop.call_later(6.0, lambda: session.change(listed=True))
        if not await self._get_to(session, "starting", chance.uniform(0.05, 0.5)):
            return
        while self._platform.exceeded(session) or (fate == "waits" and "waits" in self._luck.weather.fates):
            session.reach("scheduling")
            if not await self._get_to(session, "starting", 0.5):
                return
        if not await self._get_to(session, "running", chance.uniform(0.3, 4.0)):
            return
        if fate in ("fails", "succeeds"):
            session.reach({"fails": "failed", "succeeds": "succeeded"}[fate])
            return
        later = 8.0 if fate == "unknown" else chance.uniform(0.0, 1.0)
        address = f"10.0.0.{int(session.id[4:]) % 250 + 1}"
        self._loop.call_later(later, lambda: session.change(ip_address=address))
        if fate != "silent":
            await self._run(session, chance.uniform(0.0, 10.0) if fate == "dies" else None)

    async def _get_to(self, session: SimulatedSession, status: str, after: float) -> bool:
        await asyncio.sleep(after)
        if session.stop_requested or not session.live:
            return False
        session.reach(status)
        return True

    async def _run(self, session: SimulatedSession, dies_after: float | None) -> None:
        env = {str(name): str(value) for name, value in session.launched_with["env"].items()}
        env |= {"CDSW_ENGINE_ID": session.id, "CDSW_MASTER_ID": session.master}
        process = self.processes[session.id] = self._make_process(session.key or session.id, env)
        process.is_in_mesh = self.are_in_mesh
        process.on_end.append(lambda: self._abandon(session.id))
        program = process.start(self._program(session))
        if dies_after is not None:
            self._loop.call_later(dies_after, self._platform.evict, session.id)
        await asyncio.wait([program])
        if process.runs:
            process.kill()
            failed = program.cancelled() or program.exception() is not None
            session.reach("stopped" if session.stop_requested else "failed" if failed else "succeeded")

    async def _end(self, session: SimulatedSession) -> None:
        arguments = program_of(session.code)
        assert arguments is not None
        await self._enter_end(arguments)
        session.reach("failed")

    async def _stop(self, session: SimulatedSession) -> None:
        """Give the program notice, and some seconds to end."""
        process = self.processes.get(session.id)
        if process is not None and process.runs:
            grace = self._luck.chance("grace", session.id).choice([0.0, 0.5, _GRACE])
            closing = [process.start(_close(server)) for server in self.program(session.id)]
            if closing and grace:
                await asyncio.wait(closing, timeout=grace)
        self._kill(session)
        session.reach("stopped")

    def _kill(self, session: SimulatedSession) -> None:
        if (process := self.processes.get(session.id)) is not None:
            process.kill()

    def _abandon(self, session_id: str) -> None:
        """Close what is no connection of Dask's own."""
        for server in self._servers.pop(session_id, []):
            server.http_server.stop()
            for name, executor in getattr(server, "executors", {}).items():
                if isinstance(executor, Executor) and name != "offload":  # which all share
                    executor.shutdown(wait=False)

    # -- what runs in a session

    async def _program(self, session: SimulatedSession) -> None:
        """Do what the wrapper does, and what the command does that it runs."""
        arguments = program_of(session.code)
        if arguments is None:
            await asyncio.Event().wait()  # the work of others
            return
        if "name" in arguments:
            names = ("folder", "record", "scheduler_file", "next_board")
            cluster = wrapper._Cluster(*(arguments.get(name) for name in names))
            if await asyncio.to_thread(wrapper._start, cluster, arguments["name"], arguments.get("entry")):
                return
        command = arguments["command"]
        options = {command[i][2:]: command[i + 1] for i in range(len(command) - 1) if command[i][:2] == "--"}
        if command[3] == "scheduler":
            if arguments.get("gives_signs"):
                self._soon(lambda: self._keep(self._give_signs(session, cluster)))
            await self._schedule(session, command, options)
            await self._enter_end(arguments)
        else:
            await self._work(session, arguments, options)

    async def _enter_end(self, arguments: Mapping[str, Any]) -> None:
        if arguments.get("gives_signs"):
            await asyncio.to_thread(wrapper._enter_end, wrapper._Cluster(arguments["folder"]))

    async def _schedule(self, session: SimulatedSession, command: list[str], options: dict[str, str]) -> None:
        preload = [command[i + 1] for i, word in enumerate(command) if word == "--preload"]
        scheduler = Scheduler(
            host=options["host"],
            port=int(options["port"]),
            dashboard=False,
            dashboard_address="127.0.0.1:0",
            idle_timeout=options.get("idle-timeout"),
            scheduler_file=options.get("scheduler-file"),
            preload=preload,
            preload_argv=[[] for _ in preload],
            **_keys_of(options, "scheduler"),
        )
        self._servers[session.id] = [scheduler]
        await scheduler
        await scheduler.finished()

    async def _give_signs(self, session: SimulatedSession, cluster: wrapper._Cluster) -> None:
        """Date the scheduler's file, or end it, as the wrapper does, whose loop is not the scheduler's."""
        process, n_over = self.processes[session.id], 0

        def give_sign() -> int:
            process.check()
            return wrapper._give_sign(cluster, n_over)

        with contextlib.suppress(Killed):
            while session.live and n_over < wrapper._PROOFS:
                await asyncio.sleep(wrapper._SIGN_INTERVAL)
                n_over = await asyncio.to_thread(process.call, give_sign)
            closing = [process.start(_close(server)) for server in self.program(session.id)]
            if closing and (await asyncio.wait(closing, timeout=wrapper._END))[1]:
                self.crash(session.id)

    async def _work(
        self, session: SimulatedSession, arguments: Mapping[str, Any], options: dict[str, str]
    ) -> None:
        address = arguments["command"][4]
        if address == "--scheduler-file":
            found = await self._meet(arguments["folder"], arguments["scheduler_file"], arguments["timeout"])
            if found is None:
                return
            address = found
        name, n = options["name"], int(options["nworkers"])
        if any(process.runs for process in self._running(name) if process is not self.processes[session.id]):
            self.doubles.append(name)
        offered = (pair.split("=") for pair in options.get("resources", "").split())
        resources = {resource: float(amount) for resource, amount in offered}
        workers = [
            Worker(
                address,
                name=worker_name,
                nthreads=int(options["nthreads"]),
                memory_limit=0,
                resources=resources,
                dashboard=False,
                dashboard_address="127.0.0.1:0",
                death_timeout=float(options["death-timeout"]),
                **_keys_of(options, "worker"),
            )
            for worker_name in ([name] if n == 1 else [f"{name}-{i}" for i in range(n)])
        ]
        env = session.launched_with["env"]
        about = {"session": session.id, "name": env[WORKER], "group": env[WORKER_GROUP]}
        for worker in workers:
            worker.startup_information["cml"] = lambda _: about
        self._servers[session.id] = workers
        self.workers.setdefault(name, []).append(session.id)
        await asyncio.gather(*workers)
        self.addresses |= {worker.address: session.id for worker in workers}
        await asyncio.gather(*(worker.finished() for worker in workers))

    def _running(self, name: str) -> list[SimulatedProcess]:
        """Return the processes of the workers of this name."""
        ids = [
            session_id
            for session_id, servers in self._servers.items()
            for server in servers
            if _is_of(server, name)
        ]
        return [self.processes[session_id] for session_id in ids]

    async def _meet(self, folder: str, file: str, timeout: float) -> str | None:
        """Return the scheduler's address, or None if the folder is removed first."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                address: str = json.loads(await asyncio.to_thread(Path(folder, file).read_text))["address"]
            except FileNotFoundError:
                if not await asyncio.to_thread(os.path.isdir, folder):
                    return None
            else:
                return address
            await asyncio.sleep(0.2)
        return None


def _keys_of(options: Mapping[str, str], role: str) -> dict[str, Any]:
    """Return the arguments of a scheduler or worker by which it has the keys in its options."""
    if "tls-key" not in options:
        return {}
    keys = {f"tls_{role}_cert": options["tls-cert"], f"tls_{role}_key": options["tls-key"]}
    security = Security(require_encryption=True, tls_ca_file=options["tls-ca-file"], **keys)
    return {"protocol": options["protocol"], "security": security}


def _is_of(server: Any, name: str) -> bool:
    return isinstance(server, Worker) and str(server.name) in (name, f"{name}-0")


async def _close(server: Any) -> None:
    if isinstance(server, Worker):
        await server.close(timeout=1, executor_wait=False, nanny=False)
    else:
        await server.close()
