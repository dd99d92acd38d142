"""The options of a cluster: read from arguments and Dask's configuration, and checked before any launch.

The limits of a site, ``cml.limits``, are guard rails against costly mistakes, and no walls: each process
reads them from its own configuration, so users can raise them. CML's quotas are walls.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from graphlib import TopologicalSorter
from typing import Any

from dask_cml.checks import gibibytes, integer, memory_reserve, message, nearest, positive
from dask_cml.layout import PROGRAM_FOLDER, program_folder
from dask_cml.options.configuration import check_keys, inherited, origin
from dask_cml.options.configuration import setting as setting
from dask_cml.options.configuration import state_directory as state_directory
from dask_cml.options.table import ARGUMENTS, GROUP_OPTIONS, METHODS, MOST_SESSIONS, NEEDLESS, OPTIONS

#: What a user asks for: a number of sessions, their total memory, and their total number of threads.
Amounts = tuple[float | None, float | str | None, float | None]


_SECTION = "limits."
#: What a limit of a cluster's size limits: an amount of each session, or the number of sessions.
_AMOUNTS = {"sessions": None, "cpu": "cpu", "memory": "memory", "gpu": "nvidia_gpu"}
#: Amounts such as 0.3 / 0.1 are a little less than whole numbers.
_TOLERANCE = 1e-9


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


class Options(make_dataclass("Arguments", ARGUMENTS, frozen=True)):  # type: ignore[misc]
    """A cluster's options, checked. Times are in seconds, memory is in GiB.

    They are the arguments of ``CMLCluster``, as the code uses them, an attribute for each.
    :mod:`dask_cml.options.table` contains everything else about them.
    """

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
                where = f"invalid worker_groups[{name!r}]."
                raise type(error)(str(error).replace("invalid ", where, 1)) from None
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
            raise ValueError(f"invalid {unknown[0]}: expected {_instead(unknown[0], GROUP_OPTIONS)}")
        # The reserved memory is a user's number, not the one that follows from the memory. With that one, the
        # memory may not suffice for the cluster's processes.
        default = memory_reserve("memory_reserve", None, self.memory, processes=1)
        has_own_reserve = self.memory_reserve != default
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
        recorded = {name: getattr(self, name) for name, argument in ARGUMENTS.items() if argument.is_recorded}
        return json.loads(json.dumps(recorded))

    def sessions_for(self, n: Any, memory: Any = None, cores: Any = None) -> int:
        """Return the number of sessions that is at least `n`, with at least this memory and these threads.

        Parameters
        ----------
        n : int or None
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
        if n is None and memory is None and cores is None:
            raise TypeError(message("n", n, "a number of worker sessions, or else memory or cores"))
        return math.ceil(max(self.sessions((n, memory, cores)))[0])

    def sessions(self, amounts: Amounts, limit: str = "") -> Iterator[tuple[float, str]]:
        """Yield the number of sessions, with a fraction, for each argument that is given, and its text."""
        n, memory, cores = amounts
        if n is not None:
            yield integer(limit or "n", n, 0, MOST_SESSIONS), f"{limit}={n!r}"
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
                yield sessions, f"{argument}={total!r}"


#: The names of all arguments in the order of their checks: one that another check needs comes before it.
_CHECKED = (
    *TopologicalSorter({name: argument.needs for name, argument in ARGUMENTS.items()}).static_order(),
)


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
    return f"{function}() got an unexpected keyword argument {name!r}: expected {_instead(name, arguments)}"


def _instead(name: str, arguments: Sequence[str]) -> str:
    """Return what is expected instead of an unknown argument."""
    elsewhere = {argument.name: argument.elsewhere for argument in ARGUMENTS.values()}
    n = ["n", "n_workers", *elsewhere["n_workers"]]
    elsewhere |= {"n": n} | {argument: [*names, *n] for argument, names in METHODS.items()}
    here = [argument for argument in arguments if name in elsewhere.get(argument, ())]
    if name in NEEDLESS:
        here = [f"none, because {NEEDLESS[name]}"]
    configured = [key for key, option in OPTIONS.items() if option.name == name and not option.is_argument]
    here += [f"cml.{key} in Dask's configuration" for key in configured]
    return " or ".join(here) or nearest(name, arguments)


def refuse_unexpected(function: Callable[..., Any], given: Iterable[str], more: Iterable[str] = ()) -> None:
    """Refuse keyword arguments that a function or class does not have.

    Parameters
    ----------
    function : callable
        The function or class, which collects unknown arguments as `kwargs`.
    given : iterable of str
        The arguments that it collected.
    more : iterable of str
        Further arguments that it accepts.

    Raises
    ------
    TypeError
        If an argument is unexpected.
    """
    known = [name for name in inspect.signature(function).parameters if name not in ("self", "kwargs")]
    known += sorted({*more} - {*known})
    for name in given:
        if name not in known:
            called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
            raise TypeError(unexpected_argument(called, name, known))


