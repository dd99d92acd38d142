"""The life of one session. A process of its own runs it, from its start to its end."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
import traceback
from pathlib import Path
from typing import Any

from dask_cml.local import quota, state

#: Seconds between two looks at what may end the session.
_INTERVAL = 0.1
#: Seconds between two checks whether a waiting session has room.
_ROOM_INTERVAL = 0.5


class Supervisor:
    """Takes a session from ``scheduling`` to its end.

    Parameters
    ----------
    folder : pathlib.Path
        The session's folder. This process holds its lock.
    """

    #: Seconds from the notice to SIGKILL when the session is stopped.
    stop_grace = 10.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.session: state.Session = state.read_json(folder / "session.json")
        self.child: subprocess.Popen[bytes] | None = None
        # The shell that started this process ignores these signals, and the session would inherit that.
        for signum in (signal.SIGINT, signal.SIGQUIT):
            signal.signal(signum, signal.SIG_DFL)

    def run(self) -> None:
        """Run the session, from its start to its end."""
        try:
            end = self.live()
        except Exception:  # of the session's start: it is written into its log
            traceback.print_exc()
            end = "failed"
        try:
            self.give_notice()
            self.clean_up()
        except Exception:  # of the file system, for example
            traceback.print_exc()
        self.write(end, finished_at=time.time())

    def live(self) -> str:
        """Run the session, and return its last status."""
        self.write("scheduling", supervisor=os.getpid())
        while not self.is_admitted():
            if end := self.wait(_ROOM_INTERVAL):
                return end
        return self.start() or self.wait()

    def is_admitted(self) -> bool:
        """Return whether the session may start: it was not refused, and is not queued."""
        if self.session["waits"]:
            with state.locked():
                if quota.has_room(self.folder.name):
                    self.write("scheduling", waits=False)
        return not (self.session["waits"] or self.session["refused"])

    def start(self) -> str | None:
        """Start the session. Return its last status if it ended meanwhile."""
        self.write("starting")
        (self.folder / "tmp").mkdir(mode=0o700)
        try:
            state.temporary_of(self.folder.name).symlink_to(self.folder / "tmp")
        except OSError:  # nobody may write to /tmp here
            self.session["env"]["TMPDIR"] = str(self.folder / "tmp")
        # The leader of a process group and a POSIX session.
        self.child = subprocess.Popen(
            self.command(),
            stdin=subprocess.DEVNULL,
            env=self.session["env"],
            cwd=self.session["directory"],
            start_new_session=True,
        )
        self.write("running", running_at=time.time())
        return None

    def command(self) -> list[str]:
        """Return the command of the session's main process."""
        return [*self.session["command"]]

    def wait(self, seconds: float = math.inf) -> str:
        """Wait until the session ends or must stop, or for this many seconds.

        Returns
        -------
        str
            Its last status, or "" after the time has passed.
        """
        deadline = time.monotonic() + seconds
        while not (end := self.find_end()):
            if (left := deadline - time.monotonic()) <= 0:
                return ""
            time.sleep(min(left, _INTERVAL))
        return end

    def find_end(self) -> str | None:
        """Return the session's last status if it has ended or must end."""
        if (self.folder / "stop").exists():
            return "stopped"
        if self.child is None or (exit_status := self.child.poll()) is None:
            return None
        return "failed" if exit_status else "succeeded"

    def write(self, status: str, **more: Any) -> None:
        """Publish the session's status."""
        self.session.update(status=status, **more)
        state.write_json(self.folder / "session.json", self.session)

    def give_notice(self) -> None:
        """Tell the main process that the session ends, and let it take its time."""
        if self.child:
            self.child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(self.stop_grace)

    def clean_up(self) -> None:
        """Kill all processes of the session."""
        state.free(self.session, self.child.pid if self.child else None)
