"""Memory cgroups: the kernel limits the memory of a session, as a node limits that of a pod.

The cgroup of a session is below that of its launcher with version 1, and beside it with version 2. So limits
of the cgroups above apply to it, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import time
from pathlib import Path

from dask_cml.local import state

#: The names of sessions' cgroups, see :func:`place`.
_NAME = re.compile(r"cml[0-9a-f]{7}-[a-z0-9]{16}")
#: Files that exist only if the kernel counts swap.
_SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")
_REMOVAL_TIMEOUT = 10.0


@dataclasses.dataclass(frozen=True)
class Cgroup:
    """The cgroup of a session."""

    path: Path

    @property
    def _is_unified(self) -> bool:
        """Whether it is of version 2."""
        return (self.path / "cgroup.controllers").exists()

    def create(self, memory: float, whole: bool) -> None:
        """Create it.

        Parameters
        ----------
        memory : float
            The memory of all processes together, in GiB. They have no swap.
        whole : bool
            Whether the kernel kills all processes when they exceed the limit. With version 1, it kills one,
            and the supervisor kills the others.
        """
        self.path.mkdir()
        limit = int(memory * 2**30)
        if self._is_unified:
            limits = {"memory.max": limit, "memory.swap.max": 0, "memory.oom.group": int(whole)}
        else:
            names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
            limits = {**dict.fromkeys(names, limit), "memory.swappiness": 0}
        for name, value in limits.items():
            if name not in _SWAP or (self.path / name).exists():
                self._write(name, value)

    def join(self) -> None:
        """Move this process into it."""
        self._write("cgroup.procs", os.getpid())

    def oom_kills(self) -> int:
        """Return how many of its processes the kernel killed because memory was exhausted."""
        name = "memory.events" if self._is_unified else "memory.oom_control"
        return int(dict(line.split() for line in self._read(name)).get("oom_kill", 0))

    def remove(self) -> None:
        """Kill its processes at once, and remove it.

        Raises
        ------
        TimeoutError
            If some processes remain.
        """
        deadline = time.monotonic() + _REMOVAL_TIMEOUT
        while self.path.exists():
            for pid in self._read("cgroup.procs"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            with contextlib.suppress(OSError):
                self.path.rmdir()
            if time.monotonic() > deadline:
                raise TimeoutError(f"cgroup {self.path} still has processes after SIGKILL")
            time.sleep(0.005)

    def _read(self, name: str) -> list[str]:
        return (self.path / name).read_text().splitlines()

    def _write(self, name: str, value: object) -> None:
        (self.path / name).write_text(str(value))


def place(session_id: str) -> Path | None:
    """Return the path for a session's cgroup. Return None if this process may not create it."""
    try:
        mount, parent = _find("self")
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
    if not all(os.access(each, os.W_OK) for each in (parent, parent / "cgroup.procs")):
        return None
    return parent / f"{state.short_name()}-{session_id}"


def members(pid: int) -> Path:
    """Return the file that moves a process, whose id is written to it, to the cgroup of another process."""
    return _find(str(pid))[1] / "cgroup.procs"


def _find(pid: str) -> tuple[Path, Path]:
    """Return where memory cgroups are mounted, and that of a process.

    Raises
    ------
    OSError
        If this machine has none.
    """
    paths = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    mount = Path("/sys/fs/cgroup", "memory" if "memory" in paths else "")
    if "memory" not in paths and "memory" not in (mount / "cgroup.controllers").read_text().split():
        raise FileNotFoundError("no memory cgroups are mounted")
    found = Path(f"{mount}{paths.get('memory') or paths['']}")
    return mount, found if found.exists() else mount  # in a container, its own group is the root
