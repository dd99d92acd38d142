"""The process that runs one session. Its launcher starts this file by its path, which is fast."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dask_cml.local import engines, extensions, state
    from dask_cml.local.processes import MemoryWatch

#: Seconds for which a session runs that an injected fault ends.
_MOMENT = 0.1
#: Seconds between two looks at what may end the session.
_INTERVAL = 0.1
#: Seconds between two checks whether a waiting session has room.
_ROOM_INTERVAL = 0.5
#: Seconds between two looks at which processes the session has, and at its scratch space.
_SEARCH_INTERVAL, _SCRATCH_INTERVAL = 0.5, 1.0
#: Seconds of pause after a look of one second, at least: looks take a thirtieth of a CPU at most.
_PAUSE = 30.0


class Supervisor:
    """Takes a session from ``scheduling`` to its end.

    Parameters
    ----------
    folder : pathlib.Path
        The session's folder. This process holds its lock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.session: dict[str, Any] = state.read_json(folder / "session.json")
        self.child: subprocess.Popen[bytes] | None = None
        self.memory: MemoryWatch | None = None
        self.scratch_is_full = False
        #: Why the session fails, and whether its main process gets SIGTERM first.
        self.reason: str | None = None
        self.notice = True
        signal.signal(signal.SIGTERM, lambda *_: state.request_end(folder.name))
        # The shell that started this process ignores these signals, and the session would inherit that.
        for signum in (signal.SIGINT, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_DFL)

    def out_of_memory(self) -> bool:
        """Return whether all processes must be killed, because of the memory that they took together."""
        if self.child is None or self.memory is None or not self.memory.look():
            return False
        return self.session["over_memory"] == "session" or self.child.poll() == -signal.SIGKILL

    def find_end(self) -> str | None:
        """Return the session's last status if it has ended or must end."""
        exit_status = self.child.poll() if self.child else None
        if request := state.read_json(self.folder / "end.json"):
            self.reason, self.notice = request["reason"], request["notice"]
            return str(request["how"])
        if engines.has_ended(self.session["owner"]):
            return "stopped"
        if self.out_of_memory():
            self.reason, self.notice = state.OUT_OF_MEMORY, False
        elif self.scratch_is_full:
            self.reason = state.SCRATCH_FULL
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
        deadline = float("inf") if seconds is None else time.monotonic() + seconds
        while not (end := self.find_end()):
            if (left := deadline - time.monotonic()) <= 0:
                return None
            time.sleep(min(left, _INTERVAL))
        return end

    def write(self, status: str, **more: Any) -> None:
        """Publish the session's status."""
        self.session.update(status=status, **more)
        state.write_json(self.folder / "session.json", self.session)

    def run(self) -> None:
        """Run the session, from its start to its end."""
        try:
            end = self.live()
        except Exception:
            traceback.print_exc()
            end = "failed"
        try:
            self.clean_up()
        except Exception:
            traceback.print_exc()
        self.write(end, finished_at=time.time(), reason=self.reason)

    def live(self) -> str:
        """Run the session, and return its last status."""
        fate, delay = self.session["fate"], self.session["start_delay"]
        self.write("scheduling", supervisor=os.getpid())
        while self.session["waits"] and not self.admitted():
            if end := self.wait(_ROOM_INTERVAL):
                return end
        if end := self.wait(None if fate in ("refused", "stuck") else delay / 2):
            return end
        self.write("starting")
        if end := self.wait(delay / 2):
            return end
        if fate is None:
            self.start()
        self.write("running", running_at=time.time())
        if fate in ("fails", "succeeds"):
            return self.wait(_MOMENT) or {"fails": "failed", "succeeds": "succeeded"}[fate]
        return self.wait(self.session["lifetime"]) or "timedout"

    def admitted(self) -> bool:
        """Admit a waiting session if there is room and it is the first. Return whether it was admitted."""
        from dask_cml.local import launching  # imports more than a session needs that does not wait

        with state.locked():
            room = launching.has_room(self.folder.name)
            if room:
                self.write("scheduling", waits=False)
            return room

    def start(self) -> None:
        """Start the session's program within its limits."""
        (self.folder / "tmp").mkdir(mode=0o700)
        entry = [word for enter in self._hooks("enter") for word in enter(self.session)]
        # The leader of a process group and a POSIX session.
        self.child = subprocess.Popen(
            [*entry, *self.session["command"]],
            stdin=subprocess.DEVNULL,
            env=self.session["env"],
            cwd=self.session["directory"],
            start_new_session=True,
        )
        self.memory = next((memory(self.session) for memory in self._hooks("memory")), None)
        if self.memory is None and self.session["over_memory"] != "nothing":
            from dask_cml.local.processes import MemoryWatch  # imports psutil, which takes long

            self.memory = MemoryWatch(self.session, self.child.pid)
            _repeat(self.memory.search, _SEARCH_INTERVAL)
        if self.session["scratch"]:
            _repeat(self.look_at_scratch, _SCRATCH_INTERVAL)

    def look_at_scratch(self) -> None:
        """Find out whether the scratch space is full."""
        self.scratch_is_full = gibibytes(self.folder / "tmp") > self.session["scratch"]

    def _hooks(self, name: str) -> list[Callable[..., Any]]:
        return extensions.hooks(self.session["extensions"], name)

    def clean_up(self) -> None:
        """End all processes of the session by SIGKILL: after a notice to the main one, or at once."""
        if self.child and self.notice:
            self.child.terminate()
            deadline = time.monotonic() + self.session["stop_grace"]
            while self.child.poll() is None and not self.out_of_memory() and time.monotonic() < deadline:
                time.sleep(_INTERVAL)
        state.free(self.session, self.child.pid if self.child else None)


def _repeat(look: Callable[[], object], interval: float) -> None:
    """Call a function in a thread every `interval` seconds."""

    def run() -> None:
        while True:
            begin = time.monotonic()
            look()
            time.sleep(max(interval, _PAUSE * (time.monotonic() - begin)))

    threading.Thread(target=run, daemon=True).start()


def gibibytes(folder: Path) -> float:
    """Return the size of a folder on the disk."""
    # Files may disappear meanwhile, and the folder, too.
    du = subprocess.run(["du", "-sk", folder], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return int((du.stdout.split() or [b"0"])[0]) / 2**20


def _import_siblings() -> None:
    """Import this package's modules without the packages' own ``__init__``, which would take far longer."""
    here = Path(__file__).resolve().parent
    sys.path.pop(0)
    for name, path in (("dask_cml", here.parent), ("dask_cml.local", here)):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    global engines, extensions, state
    from dask_cml.local import engines, extensions, state


if __name__ == "__main__":
    _import_siblings()
    Supervisor(Path(sys.argv[1])).run()
