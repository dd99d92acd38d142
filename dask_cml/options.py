"""The options of a cluster, read from arguments and Dask's configuration, and checked before any launch."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta
from distributed.security import Security

_DEFAULTS = Path(__file__).with_name("cml.yaml")
dask.config.update_defaults(yaml.safe_load(_DEFAULTS.read_text()))

#: What the cluster itself says to the programs, so that worker_args and scheduler_args must not.
_OWN_WORKER_ARGS = {
    "--death-timeout": "scheduler_timeout",
    "--memory-limit": "memory",
    "--name": "name",
    "--nthreads": "nthreads",
    "--nworkers": "processes",
    "--protocol": "security",
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
#: A file's name has 255 at most, and that of a session's log begins with the cluster's.
_NAME_BYTES = 200
#: Parameters of launch_workers that have an option of their own here, or none.
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


@dataclass(frozen=True)
class SessionSize:
    """What one session gets: virtual CPUs, memory in GiB, and GPUs."""

    cpu: float
    memory: float
    nvidia_gpu: int = 0


@dataclass(frozen=True)
class Options:
    """A cluster's options, checked. Times are in seconds, memory in GiB."""

    n_workers: int
    worker: SessionSize
    nthreads: int
    processes: int
    worker_class: str | None
    worker_args: tuple[str, ...]
    scheduler: SessionSize
    scheduler_args: tuple[str, ...]
    env: Mapping[str, str]
    launch_options: Mapping[str, Any]
    log_directory: str | None
    name: str
    security: bool | Security
    scheduler_timeout: float
    worker_timeout: float
    idle_timeout: float | None
    orphan_timeout: float | None
    shutdown_on_close: bool
    forward_dashboard: bool
    platform: str

    @classmethod
    def read(cls, **arguments: Any) -> Options:
        """Check the arguments; those that are None are taken from Dask's configuration.

        Raises
        ------
        TypeError, ValueError
            With the argument, its value and what is allowed.
        """

        def get(argument: str, check: Callable[..., Any], *rest: Any) -> Any:
            key = f"cml.{argument.replace('_', '-')}"
            value = dask.config.get(key, override_with=arguments.get(argument))
            return check(argument, value, *rest)

        processes = get("processes", integer, 1)
        worker = SessionSize(get("cpu", positive), get("memory", gibibytes), get("nvidia_gpu", integer, 0))
        return cls(
            n_workers=get("n_workers", integer, 0),
            worker=worker,
            nthreads=get("nthreads", _nthreads, worker.cpu, processes),
            processes=processes,
            worker_class=get("worker_class", _text_or_none),
            worker_args=get("worker_args", _command_line, _OWN_WORKER_ARGS),
            scheduler=SessionSize(get("scheduler_cpu", positive), get("scheduler_memory", gibibytes)),
            scheduler_args=get("scheduler_args", _command_line, _OWN_SCHEDULER_ARGS),
            env=get("env", _environment),
            launch_options=get("launch_options", _launch_options),
            log_directory=get("log_directory", _folder_or_none),
            name=get("name", _name),
            security=get("security", _security),
            scheduler_timeout=get("scheduler_timeout", seconds),
            worker_timeout=get("worker_timeout", seconds),
            idle_timeout=get("idle_timeout", _seconds_or_none),
            orphan_timeout=get("orphan_timeout", _seconds_or_none),
            forward_dashboard=get("forward_dashboard", _boolean),
            shutdown_on_close=get("shutdown_on_close", _boolean),
            platform=get("platform", _choice, ("auto", "local")),
        )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that make these options again, as JSON can hold them."""
        same = ("nthreads", "processes", "worker_class", "log_directory", "platform", "n_workers")
        times = ("scheduler_timeout", "worker_timeout", "idle_timeout", "orphan_timeout")
        return {
            **{name: getattr(self, name) for name in same + times},
            **asdict(self.worker),
            "scheduler_cpu": self.scheduler.cpu,
            "scheduler_memory": self.scheduler.memory,
            "worker_args": [*self.worker_args],
            "scheduler_args": [*self.scheduler_args],
            "env": dict(self.env),
            "launch_options": dict(self.launch_options),
        }


def setting(name: str, check: Callable[..., Any], *rest: Any) -> Any:
    """Read and check what is set by Dask's configuration alone.

    Parameters
    ----------
    name : str
        The key below ``cml``.
    check : callable
        Such as `integer` or `seconds`; gets the key, the value, and `rest`.

    Raises
    ------
    TypeError, ValueError
        With the key, its value and what is allowed.
    """
    key = f"cml.{name}"
    return check(key, dask.config.get(key), *rest)


def state_directory() -> Path:
    """Return the folder that the sessions of a project share (``cml.state-directory``).

    Raises
    ------
    TypeError, ValueError
        If it cannot be the path of a folder.
    """
    return Path(setting("state-directory", _folder))


def integer(argument: str, value: Any, least: int) -> int:
    """Check a whole number.

    Raises
    ------
    TypeError, ValueError
        With the argument, its value and what is allowed.
    """
    allowed = f"a whole number of at least {least}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_message(argument, value, allowed))
    number = float(value)
    if not number.is_integer() or number < least:
        raise ValueError(_message(argument, value, allowed))
    return int(number)


def _message(argument: str, value: Any, allowed: str) -> str:
    return f"{argument}={value!r} is not allowed; give {allowed}"


def positive(argument: str, value: Any, allowed: str = "a number above 0") -> float:
    """Check a number above 0.

    Raises
    ------
    TypeError, ValueError
        With the argument, its value and what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(_message(argument, value, allowed))
    return _above_0(argument, value, float(value), allowed)


