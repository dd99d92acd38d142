"""The options of a cluster: read from arguments and Dask's configuration, and checked before any launch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

from dask_cml.checks import gibibytes, integer, memory_reserve, message, positive
from dask_cml.inheritance import program_folder
from dask_cml.layout import PROGRAM_FOLDER
from dask_cml.options.configuration import check_keys, inherited
from dask_cml.options.configuration import setting as setting
from dask_cml.options.configuration import state_directory as state_directory
from dask_cml.options.table import ARGUMENTS, GROUP_OPTIONS, MOST_SESSIONS, OPTIONS

if TYPE_CHECKING:
    from distributed.security import Security

#: What a user asks for: a number of sessions, their total memory, and their total number of threads.
Amounts = tuple[float | None, float | str | None, float | None]


def exact(number: float) -> str:
    """Return a number as text, with all its digits.

    Examples
    --------
    >>> exact(4.0), exact(1 / 3)
    ('4', '0.3333333333333333')
    """
    return repr(float(number)).removesuffix(".0")


@dataclass(frozen=True)
class SessionSize:
    """The size of one session: virtual CPUs, memory in GiB, and number of GPUs."""

    cpu: float
    memory: float
    nvidia_gpu: int = 0


@dataclass(frozen=True, repr=False)
class Options:
    """A cluster's options, checked. Times are in seconds, memory is in GiB.

    They are the arguments of ``CMLCluster``, as the code uses them. :mod:`dask_cml.options.table` contains
    everything else about them.
    """

    n_workers: int
    cpu: float
    memory: float
    nvidia_gpu: int
    nthreads: int
    processes: int
    resources: Mapping[str, float]
    memory_reserve: float
    scratch: float
    worker_command: tuple[str, ...]
    worker_class: str | None
    worker_args: tuple[str, ...]
    launch_options: Mapping[str, Any]
    worker_groups: Mapping[str, Mapping[str, Any]]
    scheduler_cpu: float
    scheduler_memory: float
    scheduler_nvidia_gpu: int
    scheduler_args: tuple[str, ...]
    scheduler_launch_options: Mapping[str, Any]
    env: Mapping[str, str]
    log_directory: str | None
    name: str
    create_mode: str
    security: bool | Security
    pending_timeout: float
    scheduler_timeout: float
    worker_timeout: float
    idle_timeout: float | None
    orphan_timeout: float | None
    shutdown_on_close: bool
    forward_dashboard: bool
    platform: str

    def __repr__(self) -> str:
        names = [name for name, argument in ARGUMENTS.items() if not argument.is_secret]
        shown = [f"{name}={getattr(self, name)!r}" for name in names]
        return f"Options({', '.join(shown)})"

    @property
    def worker(self) -> SessionSize:
        """The size of a worker session."""
        return SessionSize(self.cpu, self.memory, self.nvidia_gpu)

    @property
    def worker_memory(self) -> float:
        """The memory of a worker session for its Dask workers, in GiB."""
        return self.memory - self.memory_reserve

    @property
    def per_session(self) -> dict[str, Any]:
        """The threads and the memory of a worker session, as SpecCluster finds them in a spec."""
        # SpecCluster._threads_per_worker (spec.py:488) and SpecCluster._memory_per_worker (spec.py:498).
        return {"nthreads": self.nthreads, "memory": f"{self.memory!r} GiB"}

    @property
    def scheduler(self) -> SessionSize:
        """The size of the scheduler's session."""
        return SessionSize(self.scheduler_cpu, self.scheduler_memory, self.scheduler_nvidia_gpu)

    @classmethod
    def read(cls, recorded: Mapping[str, Any] | None = None, **arguments: Any) -> Options:
        """Check the arguments. Take arguments that are None from Dask's configuration.

        Parameters
        ----------
        recorded : mapping, optional
            Options of a running cluster by name, which this process's configuration does not change.
        **arguments
            Arguments of ``CMLCluster``.

        Raises
        ------
        TypeError, ValueError
            If an option is invalid, or a key below ``cml`` is unknown. The message contains the argument, its
            value and what is expected. For the configuration, it contains the key and its origin.
        """
        check_keys()
        given = {name: value for name, value in arguments.items() if value is not None} | dict(recorded or {})
        values: dict[str, Any] = {}
        for name in _CHECKED:
            argument = ARGUMENTS[name]
            if name in given:
                values[name] = argument.checked(name, given[name], values)
            else:
                values[name] = setting(argument.key, values)
        for key, option in OPTIONS.items():  # before the keeper needs them
            if not option.is_argument:
                setting(key)
        options = cls(**values)
        options.groups()
        return options

    def groups(self) -> dict[str, Options]:
        """Return the options of each worker group that the cluster starts with, except the default group.

        Raises
        ------
        TypeError, ValueError
            If an option is invalid.
        """
        groups = {}
        for name, given in self.worker_groups.items():
            try:
                groups[name] = self.of_group(given)
            except (TypeError, ValueError) as error:
                raise type(error)(f"in worker_groups[{name!r}]: {error}") from None
        return groups

    def of_group(self, given: Mapping[str, Any]) -> Options:
        """Return the options of a worker group.

        Parameters
        ----------
        given : mapping
            The group's own options, by name. The group takes those that are missing or None from the cluster.
            It derives options such as threads from its own CPUs. Its `env` adds to the cluster's.

        Raises
        ------
        TypeError, ValueError
            If an option is invalid.
        """
        if unknown := [name for name in given if name not in GROUP_OPTIONS]:
            expected = f"one of {', '.join(GROUP_OPTIONS)}"
            raise ValueError(f"invalid option {unknown[0]} of a worker group: expected {expected}")
        # The reserved memory is a user's number, not the one that follows from the memory.
        has_own_reserve = self.memory_reserve != memory_reserve("memory_reserve", None, self.memory)
        values = {**vars(self), "n_workers": 0}
        for name in _CHECKED:
            argument = ARGUMENTS[name]
            if not argument.is_grouped:
                continue
            if given.get(name) is not None:
                values[name] = argument.checked(name, given[name], values)
            elif any(values[needed] != getattr(self, needed) for needed in argument.needs):
                is_kept = argument.default is not None or (name == "memory_reserve" and has_own_reserve)
                values[name] = argument.checked(name, values[name] if is_kept else None, values)
        return Options(**{**values, "env": {**self.env, **values["env"]}})

    def group_arguments(self) -> dict[str, Any]:
        """Return arguments from which :meth:`of_group` restores this group's options, for JSON."""
        arguments = self.arguments()
        return {name: arguments[name] for name in GROUP_OPTIONS if name != "n_workers"}

    @classmethod
    def of_running(cls, name: str, recorded: Mapping[str, Any], **own: Any) -> Options:
        """Return the options of a running cluster, with this process's own values of unrecorded options."""
        # The worker groups in this process's configuration are for new clusters.
        return cls.read(recorded, name=name, create_mode="create", worker_groups={}, **own)

    def differing(self, given: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
        """Return the names of the given options whose values differ from those of a running cluster."""
        return [
            name
            for name, value in self.arguments().items()
            if given.get(name) is not None
            and value != recorded.get(name, value)
            # The sessions' variables include the configuration, which may have changed.
            and not (name == "env" and given[name].items() <= recorded[name].items())
        ]

    def inheriting(self) -> Options:
        """Return these options for new sessions, with this process's configuration and folder in `env`."""
        folder = program_folder()
        found = {} if folder is None else {PROGRAM_FOLDER: folder}
        return replace(self, env={**found, **inherited(state_directory()), **self.env})

    def arguments(self) -> dict[str, Any]:
        """Return arguments from which :meth:`read` restores these options, as JSON represents them."""
        names = [name for name, argument in ARGUMENTS.items() if argument.is_recorded]
        recorded = {name: getattr(self, name) for name in names}
        return json.loads(json.dumps(recorded))

    def sessions_for(self, n: int, memory: float | str | None = None, cores: float | None = None) -> int:
        """Return the number of sessions that is at least `n`, with at least this memory and these threads.

        Parameters
        ----------
        n : int
            Number of worker sessions.
        memory : float or str, optional
            Total memory of the sessions, in GiB or as a string such as ``"100 GiB"``.
        cores : float, optional
            Total number of threads.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid.
        """
        return math.ceil(max(self._sessions((n, memory, cores))))

    def bounds(self, minimum: Amounts, maximum: Amounts) -> tuple[int, float]:
        """Return the minimum and maximum number of sessions for adaptive scaling.

        Parameters
        ----------
        minimum : tuple
            At least as many sessions, as much memory and as many threads. Each may be None.
        maximum : tuple
            At most as many.

        Raises
        ------
        TypeError, ValueError
            If an argument is invalid.
        """
        least = math.ceil(max(self._sessions(minimum, "minimum"), default=0))
        upper = min(self._sessions(maximum, "maximum"), default=math.inf)
        most = upper if math.isinf(upper) else math.floor(upper)
        if most < least:
            raise ValueError(message("maximum", most, f"at least the minimum, {least} worker sessions"))
        return least, most

    def _sessions(self, amounts: Amounts, limit: str = "") -> Iterator[float]:
        """Yield the number of sessions, with a fraction, for each amount that is given."""
        n, memory, cores = amounts
        if n is not None:
            yield integer(limit or "n", n, 0, MOST_SESSIONS)
        for unit, total, check, of_session in (
            ("cores", cores, positive, self.nthreads),
            ("memory", memory, gibibytes, self.memory),
        ):
            if total is not None:
                argument = f"{limit}_{unit}" if limit else unit
                sessions = check(argument, total) / of_session
                if sessions > MOST_SESSIONS:
                    expected = f"an amount for at most {MOST_SESSIONS} worker sessions"
                    raise ValueError(message(argument, total, expected))
                yield sessions


#: The names of all arguments in the order of their checks: one that another check needs comes before it.
_CHECKED = (
    *TopologicalSorter({name: argument.needs for name, argument in ARGUMENTS.items()}).static_order(),
)
