"""The process that runs one session. Its launcher starts this file by its path, which is fast."""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dask_cml.local import cgroups, engines, environment, network, quota, session_state, state, watchers
    from dask_cml.local.memory_watch import MemoryWatch

_RUNNER = Path(__file__).with_name("runner.py")
#: Seconds for which a session runs that an injected fault ends.
_MOMENT = 0.1
#: Seconds between two checks whether the session's owner has ended.
_COLLECT_INTERVAL = 0.5
#: Seconds between two checks whether a waiting session has room.
_ROOM_INTERVAL = 0.5
#: Seconds between two looks at a session's cgroup, at the memory of its processes, at which processes it has,
#: and at its scratch space.
_CGROUP_INTERVAL, _MEMORY_INTERVAL, _SEARCH_INTERVAL, _SCRATCH_INTERVAL = 0.02, 0.1, 0.5, 1.0


class Supervisor:
    """Takes a session from ``scheduling`` to its end.

    Parameters
    ----------
    folder : pathlib.Path
        The session's folder. This process holds its lock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: dict[str, Any] = state.read_json(folder / "plan.json")
        self.status: dict[str, Any] = {"supervisor": os.getpid()}
        self.child: subprocess.Popen[bytes] | None = None
        self.terminated = False
        self.memory: cgroups.Cgroup | MemoryWatch | None = None
        #: Whether all processes must die if memory is exhausted.
        self.whole = self.plan["over_memory"] == "session"
        #: Why the session fails, and whether its main process gets SIGTERM first.
        self.reason, self.notice = "", True
        owner = self.plan["owner"]
        self.owner: str | None = owner if environment.ends(owner) else None
        self._listen()

    def _listen(self) -> None:
        """Let signals interrupt :meth:`pause`."""
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # The shell that started this process ignores these signals, and the session would inherit that.
        for signum in (signal.SIGINT, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_DFL)

    def _terminate(self, *_: Any) -> None:
        self.terminated = True

    @property
    def stopping(self) -> bool:
        """Whether the session must stop."""
        if self.owner is not None and engines.has_ended(self.owner):
            return True
        return self.terminated or (self.folder / "stop").exists()

    def pause(self, seconds: float | None) -> None:
        """Wait for a signal, for :meth:`wake`, or for this many seconds."""
        if select.select([self._woken], [], [], seconds)[0]:
            os.read(self._woken, 4096)

    def wake(self, reason: str = "") -> None:
        """Interrupt :meth:`pause`, from a thread, and let the session fail for a reason."""
        self.reason = self.reason or reason
        os.write(self._wake, b"0")

    @property
    def out_of_memory(self) -> bool:
        """Whether all processes must be killed, because of the memory that they took together."""
        main_is_killed = self.child is not None and self.child.poll() == -signal.SIGKILL
        return self.memory is not None and self.memory.oom_kills() > 0 and (self.whole or main_is_killed)

    def find_end(self) -> str | None:
        """Return the session's last status if it has ended or must end."""
        exit_status = self.child.poll() if self.child else None
        if eviction := state.read_json(self.folder / "eviction.json"):
            self.reason, self.notice = session_state.EVICTED, eviction["notice"]
        elif self.stopping:
            return "stopped"
        elif self.out_of_memory:
            self.reason, self.notice = session_state.OUT_OF_MEMORY, False
        if self.reason or exit_status:
            return "failed"
        return None if exit_status is None else "succeeded"

    def wait(self, seconds: float | None) -> str | None:
        """Wait until the session ends or must stop, or for this many seconds.

        Returns
        -------
        str or None
            Its last status, or None after the time has passed.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not (end := self.find_end()):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            if self.owner is not None:
                left = _COLLECT_INTERVAL if left is None else min(left, _COLLECT_INTERVAL)
            self.pause(left)
        return end

    def write(self, status: str, **more: Any) -> None:
        """Publish the session's status."""
        self.status.update(status=status, **more)
        state.write_json(self.folder / "status.json", self.status)

    def run(self) -> None:
        """Run the session, from its start to its end."""
        try:
            end = self.live()
        except Exception:
            traceback.print_exc()
            end = "failed"
        reason = self.reason if end == "failed" else ""
        try:
            self.clean_up()
        except Exception:
            traceback.print_exc()
        if end == "stopped":
            time.sleep(self.plan["faults"].get("stopping", 0.0))
        self.write(end, finished_at=time.time(), reason=reason or None)

    def live(self) -> str:
        """Run the session, and return its last status."""
        fate, delay = self.plan["fate"], self.plan["start_delay"]
        self.write("scheduling")
        while self.plan["waits"] and not self.admitted():
            if end := self.wait(_ROOM_INTERVAL):
                return end
        if end := self.wait(None if fate == "stuck" else delay / 2):
            return end
        self.write("starting")
        if end := self.wait(delay / 2):
            return end
        if own := self.plan["network"]:
            network.set_up(own)
        if fate is None:
            self.start()
        self.write("running", running_at=time.time())
        if fate in ("fails", "succeeds"):
            return self.wait(_MOMENT) or {"fails": "failed", "succeeds": "succeeded"}[fate]
        if "oom" not in self.plan["faults"]:
            return self.wait(self.plan["lifetime"]) or "timedout"
        if end := self.wait(self.plan["faults"]["oom"]):
            return end
        self.reason, self.notice = session_state.OUT_OF_MEMORY, False
        return "failed"

    def admitted(self) -> bool:
        """Admit a waiting session if there is room and it is the first. Return whether it was admitted."""
        with state.locked():
            room = quota.has_room(self.folder.name)
            if room:
                self.write("scheduling", admitted=True)
            return room

    def start(self) -> None:
        """Start the session's program within its limits."""
        scratch = self.folder / "tmp"
        scratch.mkdir(mode=0o700)
        if self.plan["cgroup"]:
            self._start_in_cgroup()
        if self.child is None:
            self.child = self._popen()
        if self.memory is None and self.plan["memory_limit"] != "off":
            from dask_cml.local.memory_watch import MemoryWatch  # imports psutil, which takes long

            self.memory = MemoryWatch(self.folder.name, self.child.pid, self.plan["memory"], self.whole)
            watchers.repeat(self.memory.search, _SEARCH_INTERVAL)
            watchers.repeat(self.memory.look, _MEMORY_INTERVAL, self.wake)
        if limit := self.plan["scratch"]:
            full = functools.partial(self.wake, session_state.SCRATCH_FULL)
            watchers.repeat(lambda: watchers.gibibytes(scratch) > limit, _SCRATCH_INTERVAL, full)

    def _start_in_cgroup(self) -> None:
        cgroup = cgroups.Cgroup(Path(self.plan["cgroup"]))
        try:
            cgroup.create(self.plan["memory"], self.whole)
            self.child = self._popen(cgroup.join)
        except (OSError, subprocess.SubprocessError) as error:
            sys.stderr.write(f"session started without cgroup {cgroup.path}: {error}\n")
            cgroup.remove()
        else:
            self.memory = cgroup
            # The kernel may kill one process only. The others must not have time to notice.
            watchers.repeat(cgroup.oom_kills, _CGROUP_INTERVAL, self.wake)

    def _popen(self, prepare: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
        """Start the session's program, as the leader of a process group and a POSIX session."""
        if script := self.plan["script"]:
            command = [script]
        else:
            command = [str(_RUNNER), str(self.folder / "plan.json")]
        where = network.inside(self.plan["network"]) if self.plan["network"] else []
        return subprocess.Popen(
            [*where, self.plan["python"], "-u", *command],
            stdin=subprocess.DEVNULL,
            env=self.plan["env"],
            cwd=self.plan["directory"],
            start_new_session=True,
            preexec_fn=prepare,
        )

    def clean_up(self) -> None:
        """End all processes of the session by SIGKILL: after a notice to the main one, or at once."""
        group = None
        if self.child:
            group = self.child.pid
            if self.notice and self.child.returncode is None:
                self.child.terminate()
                deadline = time.monotonic() + self.plan["stop_grace"]
                while self.child.poll() is None and not self.out_of_memory:
                    if (left := deadline - time.monotonic()) <= 0:
                        break
                    self.pause(left)
        session_state.free(session_state.SessionState(self.folder, self.plan, self.status), group)


def _import_siblings() -> None:
    """Import this package's modules without the packages' own ``__init__``, which would take far longer."""
    here = Path(__file__).resolve().parent
    sys.path.pop(0)
    for name, path in (("dask_cml", here.parent), ("dask_cml.local", here)):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    global cgroups, engines, environment, network, quota, session_state, state, watchers
    from dask_cml.local import cgroups, engines, environment, network, quota, session_state, state, watchers


if __name__ == "__main__":
    _import_siblings()
    Supervisor(Path(sys.argv[1])).run()
