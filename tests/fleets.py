"""What a manager knows of its cluster's workers, and what the scheduler wants, without either process."""

from __future__ import annotations

from types import SimpleNamespace

from dask_cml.manager.fleet import Fleet
from dask_cml.options import Options
from dask_cml.scheduler.wanted import Wanted


def dask_worker(name):
    """What the scheduler says of a Dask worker."""
    return {"name": name, "nthreads": 1, "memory_limit": 0}


class Cluster:
    """A fleet, and the state of its scheduler.

    Parameters
    ----------
    n : int
        Number of sessions of the default group.
    processes : int
        Number of Dask workers of each.
    **groups
        The other groups, as in the scheduler's state.
    """

    def __init__(self, n=0, processes=1, **groups):
        self.fleet = Fleet(Options.read(name="mine", processes=processes, nthreads=processes), "m1")
        self.wanted = Wanted("mine", "m1", {"default": {"target": n}, **groups})
        self.connected = {}
        self.gone = []
        self.answer()

    def answer(self):
        """Take the scheduler's answer, as the manager does."""
        answer = self.wanted.since(self.fleet.revision)
        workers = {address: dask_worker(name) for address, name in self.connected.items()}
        workers |= dict.fromkeys(self.gone)
        self.gone = []
        self.fleet.update({**answer, "workers": workers, "tasks_done": 7, "managers": 2})
        return answer

    def carry_out(self):
        """Let the scheduler carry out all wishes, and answer."""
        for wish in self.fleet.wishes:
            self.wanted.apply("m1", wish)
            self.fleet.answered([wish["wish"]])
        self.answer()

    def connect(self, *names):
        """Connect Dask workers."""
        for name in names:
            self.connected[f"tcp://{name}"] = name
            self.wanted.connected(name)
        self.answer()

    def disconnect(self, *names):
        """Lose Dask workers."""
        self.gone = [f"tcp://{name}" for name in names]
        for address in self.gone:
            del self.connected[address]
        self.answer()

    def launch(self, *names):
        """Attach sessions that this manager has launched, and say so."""
        for name in names:
            worker = SimpleNamespace(waits_for=None, session_id=f"session of {name}", launched_at=None)
            self.fleet.attach(name, worker)
        self.wanted.launched("m1", names)
        self.answer()

    def want(self, op, *arguments, **more):
        """Let the scheduler carry out an operation of another manager, and answer."""
        getattr(self.wanted, op)("m2", *arguments, **more)
        self.answer()
