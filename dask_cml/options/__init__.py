"""The options of a cluster: read from arguments and Dask's configuration, and checked before any launch."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from dask_cml.checks import gibibytes, integer, memory_reserve, message, nearest, positive
from dask_cml.options.configuration import check_keys, inherited
from dask_cml.options.configuration import setting as setting
from dask_cml.options.configuration import state_directory as state_directory
from dask_cml.options.table import MOST_SESSIONS, OPTIONS

if TYPE_CHECKING:
    from distributed.security import Security

#: What other cluster managers call the limits of adaptive scaling.
_MINIMUM = ("minimum_jobs", "minimum_workers", "min_workers", "n_min")
_MAXIMUM = ("maximum_jobs", "maximum_workers", "max_workers", "n_max")
_SET = "the cluster sets it"
_RUNTIME = "a session runs on the runtime of the session that launches it: choose the runtime there"
_PROJECT = "sessions run in the project of the session that launches them"
#: Arguments of other cluster managers that a cluster does not need, and why.
_NEEDLESS = {
    **dict.fromkeys(("dashboard_address", "host", "interface", "port", "protocol", "scheduler_port"), _SET),
    **dict.fromkeys(("container", "docker_image", "image", "runtime"), _RUNTIME),
    **dict.fromkeys(("conda_env", "python", "virtualenv"), _RUNTIME),
    **dict.fromkeys(("namespace", "project"), _PROJECT),
    "walltime": "a worker session has no time limit: for the cluster, set idle_timeout; for a worker, pass "
    "worker_args=['--lifetime', '1 hour']",
}

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

    Each option is an argument of ``CMLCluster``, and stands below those that its check needs. The table,
    ``cml-schema.yaml``, contains everything else about it.
    """

    n_workers: int
    cpu: float
    memory: float
    nvidia_gpu: int
    memory_reserve: float
    scratch: float
    worker_command: tuple[str, ...]
    processes: int
    nthreads: int
    resources: Mapping[str, float]
    worker_class: str | None
    worker_args: tuple[str, ...]
    launch_options: Mapping[str, Any]
    scheduler_cpu: float
    scheduler_memory: float
    scheduler_nvidia_gpu: int
    scheduler_args: tuple[str, ...]
    scheduler_launch_options: Mapping[str, Any]
    env: Mapping[str, str]
    worker_groups: Mapping[str, Mapping[str, Any]]
    log_directory: str | None
    create_mode: str
    name: str
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
        names = [option.argument for option in ARGUMENTS if not option.secret]
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
        for option in ARGUMENTS:
            name = option.argument
            if name in given:
                values[name] = option.checked(name, given[name], values)
            else:
                values[name] = setting(option.key, values)
        for option in OPTIONS.values():  # before the keeper needs them
            if option not in ARGUMENTS:
                setting(option.key)
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
        values = {**vars(self), "n_workers": 0}
        for option in ARGUMENTS:
            if not option.grouped:
                continue
            name = option.argument
            if given.get(name) is not None:
                values[name] = option.checked(name, given[name], values)
            elif any(values[needed] != getattr(self, needed) for needed in option.needs):
                is_kept = option.default is not None or (name == "memory_reserve" and self._reserves_its_own)
                values[name] = option.checked(name, values[name] if is_kept else None, values)
        return Options(**{**values, "env": {**self.env, **values["env"]}})

    @property
    def _reserves_its_own(self) -> bool:
        """Whether the reserved memory is a user's number, not the one that follows from the memory."""
        return self.memory_reserve != memory_reserve("memory_reserve", None, self.memory)

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
        """Return these options for new sessions, with this process's Dask configuration in `env`."""
        return replace(self, env={**inherited(state_directory()), **self.env})

    def arguments(self) -> dict[str, Any]:
        """Return arguments from which :meth:`read` restores these options, as JSON represents them."""
        names = [option.argument for option in ARGUMENTS if option.recorded]
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


#: The options that are arguments of CMLCluster, each after those that its check needs.
ARGUMENTS = [OPTIONS[field.name.replace("_", "-")] for field in fields(Options)]
#: Their names.
OPTION_NAMES = tuple(option.argument for option in ARGUMENTS)
#: The names of the options that a worker group can set.
GROUP_OPTIONS = tuple(option.argument for option in ARGUMENTS if option.grouped)


# -- unknown arguments


def unexpected_argument(function: str, name: str, arguments: Sequence[str]) -> str:
    """Return the message of the TypeError for an unknown argument.

    Parameters
    ----------
    function : str
        The name of the function or class.
    name : str
        The unknown argument.
    arguments : sequence of str
        The arguments of the function.

    Examples
    --------
    >>> unexpected_argument("CMLCluster", "memory_limit", ["cpu", "memory"])
    "CMLCluster() got an unexpected keyword argument 'memory_limit': expected memory"
    """
    elsewhere = {option.argument: option.elsewhere for option in OPTIONS.values()}
    n = ("n_workers", *elsewhere["n_workers"])
    elsewhere |= {"n": n, "minimum": _MINIMUM, "maximum": _MAXIMUM}
    here = [argument for argument in arguments if name in elsewhere.get(argument, ())]
    if name in _NEEDLESS:
        here = [f"none, because {_NEEDLESS[name]}"]
    expected = " or ".join(here) or nearest(name, arguments)
    return f"{function}() got an unexpected keyword argument {name!r}: expected {expected}"


def refuse_unexpected(function: Callable[..., Any], given: Iterable[str], more: Iterable[str] = ()) -> None:
    """Refuse keyword arguments that a function or class does not have.

    Parameters
    ----------
    function : callable
        The function or class, which collects unknown arguments.
    given : iterable of str
        The arguments that it collected.
    more : iterable of str
        Further arguments that it accepts.

    Raises
    ------
    TypeError
        If an argument is unexpected.
    """
    parameters = inspect.signature(function).parameters.values()
    named = [parameter for parameter in parameters if parameter.kind != parameter.VAR_KEYWORD]
    known = [parameter.name for parameter in named if parameter.name != "self"]
    known += sorted({*more} - {*known})
    for name in given:
        if name not in known:
            raise TypeError(unexpected_argument(function.__name__, name, known))


def arguments_of(cls: type) -> set[str]:
    """Return the arguments of a class and of its base classes, to which it may pass them on."""
    found = set()
    for base in cls.__mro__[:-1]:
        if "__init__" in vars(base):
            for parameter in inspect.signature(vars(base)["__init__"]).parameters.values():
                if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                    found.add(parameter.name)
    return found
