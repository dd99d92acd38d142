"""Plays a schedule, and checks what is left."""

import asyncio
import contextlib
import contextvars
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from clusters import is_keeper, lines_of, record_of
from distributed.core import Status
from simulated.faults import CALM, Weather
from simulated.process import SimulatedProcess, current
from simulated.session import SimulatedSession, program_of
from simulated.world import World

from dask_cml import CMLCluster
from dask_cml.errors import NoSuchCluster
from dask_cml.records import store
from dask_cml.records.store import Record
from dask_cml.scheduler.plugin import NAME as NAME_OF_PLUGIN

from .actors import Actor, Command, NamedCluster, Notebook, Page, User, connect_in_a_task
from .log import CapturedLog
from .schedule import NAME, WEATHERS, Schedule

#: Seconds for what must come true, by the clock of the episode. The longest patience is that of orphans, and
#: of a scheduler that waits for its first watcher.
PATIENCE = 250.0


@dataclass
class Outcome:
    """What an episode has shown."""

    violations: list[str] = field(default_factory=list)
    #: Seconds from the last request until it was true, and for which unwanted sessions ran on.
    converged: float | None = None
    leaked: float = 0.0
    story: list[str] = field(default_factory=list)


class Episode:
    """One cluster's life among its users, as its schedule has it."""

    def __init__(self, schedule: Schedule, world: World) -> None:
        self.schedule, self.world, self.platform = schedule, world, world.platform
        self.actors: dict[str, Actor] = {}
        #: The process that creates the cluster, and those that follow it after a restart.
        self.creators: list[Notebook] = []
        self.commands = 0
        #: Whether a session that was launched itself may launch others. None: it has not tried.
        self._may_launched_launch: bool | None = None
        self.platform.may_launch = self._may_launch
        self.outcome = Outcome()
        self.log = CapturedLog(self.outcome.story)
        self._later: list[asyncio.Task[None]] = []
        #: Why the cluster may have ended.
        self.ends: list[str] = []
        #: Who was paused, or had no network, for a while. Meanwhile the cluster may be an orphan.
        self.away: set[str] = set()
        #: The schedulers that somebody has stopped although they ran and nobody wanted their end.
        self.stopped_schedulers: list[str] = []
        #: How many lines the story had before the last request.
        self.n_told = 0
        self._stopped = world.sessions.stopped
        world.sessions.stopped = self._note_stop  # type: ignore[method-assign]

    async def play(self) -> Outcome:
        with self.log.captured():
            # From the session of the notebook A, by a process of its own.
            [others] = Actor(self.world, "A").process.call(self._launch_others)
            self.others = others["id"]
            self.world.luck.weather = WEATHERS[self.schedule.weather]
            for step in self.schedule.steps:
                await asyncio.sleep(step.after)
                self.note(f"{step.who}: {step.what}{step.arguments or ''}")
                self.do(step.who, step.what, step.arguments)
            await self._end()
        return self.outcome

    def _launch_others(self) -> Any:
        luck, self.platform.luck = self.platform.luck, None
        try:
            return self.platform.launch_workers(1, cpu=1, memory=1, code="another's work")
        finally:
            self.platform.luck = luck

    def note(self, what: str) -> None:
        self.outcome.story.append(f"{time.monotonic() - 1000:7.2f} {what}")

    def violate(self, what: str) -> None:
        self.note(f"VIOLATION: {what}")
        self.outcome.violations.append(what)
        record = self.record()
        for session in self.platform.all.values():
            recorded = record.sessions.get(session.id) if record is not None else None
            self.note(f"    session {session.id} {session.key} {session.status}, recorded as {recorded}")

    # -- the steps

    def actor(self, name: str) -> Any:
        """Return an actor. A process that is dead is followed by another one."""
        known = self.actors.get(name)
        if known is not None and known.lives:
            return known
        crash = self.schedule.crashes.get(name) if known is None else None
        kind = Page if name == "page" else Command if name.startswith("command") else Notebook
        actor = self.actors[name] = kind(self.world, name, crash)
        if name == "A" and isinstance(actor, Notebook):
            self.creators.append(actor)
        return actor

    def do(self, who: str, what: str, arguments: tuple[Any, ...]) -> None:
        name = what.replace(" ", "_")
        known = self.actors.get(who)
        if known is not None and known.lives and not known.runs:
            return  # its user waits
        if who == "world":
            getattr(self, f"_{name}")(*arguments)
        elif who.startswith("command"):
            if what == "run delete":
                self.ends.append("deleted")
            self.actor(who).begin(what.removeprefix("run "), *arguments)
        elif what == "create":
            cls = NamedCluster if self.schedule.names_workers else CMLCluster
            self.actor(who).create(cls, **self.schedule.options)
        elif what == "reopen":
            if self.idle(who):
                self.actor(who).create(**self.schedule.options, create_mode="create-or-connect")
        elif what == "connect":
            if self.idle(who):
                self.actor(who).connect()
        elif what == "open page":
            self.actor(who)
        elif what == "delete in page":
            if (page := self.actors.get(who)) is not None and page.runs and self.record() is not None:
                self.ends.append("deleted in the web UI")
                page.delete()
        elif what == "close page":
            if (page := self.actors.get(who)) is not None and page.runs:
                page.close()
                page.process.on_end.append(lambda: None)
        else:
            keeper = self.actors.get(who)
            if isinstance(keeper, User) and keeper.open is not None:
                if what == "shut down":
                    self.ends.append("shut down")
                getattr(keeper, name)(keeper.open, *arguments)

    def idle(self, who: str) -> bool:
        actor = self.actors.get(who)
        if actor is None or not actor.lives:
            return True
        return isinstance(actor, Notebook) and (
            actor.cluster is not None and actor.cluster.status in (Status.closed, Status.failed)
        )

    def _kill(self, who: str) -> None:
        if who in self.actors:
            self.actors[who].kill()

    def _end_session(self, who: str) -> None:
        if who in self.actors:
            self.actors[who].kill()
            self.ends.append("its user's session has ended")
            others = self.platform.all[self.others]
            master, others.master = others.master, ""
            self.platform.end_session(self.actors[who].session)
            others.master = master

    def sessions(self, role: str) -> list[SimulatedSession]:
        found = [session for session in self.platform.live_sessions if session.id != self.others]
        found = [session for session in found if not self._is_beyond_reach(session)]
        return [session for session in found if (session.key == "scheduler") == (role == "scheduler")]

    def _evict(self, i: int) -> None:
        if workers := self.sessions("worker"):
            self.platform.evict(workers[i % len(workers)].id)

    def _evict_all(self) -> None:
        for session in self.sessions("worker"):
            self.platform.evict(session.id)

    def _freeze(self, i: int) -> None:
        running = [
            session for session in self.sessions("worker") if session.id in self.world.sessions.processes
        ]
        if running:
            self.world.sessions.freeze(running[i % len(running)].id)

    def _evict_scheduler(self) -> None:
        for session in self.sessions("scheduler"):
            self.platform.evict(session.id)

    def _lose_schedulers(self, ages: tuple[float, ...]) -> None:
        """Evict the scheduler now, and the next ones so many seconds after their launch."""
        self._evict_scheduler()
        self._later.append(asyncio.create_task(self._lose_next(ages[1:])))

    async def _lose_next(self, ages: tuple[float, ...]) -> None:
        for age in ages:
            while not (found := self.sessions("scheduler")):
                await asyncio.sleep(0.25)
            await asyncio.sleep(age)
            self.note(f"world: evict {found[-1].id}, a scheduler")
            self.platform.evict(found[-1].id)

    def _freeze_scheduler(self) -> None:
        for session in self.sessions("scheduler"):
            if session.id in self.world.sessions.processes:
                self.world.sessions.freeze(session.id)

    def _pause(self, who: str, seconds: float, threads: bool) -> None:
        if who in self.actors:
            self.away.add(who)
            self.actors[who].process.pause(seconds, threads)

    def _pause_scheduler(self, seconds: float) -> None:
        """Let something keep the scheduler's event loop busy, as a large graph does."""
        for session in self.sessions("scheduler"):
            if session.id in self.world.sessions.processes:
                self.world.sessions.processes[session.id].pause(seconds, threads=False)

    def _cut_off(self, who: str, seconds: float, refuses: bool) -> None:
        if who in self.actors and self.actors[who].runs:
            self.away.add(who)
            self.actors[who].process.cut_off(seconds, refuses)

    def _connect_in_a_task(self, i: int, kind: str) -> None:
        processes = self.world.sessions.processes
        running = [session.id for session in self.sessions("worker") if session.id in processes]
        if running:
            process = processes[running[i % len(running)]]
            process.start(connect_in_a_task(process, kind))

    def _restart(self, who: str, after: float, how: str) -> None:
        if who in self.actors and self.actors[who].runs:
            self.away.add(who)
            self.actors[who].kill()
            self._later.append(asyncio.create_task(self._begin_again(who, after, how)))

    async def _begin_again(self, who: str, after: float, how: str) -> None:
        await asyncio.sleep(after)
        self.note(f"{who}: {how} after its restart")
        self.do(who, how, ())

    def _keeper_leaves(self) -> None:
        """Let the notebook leave that manages the cluster, whatever it is doing."""
        for actor in self.actors.values():
            if isinstance(actor, Notebook) and actor.open is not None and is_keeper(actor.open):
                self.away.add(actor.name)
                actor.leave(actor.open)

    def _leave_alone(self, _: float, at_once: bool) -> None:
        """Let all users leave the cluster, or kill them."""
        for actor in self.actors.values():
            if not isinstance(actor, User) or not actor.runs:
                continue
            self.away.add(actor.name)
            if at_once:
                actor.kill()
            elif isinstance(actor, Page):
                actor.close()
            elif isinstance(actor, Notebook) and actor.open is not None:
                actor.leave(actor.open)

    def _residents(self) -> list[SimulatedProcess]:
        """Return the processes that keep the cluster in its schedulers' sessions."""
        return [process for process in self.world.processes if process.name.startswith("resident")]

    def _kill_resident(self) -> None:
        for process in self._residents():
            process.kill()

    def _freeze_resident(self) -> None:
        for process in self._residents():
            process.freeze()

    def _pause_resident(self, seconds: float) -> None:
        for process in self._residents():
            process.pause(seconds)

    def _forbid_launches(self) -> None:
        """Let no session launch others that was launched itself, unless one already has."""
        if self._may_launched_launch is None:
            self._may_launched_launch = False

    def _may_launch(self, caller: str) -> bool:
        if caller not in self.platform.all:
            return True
        if self._may_launched_launch is None:
            self._may_launched_launch = True
        return self._may_launched_launch

    def _outage(self, seconds: float, refuses: bool) -> None:
        """Let the platform answer nobody, and break the network of all users."""
        self._later.append(asyncio.create_task(self._end_outage(seconds, self.world.luck.weather)))
        self.world.luck.weather = WEATHERS["outage"]
        for name in [*self.actors]:
            self._cut_off(name, seconds, refuses)

    async def _end_outage(self, seconds: float, weather: Weather) -> None:
        await asyncio.sleep(seconds)
        self.world.luck.weather = weather

    def _wait(self) -> None:
        """Do nothing: other things go on."""

    def _weather(self, name: str) -> None:
        self.world.luck.weather = WEATHERS[name]

    def _quota(self, sessions: int | None, waits: bool) -> None:
        # One more for the work of others.
        self.platform.configure(
            None if sessions is None else {"sessions": sessions + 1}, waits_for_room=waits
        )

    def _stale(self, seconds: float) -> None:
        self.world.files.stale = True
        self.world.loop.call_later(seconds, setattr, self.world.files, "stale", False)

    def heal(self) -> None:
        self.note("all faults stop")
        for task in self._later:
            task.cancel()
        for process in self.world.processes:
            process.resume()
            process.connect_again()
        self.world.luck.weather = CALM
        self.platform.configure(None)
        self.platform.heal()
        self.world.files.stale = False
        ended = [session for session in self.platform.all.values() if not session.live]
        for session in ended:
            # To a notebook in another session, nothing else proves that a scheduler has ended.
            if session.key == "scheduler" and session.id in self.world.sessions.processes:
                self.world.sessions.crash(session.id)

    # -- the end

    async def _end(self) -> None:
        self.heal()
        ending = self.schedule.ending
        if ending == "settle":
            await self._settle()
            ending = "shut down"
        self.over = time.time()
        self.ends.append("the episode ends")
        if ending == "abandon":
            await self._abandon()
        elif self._is_dead():
            await self._prune()
        elif (
            ending == "shut down" and (keeper := self._keeper()) is not None and isinstance(keeper, Notebook)
        ):
            self.note(f"{keeper.name}: shut down")
            await self._shut_down(keeper, keeper.open)
        else:
            await self._run("delete", again=True)
            await self._until(lambda: not self._is_starting())
            if self.record() is not None:  # a notebook has created the cluster anew after that
                await self._run("delete", again=True)
        await self._check_the_end()

    async def _shut_down(self, notebook: Notebook, cluster: CMLCluster) -> None:
        n_errors = len(notebook.errors)
        await self._until_done(notebook.shut_down(cluster), f"{notebook.name}'s shutdown()")
        if notebook.runs and len(notebook.errors) == n_errors:
            await self._until(lambda: not self._not_stopped(), 15.0)
            if left := self._not_stopped():
                self.violate(f"{notebook.name}'s shutdown() has left and not named {left}")
        if not notebook.runs:  # it has died on the way, and left the rest to whoever prunes
            await self._prune()
            if self._keeper() is not None:  # another process keeps the cluster
                await self._run("delete", again=True)

    def _not_stopped(self) -> list[str]:
        left = [*self.sessions("scheduler"), *self.sessions("worker")]
        return [f"{session.key} ({session.id})" for session in left if not session.stop_requested]

    def _keeper(self) -> User | None:
        """Return a process that keeps the cluster, or would if nobody did."""
        users = [actor for actor in self.actors.values() if isinstance(actor, User)]
        return next((user for user in users if user.open is not None and user.open._rank is None), None)

    async def _run(self, what: str, *arguments: Any, again: bool = False) -> Command:
        """Run a command, perhaps again until it gives no error or the cluster does not exist."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.commands += 1
            self.note(f"run {what}{arguments or ''}")
            command: Command = self.actor(f"command last{self.commands}")
            await self._until_done(command.begin(what, *arguments), f"dask cml {what}")
            for error in command.errors:
                self.note(f"    {error}")
            if (
                not again
                or not command.errors
                or (self.record() is None and not self._is_busy())
                or self._is_dead()
                or time.monotonic() > deadline
            ):
                return command
            await asyncio.sleep(5.0)

    async def _until_done(self, task: asyncio.Task[Any], what: str) -> None:
        done, _ = await asyncio.wait([task], timeout=PATIENCE)
        if not done:
            self.violate(f"{what} hangs")
        elif not task.cancelled() and task.exception() is not None:
            self.violate(f"{what} raised {task.exception()!r}")

    async def _until(self, condition: Any, seconds: float = PATIENCE) -> bool:
        deadline = time.monotonic() + seconds
        while not await asyncio.to_thread(condition):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.25)
        return True

    # -- the last request comes true

    async def _settle(self) -> None:
        for actor in [*self.actors.values()]:
            for task in actor.under_way:
                await self._until_done(task, f"what {actor.name} does")
        await asyncio.sleep(2.0)  # until the scheduler has written the groups that were added
        began, self.n_told = time.monotonic(), len(self.outcome.story)
        record = self.record()
        if record is None:
            return
        if self._may_launched_launch is False and self._keeper() is None:
            await self._connect_another()  # no command launches anything
        wanted, asker = await self._ask_for_the_last()
        wrong: list[str] = []

        def is_true() -> bool:
            wrong[:] = self._differs(wanted)
            return not wrong or self.record() is None or self._is_dead() or self._has_vanished()

        def died_unheard() -> bool:
            return asker is not None and not asker.runs and not self._is_heard(wanted)

        await self._until(lambda: is_true() or self._keeper() is None or died_unheard())
        while died_unheard() and not is_true():
            self.note(f"{asker.name if asker else ''} died before a scheduler heard of the request")
            wanted, asker = await self._ask_for_the_last()
            await self._until(lambda: is_true() or self._keeper() is None or died_unheard())
        if self._keeper() is None and not await self._until(is_true, 10.0):
            await self._let_one_stay()
            await self._until(is_true)
        if not is_true() and self._has_ended_unheard():
            self.note("A: connect")
            await self._until_done(self.actor("A").connect(), "connect")
            await self._until(is_true)
        self._check_objects()
        if not await self._until(is_true, 0.0):
            self.violate(f"the last request {wanted} is not what runs: {'; '.join(wrong)}")
        elif self.record() is None or self._is_dead():
            self._check_ended()
        elif self._has_vanished():
            users = [actor for actor in self.actors.values() if isinstance(actor, User) and actor.open]
            if not await self._until(
                lambda: all(any("not connected for" in line for line in self._told([user])) for user in users)
            ):
                self.violate("the scheduler has vanished, and not all users are told")
        else:
            self.outcome.converged = time.monotonic() - began
            self.note(f"the last request is true after {self.outcome.converged:.1f} s")

    def _has_ended_unheard(self) -> bool:
        """Return whether a recorded worker has ended before its program began.

        Only a process in the session that owns it can know that it is not queued any more.
        """
        record, ended = self.record(), [session for session in self.platform.all.values() if not session.live]
        recorded = {} if record is None else record.sessions
        return any(session.id in recorded.keys() - self.world.sessions.processes.keys() for session in ended)

    def _is_heard(self, wanted: dict[str, int]) -> bool:
        """Return whether a scheduler knows of a request. Otherwise the request dies with its process."""
        boards = [plugin._board for plugin in self._plugins()]
        return any({name: group.target for name, group in board.groups.items()} == wanted for board in boards)

    def _stays(self) -> bool:
        """Return whether a scheduler runs that somebody has used, of a cluster that is never an orphan."""
        return any(plugin._watchers.timeout is None for plugin in self._plugins())

    def _plugins(self) -> list[Any]:
        sessions = self.sessions("scheduler")
        schedulers = [program for session in sessions for program in self.world.sessions.program(session.id)]
        return [scheduler.plugins[NAME_OF_PLUGIN] for scheduler in schedulers]

    async def _ask_for_the_last(self) -> tuple[dict[str, int], User | None]:
        """Ask for the last numbers of workers, again while somebody gets an error. Return who asked, too."""
        deadline = time.monotonic() + PATIENCE
        while True:
            record, user = self.record(), self._keeper()
            recorded = [] if record is None else [*record.groups]
            known = [] if user is None or user.open is None else [*user.open.worker_groups]
            wanted = {group: self.schedule.last.get(group, 1) for group in dict.fromkeys([*recorded, *known])}
            self.note(f"last request, by {user.name if user else 'a command'}: {wanted}")
            if user is None or user.open is None:
                for group, n in wanted.items():
                    await self._run("scale", n, group, again=True)
                return wanted, None
            n_errors = len(user.errors)
            for group, n in wanted.items():
                user.scale(user.open, n, group)
            for task in [*user.under_way]:
                await self._until_done(task, f"what {user.name} does")
            if len(user.errors) == n_errors or self.record() is None or time.monotonic() > deadline:
                return wanted, user
            self.note(f"    {user.errors[-1]}")
            await asyncio.sleep(5.0)

    async def _let_one_stay(self) -> None:
        """Let a notebook connect and keep the cluster if another one has died.

        What the dead one launched and did not record, or stopped and did not record, is found only by a
        process that keeps the cluster for a while. Commands end earlier.
        """
        if any(not actor.runs for actor in self.actors.values()):
            await self._connect_another()

    async def _connect_another(self) -> None:
        self.note("C: connect")
        await self._until_done(self.actor("C").connect(), "connect")

    def record(self) -> Record | None:
        """Return the record as no process of the episode sees it: none of the files' faults hides it."""
        with contextlib.suppress(NoSuchCluster):
            return contextvars.Context().run(store.read, NAME)
        return None

    def _differs(self, wanted: dict[str, int]) -> list[str]:
        record = self.record()
        if record is None:
            return ["no record"]
        found: list[str] = []
        live = {session.id: session.key for session in self.sessions("worker") if not session.stop_requested}
        if self._failed():
            # Its user knows that others may still run, until _shut_down_again.
            live = {id: key for id, key in live.items() if id in record.sessions}
        # A half-made session whose refusal was lost is listed like a queued one, for ever.
        runs = [key for id, key in live.items() if not self.platform.all[id].half_made]
        if Counter(map(_group_of, live.values())) != +Counter(self._unless_refused(wanted)):
            found.append(f"sessions {sorted(live.values())}")
        if recorded := {key for key in record.sessions.values() if key != "scheduler"} ^ {*live.values()}:
            found.append(f"the record differs in {sorted(recorded)}")
        ids = [session.id for session in self.sessions("scheduler") if not session.stop_requested]
        if ids != [id for id, key in record.sessions.items() if key == "scheduler"] or len(ids) != 1:
            found.append(f"sessions of schedulers {ids}")
        schedulers = [
            program
            for session in self.sessions("scheduler")
            for program in self.world.sessions.program(session.id)
        ]
        if len(schedulers) != 1:
            return [*found, f"{len(schedulers)} schedulers"]
        connected = {str(worker.name) for worker in schedulers[0].workers.values()}
        expected = {worker for key in runs for worker in self._dask_names(record, key)}
        if connected != expected:
            found.append(f"Dask workers {sorted(connected)}")
        for actor in [*self.actors.values()]:
            if isinstance(actor, User) and (cluster := actor.open) is not None:
                known = {name: group.n_arrived for name, group in cluster.worker_groups.items()}
                # A group may be deleted instead of empty.
                if +Counter(known) != Counter(map(_group_of, runs)):
                    found.append(f"{actor.name} knows of {known}")
        return found

    def _unless_refused(self, wanted: dict[str, int]) -> dict[str, int]:
        """Return what is wanted, without groups of which its user was told that they are deleted by now."""
        told = "\n".join(self.outcome.story[self.n_told :])
        refused = 'refused: ValueError("invalid worker_group={!r}'
        return {group: n for group, n in wanted.items() if refused.format(group) not in told}

    def _dask_names(self, record: Record, key: str) -> list[str]:
        group = _group_of(key)
        options = {**record.options, **(record.groups.get(group) or {})}
        n = options.get("processes") or 1
        return [key] if n == 1 else [f"{key}-{i}" for i in range(n)]

    def _check_ended(self) -> None:
        """A running cluster ends by a word of its user, as an orphan, or if it loses schedulers in a row.

        It also ends with its scheduler if nobody is there to launch another one.
        """
        keepers = [actor for actor in self.actors.values() if isinstance(actor, User)]
        started = [keeper for keeper in keepers if isinstance(keeper, Notebook) and keeper.started]
        if self.ends or all(keeper.ended for keeper in started) or not all(keeper.runs for keeper in keepers):
            return
        told = self._told(started)
        is_orphan = bool(self.away) and any("orphaned: " in line for line in told)
        if not is_orphan and not any("schedulers in a row" in line for line in told):
            self.violate("the cluster has ended, and nobody wanted it")

    def _check_objects(self) -> None:
        """An object ends by a word of its user, or with its cluster."""
        record = self.record()
        if self.ends or record is None or self._is_dead():
            return
        for actor in [*self.actors.values()]:
            if not isinstance(actor, Notebook) or not actor.runs or actor.ended or not actor.started:
                continue
            if actor.cluster is None or getattr(record_of(actor.cluster), "id", None) != record.id:
                continue  # of another cluster, which had the name before
            if actor.cluster.status in (Status.closed, Status.failed):
                self.violate(
                    f"{actor.name}'s object has ended, and its cluster runs: {self._told([actor])[-1:]}"
                )

    def _note_stop(self, session: SimulatedSession) -> None:
        """Note the stop of a scheduler that nobody wants to end. Threads call this."""
        if session.key == "scheduler" and not self.ends and self._serves(session):
            self.stopped_schedulers.append(session.id)
        self._stopped(session)

    def _serves(self, session: SimulatedSession) -> bool:
        """Return whether the program of a scheduler's session runs, as its cluster's last one."""
        process, record = self.world.sessions.processes.get(session.id), self.record()
        if process is None or process.state not in ("runs", "paused") or record is None:
            return False
        last = record.scheduler
        # Also if it is killed meanwhile: CML may carry out late what it has asked for.
        creators = [
            creator
            for creator in self.creators
            if creator is self.creators[-1] or creator.process is current()
        ]
        if any(not creator.started and self._fails(creator) for creator in creators):
            return False  # its start fails, which ends the cluster
        return last.session == session.id and last.address is not None and not last.closed

    @staticmethod
    def _fails(creator: Notebook) -> bool:
        failed = creator.cluster is not None and creator.cluster.status == Status.failed
        return creator.lives or failed

    def _check_losses(self) -> None:
        """Scaling down loses no data, as long as there is another worker to take it."""
        addresses = self.world.sessions.addresses
        workers = [self.platform.all[id] for id in {*addresses.values()}]
        for address, at in self.log.lost:
            session = self.platform.all.get(addresses.get(address, ""))
            has_others = any(
                other is not session
                and other.running_at is not None
                and other.running_at.timestamp() < at - 30.0
                and (other.finished_at is None or other.finished_at.timestamp() > at + 30.0)
                for other in workers
            )
            if session is not None and session.status == "stopped" and has_others:
                self.violate(f"the data of worker {session.key} ({session.id}) was lost when it was stopped")

    def _told(self, keepers: Iterable[User]) -> list[str]:
        clusters = [keeper.cluster for keeper in keepers if keeper.cluster is not None]
        return [line for cluster in clusters for line in lines_of(cluster)]

    # -- nobody comes back

    async def _abandon(self) -> None:
        self.note("all processes die")
        for actor in [*self.actors.values()]:
            actor.kill()
        if not self.schedule.options.get("shutdown_on_close", True):
            await self._run("delete", again=True)
        # Orphans end themselves.
        await self._until(lambda: not self._left_running())
        await self._prune()

    async def _prune(self) -> None:
        await asyncio.sleep(130.0)  # after the scheduler's last sign of life
        command = await self._run("prune")
        if command.passed_over:
            self.note(f"    passed over: {command.passed_over}")
            await self._run("delete")
        elif self.record() is not None and not self._is_busy():
            # A command has replaced the scheduler meanwhile, or found one that started late, and left it.
            await self._until(lambda: not self._left_running() or self._stays())
            await self._run("delete" if self._stays() else "prune")

    def _is_dead(self) -> bool:
        """Whether the cluster has no scheduler, and no notebook that starts or ends it."""
        return not any(map(self._may_answer, self.sessions("scheduler"))) and not self._is_busy()

    def _has_vanished(self) -> bool:
        """Whether the scheduler's session has ended without a word, and nobody is left who lists it.

        Then there is no proof of its end. Who has left the cluster does not look any more.
        """
        record = self.record()
        using = [actor for name, actor in self.actors.items() if actor.runs and not self.idle(name)]
        last = [
            self.platform.all[id]
            for id, key in ({} if record is None else record.sessions).items()
            if key == "scheduler"
        ][-1:]
        return not self.sessions("scheduler") and any(
            all(actor.session != session.master for actor in using) for session in last
        )

    def _is_busy(self) -> bool:
        return any(isinstance(actor, Notebook) and actor.is_busy for actor in self.actors.values())

    def _is_starting(self) -> bool:
        """Whether a notebook that lives has something under way, such as the start of a cluster."""
        notebooks = [actor for actor in self.actors.values() if isinstance(actor, Notebook) and actor.lives]
        return any(not task.done() for notebook in notebooks for task in notebook.under_way)

    def _may_answer(self, scheduler: SimulatedSession) -> bool:
        """Whether the program of a scheduler's session runs, or may still begin.

        Without it, nobody can ask the cluster for anything. Commands say so, and to delete the cluster.
        """
        begins = scheduler.status in ("scheduling", "starting") and not scheduler.half_made
        return begins or scheduler.id in self.world.sessions.processes

    def _left_running(self) -> list[str]:
        left = [*self.sessions("scheduler"), *self.sessions("worker")]
        return [f"{session.key} ({session.id})" for session in left]

    # -- what must be

    async def _check_the_end(self) -> None:
        await self._shut_down_again()
        await self._check_sessions()
        if self.stopped_schedulers:
            self.violate(f"these schedulers ran and were stopped: {self.stopped_schedulers}")
        self._check_losses()
        given = Counter(
            (name, self._record_of(session))
            for name, sessions in self.world.sessions.workers.items()
            for session in sessions
        )
        twice = [name for (name, _), n in given.items() if n > 1]
        if twice:
            self.violate(f"these names were given more than once: {twice}")
        others = self.platform.all[self.others]
        if others.stop_requested or not others.live:
            self.violate("the work of others was stopped")
        if () in self.platform.arguments("stop_workers"):
            self.violate("an empty call stops every session of the user's")
        if self.world.sessions.doubles:
            self.violate(f"two sessions ran workers of one name: {self.world.sessions.doubles}")
        await self._leave_all()
        await self._check_sessions()
        if any(name.startswith(".") for name in self.world.clusters):
            with mock.patch.object(store, "_LEFTOVER_AGE", -1.0):  # much later
                await self._run("prune")
        if self.world.clusters:
            self.violate(f"these folders are left: {self.world.clusters}")
        for what in self.log.tracebacks:
            self.violate(f"a traceback: {what}")
        self.outcome.leaked = sum(self._leaked(session) for session in self.platform.all.values())

    def _record_of(self, session_id: str) -> Any:
        """Return the record of the cluster for which a session was launched. Another may have its name."""
        arguments = program_of(self.platform.all[session_id].code)
        return None if arguments is None else arguments.get("record")

    async def _shut_down_again(self) -> None:
        """Let users whose ``shutdown()`` has named sessions that were not stopped call it again."""
        for actor in self._failed():
            self.note(f"{actor.name}: shut down again, after {actor.errors[-1:]}")
            await self._shut_down(actor, actor.cluster)

    def _failed(self) -> list[Notebook]:
        notebooks = [actor for actor in self.actors.values() if isinstance(actor, Notebook) and actor.runs]
        return [actor for actor in notebooks if actor.cluster and actor.cluster.status == Status.failed]

    async def _check_sessions(self) -> None:
        await self._until(lambda: not self._left_running(), 200.0)
        if left := self._left_running():
            self.violate(f"these sessions are left: {left}")

    def _is_beyond_reach(self, session: SimulatedSession) -> bool:
        """Whether nobody but the platform can know of a session.

        Its launch was refused or its program never ran, and its launcher died before it could record or stop
        it, or the answer was lost. If its program starts, it ends at once, because the cluster is gone.
        Otherwise the platform ends it with the launcher's session.
        """
        if session.stop_requested or session.id in self.world.sessions.processes:
            return False
        record = self.record()
        recorded = record is not None and session.id in record.sessions
        dead = {process.env["CDSW_ENGINE_ID"] for process in self.world.processes if process.state == "dead"}
        return (session.master in dead or not session.answered) and not recorded

    def _leaked(self, session: SimulatedSession) -> float:
        if session.id == self.others:
            return 0.0
        end = time.time() if session.finished_at is None else session.finished_at.timestamp()
        return max(0.0, end - max(self.over, session.created_at.timestamp()))

    async def _leave_all(self) -> None:
        """Let all who are left close what they have, after which nothing of theirs goes on."""
        for actor in [*self.actors.values()]:
            if not actor.runs:
                continue
            for task in actor.under_way:
                await self._until_done(task, f"what {actor.name} does")
            if isinstance(actor, Page):
                await self._until_done(actor.close(), "the web UI's close()")
            elif isinstance(actor, Notebook) and actor.cluster is not None:
                await self._shut_down(actor, actor.cluster)
            if isinstance(actor, Notebook) and actor.wrong:
                self.violate(f"{actor.name} has wrong results: {actor.wrong}")
            over = await self._until(lambda actor=actor: not self._tasks(actor), 60.0)
            if not over:
                self.violate(f"tasks of {actor.name} are left: {self._tasks(actor)}")

    def _tasks(self, actor: Actor) -> list[str]:
        return [text for task in actor.process.tasks if "dask_cml" in (text := str(task.get_coro()))]


def _group_of(key: str) -> str:
    return "default" if key.count("-") == 1 else key.split("-")[1]
