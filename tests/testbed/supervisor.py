"""The life of a session that starts slowly, has a fault, exceeds its limits, or is evicted."""

import math
import signal
import subprocess
import threading
import time
from pathlib import Path

from dask_cml.local import state, supervisor

from . import networks
from .cgroups import Cgroup

#: Why the platform let a session fail. CML is not known to say this.
OUT_OF_MEMORY, SCRATCH_FULL, EVICTED = "out of memory", "scratch full", "evicted"
#: How sessions with these faults end, and seconds for which they run.
_ENDS = {"fails": "failed", "succeeds": "succeeded"}
_MOMENT = 0.1
#: Seconds between two looks at the scratch space.
_SCRATCH_INTERVAL = 1.0


class Supervisor(supervisor.Supervisor):
    """Runs a session as its fate and the settings of its launch say."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stop_grace = self.session["stop_grace"]
        self.notice = True
        self.scratch_is_full = False
        limited = self.session["memory_limit"]
        self.cgroup = Cgroup(folder.name, self.session["over_memory"] == "session") if limited else None

    def start(self) -> str | None:
        fate, delay = self.session["fate"], self.session["start_delay"]
        if end := self.wait(math.inf if fate == "stuck" else delay / 2):
            return end
        self.write("starting")
        if end := self.wait(delay / 2):
            return end
        if fate is None:
            super().start()
            if self.session["scratch"]:
                threading.Thread(target=self.watch_scratch, daemon=True).start()
            return None
        self.write("running", running_at=time.time())
        return None if fate == "hangs" else self.wait(_MOMENT) or _ENDS[fate]

    def command(self) -> list[str]:
        words = self.cgroup.enter(self.session["memory"]) if self.cgroup else []
        if self.session["networks"]:
            words += networks.enter(self.session)
        return [*words, *super().command()]

    def find_end(self) -> str | None:
        self.session["reason"] = self.find_reason()
        if self.session["reason"]:
            return "failed"
        return super().find_end()

    def find_reason(self) -> str | None:
        if eviction := state.read_json(self.folder / "evict.json"):
            self.notice = eviction["notice"]
            return EVICTED
        if self.is_out_of_memory():
            self.notice = False
            return OUT_OF_MEMORY
        return SCRATCH_FULL if self.scratch_is_full else None

    def is_out_of_memory(self) -> bool:
        """Return whether the session ends because of the memory that its processes took together."""
        if self.child is None or self.cgroup is None or not self.cgroup.look():
            return False
        return self.cgroup.whole or self.child.poll() == -signal.SIGKILL

    def watch_scratch(self) -> None:
        while not self.scratch_is_full:
            # Files may disappear meanwhile, and the folder, too.
            du = subprocess.run(["du", "-sk", self.folder / "tmp"], capture_output=True, check=False)
            self.scratch_is_full = 1024 * int((du.stdout.split() or [b"0"])[0]) > self.session["scratch"]
            time.sleep(_SCRATCH_INTERVAL)

    def give_notice(self) -> None:
        if self.notice:
            super().give_notice()

    def clean_up(self) -> None:
        super().clean_up()
        if self.cgroup:
            self.cgroup.remove()
        if self.session["networks"]:
            networks.remove(self.session)