def _above_0(argument: str, value: Any, number: float, allowed: str) -> float:
    """Check the number that a value stands for."""
    if not 0 < number < math.inf:
        raise ValueError(_message(argument, value, allowed))
    return float(number)


def gibibytes(argument: str, value: Any) -> float:
    """Check an amount of memory, and return it in GiB.

    Raises
    ------
    TypeError, ValueError
        With the argument, its value and what is allowed.
    """
    allowed = 'GiB as a number above 0, or a string such as "16 GiB"'
    if not isinstance(value, str):
        return positive(argument, value, allowed)
    try:
        number = _gibibytes(value)
    except (ValueError, OverflowError):
        raise ValueError(_message(argument, value, allowed)) from None
    return _above_0(argument, value, number, allowed)


def _gibibytes(text: str) -> float:
    # Dask takes text without a unit for bytes, and a unit without a number for 1 of it.
    if not any(map(str.isdigit, text)):
        raise ValueError("it has no number")
    try:
        return float(text)
    except ValueError:
        return parse_bytes(text) / 2**30


def seconds(argument: str, value: Any) -> float:
    """Check a span of time, and return it in seconds.

    Raises
    ------
    TypeError, ValueError
        With the argument, its value and what is allowed.
    """
    allowed = 'seconds as a number above 0, or a string such as "90s"'
    try:
        return _above_0(argument, value, parse_timedelta(value), allowed)
    except (TypeError, AttributeError):
        raise TypeError(_message(argument, value, allowed)) from None
    except (ValueError, LookupError, OverflowError):
        raise ValueError(_message(argument, value, allowed)) from None


def _nthreads(argument: str, value: Any, cpu: float, processes: int) -> int:
    if value is None:
        return max(1, int(cpu) // processes) * processes
    value = integer(argument, value, 1)
    if value % processes:
        allowed = f"a multiple of processes={processes}, which share them evenly"
        raise ValueError(_message(argument, value, allowed))
    return value


def _plain(text: str) -> str:
    """Return text that is no subclass of str: the ``repr`` of such means nothing in a session."""
    return str.__str__(text)


def _text_or_none(argument: str, value: Any) -> str | None:
    allowed = "text, or None"
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise TypeError(_message(argument, value, allowed))
    if "\0" in value:
        raise ValueError(_message(argument, value, f"{allowed}, without zero bytes"))
    return _plain(value)


def _folder(argument: str, value: Any, allowed: str = "the path of a folder") -> str:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError(_message(argument, value, allowed))
    if not path or "\0" in path:
        raise ValueError(_message(argument, value, allowed))
    return os.path.abspath(os.path.expanduser(_plain(path)))


def _folder_or_none(argument: str, value: Any) -> str | None:
    return None if value is None else _folder(argument, value, "the path of a folder, or None")


def _command_line(argument: str, value: Any, own: Mapping[str, str | None]) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(_message(argument, value, 'a list of strings, such as ["--option", "3"]'))
    for part in value:
        if not isinstance(part, str):
            raise TypeError(_message(argument, value, f"strings only, {part!r} is none"))
        if "\0" in part:
            raise ValueError(_message(argument, value, f"strings without zero bytes, {part!r} has one"))
        option = part.split("=")[0]
        if option in own:
            instead = f"use the argument {own[option]}" if own[option] else "the cluster sets it"
            raise ValueError(_message(argument, value, f"it without {option}: {instead}"))
    return tuple(map(_plain, value))


def _environment(argument: str, value: Any) -> dict[str, str]:
    allowed = "a mapping of names to strings"
    if not isinstance(value, Mapping):
        raise TypeError(_message(argument, value, allowed))
    for name, content in value.items():
        if not isinstance(name, str) or not isinstance(content, str):
            raise TypeError(_message(argument, value, f"{allowed}; {name!r}: {content!r} is none"))
        if not name or "=" in name or "\0" in name + content:
            raise ValueError(_message(argument, value, f"{allowed}; {name!r} cannot be a name"))
    return {_plain(name): _plain(content) for name, content in value.items()}


def _launch_options(argument: str, value: Any) -> dict[str, Any]:
    allowed = "a mapping of more parameters of launch_workers"
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(_message(argument, value, allowed))
    for name in value:
        if name in _OWN_LAUNCH_OPTIONS:
            own = _OWN_LAUNCH_OPTIONS[name]
            instead = f"use the argument {own}" if own else "the cluster sets it"
            raise ValueError(_message(argument, value, f"it without {name!r}: {instead}"))
    try:  # what the cluster's record has of them is what is launched, here and by other managers
        return json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(_message(argument, value, f"{allowed} that JSON can hold: {error}")) from None


def _name(argument: str, value: Any) -> str:
    if value is None:
        return f"cml-{secrets.token_hex(4)}"
    allowed = (
        f"1 to 100 printable characters of {_NAME_BYTES} bytes at most, without '/', "
        "not beginning with '.' or '-'"
    )
    if not isinstance(value, str):
        raise TypeError(_message(argument, value, allowed))
    if not 1 <= len(value) <= 100 or value[0] in ".-" or "/" in value or not value.isprintable():
        raise ValueError(_message(argument, value, allowed))
    if len(value.encode()) > _NAME_BYTES:
        raise ValueError(_message(argument, value, allowed))
    return _plain(value)


def _security(argument: str, value: Any) -> bool | Security:
    if not isinstance(value, (bool, Security)):
        raise TypeError(_message(argument, value, "True, False or a distributed Security"))
    return value


def _seconds_or_none(argument: str, value: Any) -> float | None:
    return None if value is None else seconds(argument, value)


def _boolean(argument: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(_message(argument, value, "True or False"))
    return value


def _choice(argument: str, value: Any, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ValueError(_message(argument, value, f"one of {', '.join(map(repr, choices))}"))
    return _plain(value)
