"""The process that runs one session. Its launcher starts this file by its path, which is fast."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dask_cml.local import engines, environment, network, quota, records, state

_RUNNER = Path(__file__).with_name("runner.py")
#: Seconds for which a session runs that an injected fault ends.
_MOMENT = 0.1
#: Seconds between two checks whether the session's owner has ended.
_COLLECT_INTERVAL = 0.5
#: Seconds between two checks whether a waiting session has room.
_ROOM_INTERVAL = 0.5


class Supervisor:
    """Takes a session from ``scheduling`` to its end.

    Parameters
    ----------
    folder : pathlib.Path
        The folder of the session's record. This process holds its lock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: dict[str, Any] = state.read_json(folder / "plan.json")
        self.status: dict[str, Any] = {"supervisor": os.getpid()}
        self.child: subprocess.Popen[bytes] | None = None
        self.terminated = False
        owner = self.plan["owner"]
        self.owner: str | None = owner if environment.ends(owner) else None
        self._listen()

    def _listen(self) -> None:
        """Let signals interrupt :meth:`pause`."""
        self._wake, write = os.pipe()
        for end in (self._wake, write):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
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
        """Wait for a signal, or for this many seconds."""
        ready, _, _ = select.select([self._wake], [], [], seconds)
        if ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)

    def wait(self, seconds: float | None) -> str | None:
        """Wait until the session ends or must stop, or for this many seconds.

        Returns
        -------
        str or None
            Its last status, or None after the time has passed.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self.stopping:
            if self.child and self.child.poll() is not None:
                return "failed" if self.child.returncode else "succeeded"
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            if self.owner is not None:
                left = _COLLECT_INTERVAL if left is None else min(left, _COLLECT_INTERVAL)
            self.pause(left)
        return "stopped"

    def write(self, status: str, **more: float) -> None:
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
        try:
            self.clean_up()
        except Exception:
            traceback.print_exc()
        if end == "stopped":
            time.sleep(self.plan["stopping"])
        self.write(end, finished_at=time.time())

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
        return self.wait(self.plan["lifetime"]) or "timedout"

    def admitted(self) -> bool:
        """Admit a waiting session if there is room and it is the first. Return whether it was admitted."""
        with state.locked():
            room = quota.has_room(self.folder.name)
            if room:
                self.write("scheduling", admitted=True)
            return room

    def start(self) -> None:
        """Start the session's program, as the leader of a process group and a POSIX session."""
        if script := self.plan["script"]:
            command = [script]
        else:
            command = [str(_RUNNER), str(self.folder / "plan.json")]
        where = network.inside(self.plan["network"]) if self.plan["network"] else []
        self.child = subprocess.Popen(
            [*where, self.plan["python"], "-u", *command],
            stdin=subprocess.DEVNULL,
            env=self.plan["env"],
            cwd=self.plan["directory"],
            start_new_session=True,
        )

    def clean_up(self) -> None:
        """End all processes of the session: by SIGTERM, and after the grace period by SIGKILL."""
        group = None
        if self.child:
            group = self.child.pid
            if self.child.returncode is None:
                self._end_group(group)
        records.free(self.plan, group)

    def _end_group(self, group: int) -> None:
        assert self.child
        deadline = time.monotonic() + self.plan["stop_grace"]
        # On macOS, a group of zombies raises a PermissionError.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGTERM)
            while time.monotonic() < deadline:
                self.child.poll()
                os.killpg(group, 0)
                time.sleep(0.02)


def _import_siblings() -> None:
    """Import this package's modules without the packages' own ``__init__``, which would take far longer."""
    here = Path(__file__).resolve().parent
    sys.path.pop(0)
    for name, path in (("dask_cml", here.parent), ("dask_cml.local", here)):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    global engines, environment, network, quota, records, state
    from dask_cml.local import engines, environment, network, quota, records, state


if __name__ == "__main__":
    _import_siblings()
    Supervisor(Path(sys.argv[1])).run()