def set_attribute(cluster: Any, name: str, value: Any) -> None:
    """Set an attribute of a cluster, but no option: this would change no session of a running cluster."""
    # A subclass of a user may have attributes of these names.
    if name in GROUP_OPTIONS and hasattr(cluster, "status") and cluster.__module__ == "dask_cml.cluster":
        raise AttributeError(f"cannot set {name} of a running cluster: add a worker group with another one")
    object.__setattr__(cluster, name, value)


def arguments_of(cls: type) -> set[str]:
    """Return the arguments of a class and of its base classes, to which it may pass them on."""
    return {name for base in cls.__mro__[:-1] for name in inspect.signature(base).parameters} - {"kwargs"}


#: Sizes of sessions, each with the number of sessions.
Sessions = Sequence[tuple[SessionSize, int]]


def limits() -> dict[str, float]:
    """Return the limits that are set, by name.

    Raises
    ------
    TypeError, ValueError
        If a limit is invalid. The message contains its origin.
    """
    found = {key.removeprefix(_SECTION): setting(key) for key in OPTIONS if key.startswith(_SECTION)}
    return {name: limit for name, limit in found.items() if limit is not None}


def describe(name: str) -> str:
    """Return a limit as a clause: its key, its value and its origin."""
    key = f"cml.{_SECTION}{name}"
    return f"{key} is {exact(limits()[name])}, in {origin(key)}"


def room(size: SessionSize, others: Sessions) -> tuple[float, str]:
    """Return how many sessions of a size fit into the limits together with others, and the name of the limit.

    Parameters
    ----------
    size : SessionSize
        The size of each session.
    others : sequence
        All other sessions of the cluster.

    Returns
    -------
    tuple
        An infinite number and no name without a limit.
    """
    found: tuple[float, str] = (math.inf, "")
    for name, limit in limits().items():
        if name in _AMOUNTS and (amount := _amount(name, size)):
            left = limit - sum(n * _amount(name, other) for other, n in others)
            found = min(found, (max(0, math.floor(left / amount + _TOLERANCE)), name))
    return found


def _amount(name: str, size: SessionSize) -> float:
    return getattr(size, attribute) if (attribute := _AMOUNTS[name]) else 1


def check_room(argument: str, n: int, size: SessionSize, others: Sessions) -> None:
    """Refuse more sessions than fit into the limits.

    Parameters
    ----------
    argument : str
        The name of the argument that asks for them.
    n : int
        Number of sessions.
    size, others
        As in :func:`room`.

    Raises
    ------
    ValueError
        If the sessions do not fit. The message contains the limit and its origin.
    """
    fit, name = room(size, others)
    if n > fit:
        raise ValueError(message(argument, n, f"at most {fit}, because {describe(name)}"))


def check_new(options: Options) -> None:
    """Refuse a new cluster that exceeds the limits: its scheduler, with the first workers of all groups.

    Raises
    ------
    ValueError
        As in :func:`check_room`.
    """
    fit, name = room(options.scheduler, ())
    if not fit:
        argument = f"scheduler_{_AMOUNTS[name]}"
        raise ValueError(message(argument, getattr(options, argument), f"less, because {describe(name)}"))
    sessions = [(options.scheduler, 1)]
    for group, of_group in {"": options, **options.groups()}.items():
        where = f"worker_groups[{group!r}]." if group else ""
        check_room(f"{where}n_workers", of_group.n_workers, of_group.worker, sessions)
        sessions.append((of_group.worker, of_group.n_workers))


def adaptive_bounds(
    options: Options, minimum: Amounts, maximum: Amounts, others: Sessions
) -> tuple[int, float]:
    """Return the bounds of a group's adaptive scaling. Without a maximum, take the limit of the site.

    Parameters
    ----------
    options : Options
        The options of the group.
    minimum : tuple
        At least as many sessions, as much memory and as many threads. Each may be None.
    maximum : tuple
        At most as many.
    others : sequence
        All other sessions of the cluster, the scheduler first.

    Raises
    ------
    TypeError, ValueError
        If a bound is invalid, or the minimum exceeds a limit.
    """
    lower, lowest = max(options.sessions(minimum, "minimum"), default=(0.0, ""))
    upper, highest = min(options.sessions(maximum, "maximum"), default=(math.inf, ""))
    least, most = math.ceil(lower), upper if math.isinf(upper) else math.floor(upper)
    if most < least:
        raise ValueError(f"invalid {highest}: expected at least {least} worker sessions, with {lowest}")
    check_room("minimum", least, options.worker, others)
    if math.isinf(most):
        # At least one, so that adaptive scaling logs the limit if no session fits.
        most = max(1, room(options.worker, others[:1])[0])
    return least, most
