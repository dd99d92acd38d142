"""What simulated processes see of their machine: files, the environment, and other processes."""

import errno
import os
import shutil
from collections.abc import Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

import psutil

from .clock import VirtualLoop
from .process import SimulatedProcess, current

_CHANGES = ("link", "mkdir", "rename", "replace", "rmdir", "symlink", "unlink")


class Files:
    """Stands in for the module ``os``. Its attribute ``shutil`` does so for that module.

    A process that is dead changes nothing. One that is to end after a change ends there. Files that are
    new or replaced are dated by the clock.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        #: Whether all that is opened is answered with ESTALE, as an NFS server does that has a problem.
        self.stale = False
        self.environ: Any = _Environment()
        self._loop = loop
        self.shutil = SimpleNamespace(**{**vars(shutil), "rmtree": self._change(shutil.rmtree)})
        for name in _CHANGES:
            setattr(self, name, self._change(getattr(os, name)))
        self.replace = self._change(self._replace)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        if self.stale and current() is not None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        opening = self._change(os.open) if flags & os.O_CREAT else os.open
        descriptor: int = opening(path, flags, *args, **options)
        if flags & os.O_EXCL:  # it is new
            self.utime(descriptor)
        return descriptor

    def write(self, descriptor: int, content: bytes) -> int:
        written = os.write(descriptor, content)
        self.utime(descriptor)
        return written

    def _replace(self, old: Any, new: Any) -> None:
        self.utime(old)
        os.replace(old, new)

    def utime(self, path: Any) -> None:
        os.utime(path, (self._loop.wall_time(),) * 2)

    def _exit(self, status: int) -> None:
        process = current()
        assert process is not None
        process.kill()
        process.check()

    def _change(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def changing(*args: Any, **options: Any) -> Any:
            process = current()
            if process is None:
                return change(*args, **options)
            process.check()
            try:
                return change(*args, **options)
            finally:
                process.wrote()

        return changing


class _Environment(MutableMapping[str, str]):
    """The environment of the process that asks for it."""

    def _all(self) -> dict[str, str]:
        process = current()
        return {**os.environ, **(process.env if process is not None else {})}

    def __getitem__(self, name: str) -> str:
        return self._all()[name]

    def __setitem__(self, name: str, value: str) -> None:
        process = current()
        assert process is not None
        process.env[name] = value

    def __delitem__(self, name: str) -> None:
        raise NotImplementedError

    def __iter__(self) -> Any:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class ProcessTable:
    """Stands in for the module ``psutil``: its processes are the simulated ones."""

    Error, NoSuchProcess, STATUS_ZOMBIE = psutil.Error, psutil.NoSuchProcess, psutil.STATUS_ZOMBIE

    def __init__(self, processes: list[SimulatedProcess]) -> None:
        self._processes = processes

    def Process(self, pid: int | None = None) -> Any:
        mine = current()
        if pid is None and mine is None:
            return psutil.Process()
        live = (process for process in self._processes if process.pid == pid and process.state != "dead")
        # Who asks for itself may have been killed while a thread of it ran.
        process = mine if pid is None else next(live, None)
        if process is None:
            raise psutil.NoSuchProcess(pid)
        return SimpleNamespace(
            pid=process.pid, create_time=lambda: process.started, status=lambda: psutil.STATUS_SLEEPING
        )
