"""Memory cgroups: the kernel limits the memory of a session exactly, as a node limits that of a pod.

The cgroup of a session is next to that of its launcher. Limits of the cgroups above apply, too.
"""

import contextlib
import os
import re
import signal
import time
from pathlib import Path

#: The names of sessions' cgroups, see :func:`place`.
_NAME = re.compile("cml-[a-z0-9]{16}")
#: Files that exist only if the kernel counts swap.
_SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")
_REMOVAL_TIMEOUT = 10.0


class Cgroup:
    """The cgroup of a session, whose processes die together when they exceed the limit if it is `whole`."""

    def __init__(self, session_id: str, whole: bool) -> None:
        path = place(session_id)
        assert path is not None, "this user may not create memory cgroups"
        self.path, self.whole = path, whole

    @property
    def _is_unified(self) -> bool:
        """Whether it is of version 2."""
        return (self.path / "cgroup.controllers").exists()

    def enter(self, memory: float) -> list[str]:
        """Create it, with so many GiB of memory and no swap, and return the words that run commands there."""
        # The session that launched this one may end before it, with all processes in its cgroup.
        if _NAME.fullmatch(_find()[1].name):
            (self.path.parent / "cgroup.procs").write_text(str(os.getpid()))
        self.path.mkdir()
        limit = int(memory * 2**30)
        if self._is_unified:
            limits = {"memory.max": limit, "memory.swap.max": 0, "memory.oom.group": int(self.whole)}
        else:
            names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
            limits = {**dict.fromkeys(names, limit), "memory.swappiness": 0}
        for name, value in limits.items():
            if name not in _SWAP or (self.path / name).exists():
                (self.path / name).write_text(str(value))
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs")]

    @property
    def oom_kills(self) -> int:
        """How many of its processes the kernel killed because memory was exhausted."""
        name = "memory.events" if self._is_unified else "memory.oom_control"
        return int(dict(line.split() for line in self._read(name)).get("oom_kill", 0))

    def look(self) -> bool:
        """Return whether the processes have exceeded the limit. With version 1, the kernel kills only one."""
        exceeded = self.oom_kills > 0
        if exceeded and self.whole:
            self._kill()  # the others must not have time to notice
        return exceeded

    def remove(self) -> None:
        """Remove it, when the session's processes have ended. Supervisors that may be left leave it."""
        deadline = time.monotonic() + _REMOVAL_TIMEOUT
        while self.path.exists():
            with contextlib.suppress(OSError):
                for pid in self._read("cgroup.procs"):
                    (self.path.parent / "cgroup.procs").write_text(pid)
                self.path.rmdir()
            if time.monotonic() > deadline:
                raise TimeoutError(f"cgroup {self.path} still has processes")
            time.sleep(0.005)

    def _kill(self) -> None:
        mine = f"CDSW_ENGINE_ID={self.path.name.removeprefix('cml-')}".encode()
        for pid in self._read("cgroup.procs"):
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                if mine in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(int(pid), signal.SIGKILL)

    def _read(self, name: str) -> list[str]:
        return (self.path / name).read_text().splitlines()


def place(session_id: str) -> Path | None:
    """Return the path for a session's cgroup. Return None if this process may not create it."""
    try:
        mount, parent = _find()
        if _NAME.fullmatch(parent.name):
            parent = parent.parent
        # With version 2, a cgroup has limits only if its parent passes the controller on.
        passed_on = "cgroup.subtree_control"
        while (parent / passed_on).exists() and "memory" not in (parent / passed_on).read_text().split():
            if parent == mount:
                return None
            parent = parent.parent
    except OSError:
        return None
    if not all(os.access(path, os.W_OK) for path in (parent, parent / "cgroup.procs")):
        return None
    return parent / f"cml-{session_id}"


def _find() -> tuple[Path, Path]:
    """Return where memory cgroups are mounted, and that of this process."""
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    mount = Path("/sys/fs/cgroup", "memory" if "memory" in paths else "")
    if "memory" not in paths and "memory" not in (mount / "cgroup.controllers").read_text().split():
        raise FileNotFoundError("no memory cgroups are mounted")
    found = Path(f"{mount}{paths.get('memory') or paths['']}")
    return mount, found if found.exists() else mount  # in a container, its own group is the root
