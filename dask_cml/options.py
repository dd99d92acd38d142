"""The options of a cluster: read from arguments and Dask's configuration, and checked before any launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import dask.config
from distributed.security import Security

from dask_cml import checks, configuration
from dask_cml.described import NEVER, UNATTENDED_IDLE_TIMEOUT

#: Arguments that the cluster passes itself: worker_args and scheduler_args must not contain them.
_OWN_WORKER_ARGS = {
    "--death-timeout": "scheduler_timeout",
    "--memory-limit": "memory",
    "--name": "name",
    "--nthreads": "nthreads",
    "--nworkers": "processes",
    "--protocol": "security",
    "--resources": "resources",
    "--scheduler-file": None,
    "--tls-ca-file": "security",
    "--tls-cert": "security",
    "--tls-key": "security",
    "--worker-class": "worker_class",
}
_OWN_SCHEDULER_ARGS = {
    "--dashboard-address": None,
    "--host": None,
    "--idle-timeout": "idle_timeout",
    "--port": None,
    "--protocol": "security",
    "--scheduler-file": None,
    "--tls-ca-file": "security",
    "--tls-cert": "security",
    "--tls-key": "security",
}
#: Parameters of launch_workers that the cluster passes itself, each with its option.
_OWN_LAUNCH_OPTIONS = {
    "code": None,
    "cpu": "cpu",
    "env": "env",
    "memory": "memory",
    "n": "n_workers",
    "name": "name",
    "nvidia_gpu": "nvidia_gpu",
    "script": None,
}
_OWN_SCHEDULER_LAUNCH_OPTIONS = {
    **_OWN_LAUNCH_OPTIONS,
    **{name: f"scheduler_{name}" for name in ("cpu", "memory", "nvidia_gpu")},
    "n": None,
}
CREATE_MODES = ("create", "connect", "create-or-connect")


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


def _option(
    check: Callable[..., Any],
    needs: tuple[str, ...] = (),
    recorded: bool = True,
    shown: bool = True,
    grouped: bool = False,
    derived: bool = False,
    **constants: Any,
) -> Any:
    """Declare an option.

    Parameters
    ----------
    check : callable
        The check of the option. Gets the option's name and value, the options in `needs` and `constants`.
    needs : tuple of str
        The options that the check needs.
    recorded : bool
        Whether the cluster's record contains the option, so that other managers know it.
    shown : bool
        Whether ``repr`` shows the option. False if it may contain secrets.
    grouped : bool
        Whether a worker group can have its own value.
    derived : bool
        Whether the default follows from the options in `needs`.
    """
    metadata = {
        "check": partial(check, **constants),
        "needs": needs,
        "recorded": recorded,
        "grouped": grouped,
        "derived": derived,
    }
    return field(repr=shown, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """A cluster's options, checked. Times are in seconds, memory is in GiB.

    Each option is an argument of ``CMLCluster`` and a key of ``cml.yaml``.
    """

    n_workers: int = _option(checks.integer, least=0)
    cpu: float = _option(checks.positive, grouped=True)
    memory: float = _option(checks.gibibytes, grouped=True)
    nvidia_gpu: int = _option(checks.integer, grouped=True, least=0)
    worker_command: tuple[str, ...] = _option(
        checks.worker_command, needs=("nvidia_gpu",), shown=False, grouped=True
    )
    processes: int = _option(
        checks.processes, needs=("nvidia_gpu", "worker_command"), grouped=True, derived=True
    )
    nthreads: int = _option(checks.threads, needs=("cpu", "processes"), grouped=True, derived=True)
    resources: Mapping[str, float] = _option(
        checks.resources, needs=("nvidia_gpu",), grouped=True, derived=True
    )
    worker_class: str | None = _option(checks.text_or_none, grouped=True)
    worker_args: tuple[str, ...] = _option(
        checks.command_line, shown=False, grouped=True, own=_OWN_WORKER_ARGS
    )
    launch_options: Mapping[str, Any] = _option(
        checks.launch_parameters, shown=False, grouped=True, own=_OWN_LAUNCH_OPTIONS
    )
    scheduler_cpu: float = _option(checks.positive)
    scheduler_memory: float = _option(checks.gibibytes)
    scheduler_nvidia_gpu: int = _option(checks.integer, least=0)
    scheduler_args: tuple[str, ...] = _option(checks.command_line, shown=False, own=_OWN_SCHEDULER_ARGS)
    scheduler_launch_options: Mapping[str, Any] = _option(
        checks.launch_parameters, shown=False, own=_OWN_SCHEDULER_LAUNCH_OPTIONS
    )
    env: Mapping[str, str] = _option(checks.environment, shown=False, grouped=True)
    worker_groups: Mapping[str, Mapping[str, Any]] = _option(
        checks.worker_groups, shown=False, recorded=False
    )
    log_directory: str | None = _option(checks.folder_or_none)
    create_mode: str = _option(checks.choice, choices=CREATE_MODES, recorded=False)
    name: str = _option(checks.cluster_name, needs=("create_mode",), recorded=False)
    security: bool | Security = _option(checks.security, recorded=False)  # noqa: RUF009
    pending_timeout: float = _option(checks.seconds)
    scheduler_timeout: float = _option(checks.seconds)
    worker_timeout: float = _option(checks.seconds)
    idle_timeout: float | None = _option(checks.seconds_or_none)
    orphan_timeout: float | None = _option(checks.seconds_or_none)
    shutdown_on_close: bool = _option(checks.boolean, recorded=False)
    forward_dashboard: bool = _option(checks.boolean, recorded=False)
    platform: str = _option(checks.choice, choices=("auto", "local"))

    @property
    def worker(self) -> SessionSize:
        """The size of a worker session."""
        return SessionSize(self.cpu, self.memory, self.nvidia_gpu)

    @property
    def scheduler(self) -> SessionSize:
        """The size of the scheduler's session."""
        return SessionSize(self.scheduler_cpu, self.scheduler_memory, self.scheduler_nvidia_gpu)

    @classmethod
    def read(cls, **arguments: Any) -> Options:
        """Check the arguments. Take arguments that are None from Dask's configuration.

        Raises
        ------
        TypeError, ValueError
            If an option is invalid, or a key below ``cml`` is unknown. The message contains the argument, its
            value and what is expected. For the configuration, it contains the key and its origin.
        """
        configuration.check_keys()
        values: dict[str, Any] = {}
        for option in fields(cls):
            check = option.metadata["check"]
            needed = {name: values[name] for name in option.metadata["needs"]}
            given = arguments.get(option.name)
            if given is None:
                values[option.name] = setting(option.name.replace("_", "-"), check, **needed)
            else:
                values[option.name] = check(option.name, given, **needed)
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
        values: dict[str, Any] = {"n_workers": 0}
        for option in fields(self):
            if option.name not in GROUP_OPTIONS:
                continue
            name, check = option.name, option.metadata["check"]
            own = getattr(self, name)
            needed = {each: values[each] for each in option.metadata["needs"]}
            changed = any(values[each] != getattr(self, each) for each in needed)
            if given.get(name) is not None:
                values[name] = check(name, given[name], **needed)
            elif changed:
                values[name] = check(name, None if option.metadata["derived"] else own, **needed)
            elif name != "n_workers":
                values[name] = own
        return replace(self, **{**values, "env": {**self.env, **values["env"]}})

    def group_arguments(self) -> dict[str, Any]:
        """Return arguments from which :meth:`of_group` restores this group's options, for JSON."""
        arguments = self.arguments()
        return {name: arguments[name] for name in GROUP_OPTIONS if name != "n_workers"}

    def of_running(self, recorded: Mapping[str, Any], shutdown_on_close: bool) -> Options:
        """Return the options of a running cluster, with this manager's own values of unrecorded options."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if not each.metadata["recorded"]}
        return Options.read(**{**recorded, **own, "shutdown_on_close": shutdown_on_close})

    def differing(self, given: Mapping[str, Any], recorded: Mapping[str, Any]) -> list[str]:
        """Return the names of the given options whose values differ from those of a running cluster."""
        values = self.arguments()
        names = [name for name in values if given.get(name) is not None and name in recorded]
        return [
            name
            for name in names
            if values[name] != recorded[name]
            # The sessions' variables include the configuration, which may have changed.
            and not (name == "env" and given[name].items() <= recorded[name].items())
        ]

    def inheriting(self) -> Options:
        """Return these options for new sessions, with this process's Dask configuration in `env`."""
        return replace(self, env={**configuration.inherited(state_directory()), **self.env})

    def arguments(self) -> dict[str, Any]:
        """Return arguments from which :meth:`read` restores these options, for JSON."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.metadata["recorded"]}
        return {
            name: [*value]
            if isinstance(value, tuple)
            else dict(value)
            if isinstance(value, Mapping)
            else value
            for name, value in values.items()
        }


#: The names of all options. Each is an argument of CMLCluster.
OPTION_NAMES = tuple(option.name for option in fields(Options))
#: The names of the options that a worker group can set.
GROUP_OPTIONS = ("n_workers", *(option.name for option in fields(Options) if option.metadata["grouped"]))


def setting(name: str, check: Callable[..., Any], *rest: Any, **needed: Any) -> Any:
    """Read an option from Dask's configuration, and check it.

    Parameters
    ----------
    name : str
        The key below ``cml``.
    check : callable
        The check, such as `checks.integer` or `checks.seconds`. Gets the key, the value, `rest` and `needed`.

    Raises
    ------
    TypeError, ValueError
        If the value is invalid. The message contains the key, the value, what is expected and the origin.
    """
    key = f"cml.{name}"
    value = dask.config.get(key)
    try:
        return check(key, value, *rest, **needed)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}, in {configuration.origin(key)}") from None


def state_directory() -> Path:
    """Return the folder for the records of all clusters (``cml.state-directory``).

    Raises
    ------
    TypeError, ValueError
        If the value is not the path of a folder.
    """
    return Path(setting("state-directory", checks.folder))


@contextmanager
def unattended(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of an unattended cluster, which shuts down after an idle time by default.

    Parameters
    ----------
    arguments : mapping
        Arguments of the cluster. An ``idle_timeout`` of ``"never"`` disables the default.

    Yields
    ------
    dict
        The arguments of ``CMLCluster``, which must be called in this context.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    config: dict[str, Any] = {}
    if given.get("idle_timeout") == NEVER:
        del given["idle_timeout"]
        config["cml.idle-timeout"] = None
    elif dask.config.get("cml.idle-timeout") is None:
        given.setdefault("idle_timeout", UNATTENDED_IDLE_TIMEOUT)
    with dask.config.set(config):
        yield given
