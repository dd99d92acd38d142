"""Checks of options: each takes an argument's name and value, and returns the value as the code uses it.

Each check raises a TypeError or ValueError with the argument, the value and what is expected. Messages
contain no value that may be secret, such as that of an environment variable.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeGuard

from dask_cml.naming import GROUP_NAME, RESERVED

# Functions import Dask, because the local platform imports this module and must start without Dask.
if TYPE_CHECKING:
    from distributed.security import Security

#: More GiB than any cluster has: a larger number must be meant in bytes.
_MOST_GIB = 100_000
#: A file name has 255 bytes at most, and the name of a session's log begins with the cluster's name.
_NAME_BYTES = 200
_GROUP_LENGTH = 40
_SESSION_ID = re.compile(r"[A-Za-z0-9-]{4,64}")


def is_session_id(value: object) -> TypeGuard[str]:
    """Return whether a value can be a session id. CML's ids have 16 letters and digits."""
    return isinstance(value, str) and _SESSION_ID.fullmatch(value) is not None


# By hand: the messages of a validator such as jsonschema lack what is expected, and may repeat secrets.
def message(argument: str, value: Any, expected: str) -> str:
    """Return the message for an invalid option."""
    return f"invalid {argument}={value!r}: expected {expected}"


def integer(argument: str, value: Any, least: int) -> int:
    """Check an integer."""
    expected = f"a whole number of at least {least}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(message(argument, value, expected))
    number = float(value)
    if not number.is_integer() or number < least:
        raise ValueError(message(argument, value, expected))
    return int(number)


def positive(argument: str, value: Any, expected: str = "a number above 0") -> float:
    """Check a number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(message(argument, value, expected))
    return _above_0(argument, value, float(value), expected)


def _above_0(argument: str, value: Any, number: float, expected: str) -> float:
    """Check that a value's number is above 0 and finite."""
    if not 0 < number < math.inf:
        raise ValueError(message(argument, value, expected))
    return float(number)


def gibibytes(argument: str, value: Any) -> float:
    """Check an amount of memory, and return it in GiB."""
    expected = 'GiB as a number above 0, or a string such as "16 GiB"'
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return _amount(argument, value, expected)
        _above_0(argument, value, number, expected)
    else:
        number = positive(argument, value, expected)
    if number > _MOST_GIB:
        from dask.utils import format_bytes

        raise ValueError(message(argument, value, f'{expected}; did you mean "{format_bytes(int(number))}"?'))
    return number


def _amount(argument: str, text: str, expected: str) -> float:
    from dask.utils import parse_bytes

    # Dask reads a unit without a number as 1 of that unit.
    if not any(map(str.isdigit, text)):
        raise ValueError(message(argument, text, expected))
    try:
        number = parse_bytes(text) / 2**30
    except (ValueError, OverflowError):
        raise ValueError(message(argument, text, expected)) from None
    return _above_0(argument, text, number, expected)


def seconds(argument: str, value: Any) -> float:
    """Check a duration, and return it in seconds."""
    from dask.utils import parse_timedelta

    expected = 'seconds as a number above 0, or a string such as "90s"'
    try:
        return _above_0(argument, value, parse_timedelta(value), expected)
    except (TypeError, AttributeError):
        raise TypeError(message(argument, value, expected)) from None
    except (ValueError, LookupError, OverflowError):
        raise ValueError(message(argument, value, expected)) from None


def seconds_or_none(argument: str, value: Any) -> float | None:
    """Check a duration, or None."""
    return None if value is None else seconds(argument, value)


def runs_one_per_gpu(worker_command: Sequence[str]) -> bool:
    """Return whether a command is dask-cuda's, which starts one Dask worker for each GPU."""
    return [*worker_command[:3]] == ["dask", "cuda", "worker"] or os.path.basename(
        worker_command[0]
    ) == "dask-cuda-worker"


def worker_command(argument: str, value: Any, nvidia_gpu: int) -> tuple[str, ...]:
    """Check the command that starts a session's Dask workers."""
    words = command_line(argument, value, own={})
    if not all(words) or not words:
        raise ValueError(f'invalid {argument}: expected a command, such as ["dask", "cuda", "worker"]')
    if runs_one_per_gpu(words) and not nvidia_gpu:
        raise ValueError(message("nvidia_gpu", nvidia_gpu, f"at least 1 with this {argument}"))
    return words


def processes(argument: str, value: Any, nvidia_gpu: int, worker_command: Sequence[str]) -> int:
    """Check the number of Dask workers in a session. By default 1, or one for each GPU with dask-cuda."""
    per_gpu = runs_one_per_gpu(worker_command)
    if value is None:
        return nvidia_gpu if per_gpu else 1
    value = integer(argument, value, 1)
    if per_gpu and value != nvidia_gpu:
        expected = f"{nvidia_gpu}, one for each GPU with this worker_command"
        raise ValueError(message(argument, value, expected))
    return value


def resources(argument: str, value: Any, nvidia_gpu: int) -> dict[str, float]:
    """Check the resources of a session. By default its GPUs."""
    if value is None:
        return {"GPU": float(nvidia_gpu)} if nvidia_gpu else {}
    expected = 'a mapping of names to numbers above 0, such as {"GPU": 1}'
    if not isinstance(value, Mapping):
        raise TypeError(message(argument, value, expected))
    for name in value:
        if not isinstance(name, str):
            raise TypeError(message(argument, value, expected))
        if not name or re.search(r"[\s,=\0]", name):
            names = "names without spaces, commas and '='"
            raise ValueError(message(argument, value, f"{expected}, with {names}"))
    return {_plain(name): positive(f"{argument}[{name!r}]", amount) for name, amount in value.items()}


def worker_groups(argument: str, value: Any) -> dict[str, dict[str, Any]]:
    """Check a mapping of worker groups. :meth:`Options.groups` checks the options of each group."""
    expected = 'a mapping of names to options, such as {"gpu": {"nvidia_gpu": 1}}'
    if not isinstance(value, Mapping):
        raise TypeError(message(argument, value, expected))
    for name, options in value.items():
        group_name(argument, name)
        if not isinstance(options, Mapping) or not all(isinstance(each, str) for each in options):
            raise TypeError(of_type(f"{argument}[{name!r}]", options, "a mapping of options"))
    return {
        _plain(name): {key.replace("-", "_"): each for key, each in value[name].items()} for name in value
    }


def group_name(argument: str, value: Any) -> str:
    """Check the name of a worker group other than the default group."""
    expected = (
        f"at most {_GROUP_LENGTH} letters and digits, in words that begin with a letter and are joined by '-'"
    )
    if not isinstance(value, str):
        raise TypeError(message(argument, value, expected))
    if not GROUP_NAME.fullmatch(value) or len(value) > _GROUP_LENGTH:
        raise ValueError(message(argument, value, expected))
    if value in RESERVED:
        raise ValueError(message(argument, value, f"a name other than {' and '.join(map(repr, RESERVED))}"))
    return _plain(value)


def threads(argument: str, value: Any, cpu: float, processes: int) -> int:
    """Check the number of threads in a session, which its processes share evenly. By default one per CPU."""
    if value is None:
        return max(1, int(cpu) // processes) * processes
    value = integer(argument, value, 1)
    if value % processes:
        raise ValueError(message(argument, value, f"a multiple of processes={processes}"))
    return value


def _plain(text: str) -> str:
    """Return text as a plain str, because a session cannot evaluate the ``repr`` of a subclass."""
    return str.__str__(text)


def text_or_none(argument: str, value: Any) -> str | None:
    """Check a string, or None."""
    expected = "a string, or None"
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise TypeError(message(argument, value, expected))
    if "\0" in value:
        raise ValueError(message(argument, value, f"{expected}, without null characters"))
    return _plain(value)


def names(argument: str, value: Any) -> tuple[str, ...]:
    """Check a list of names."""
    expected = 'a list of names, such as ["hub.example.com"]'
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(message(argument, value, expected))
    if not all(isinstance(each, str) and each for each in value):
        raise TypeError(message(argument, value, expected))
    return tuple(map(_plain, value))


def folder(argument: str, value: Any, expected: str = "the path of a folder") -> str:
    """Check a folder's path, and return the absolute path. The folder need not exist."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError(message(argument, value, expected))
    if not path or "\0" in path:
        raise ValueError(message(argument, value, expected))
    return os.path.abspath(os.path.expanduser(_plain(path)))


def folder_or_none(argument: str, value: Any) -> str | None:
    """Check a folder's path, or None."""
    return None if value is None else folder(argument, value, "the path of a folder, or None")


def command_line(argument: str, value: Any, own: Mapping[str, str | None]) -> tuple[str, ...]:
    """Check additional arguments of a program. Refuse those in `own`, which maps them to options."""
    strings = 'a list of strings, such as ["--option", "3"]'
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(of_type(argument, value, strings))
    for i, part in enumerate(value):
        if not isinstance(part, str):
            raise TypeError(of_type(f"{argument}[{i}]", part, "a string"))
        if "\0" in part:
            raise ValueError(f"invalid {argument}[{i}]: expected a string without null characters")
        option = part.split("=")[0]
        if option in own:
            raise ValueError(f"invalid {argument}: expected no {option}; {_instead(own[option])}")
    return tuple(map(_plain, value))


def _instead(argument: str | None) -> str:
    return f"use the argument {argument}" if argument else "the cluster sets it"


def of_type(argument: str, value: Any, expected: str) -> str:
    """Return the message for an invalid option that may contain secrets."""
    return f"invalid {argument} of type {type(value).__name__}: expected {expected}"


def environment(argument: str, value: Any) -> dict[str, str]:
    """Check environment variables."""
    if not isinstance(value, Mapping):
        raise TypeError(of_type(argument, value, "a mapping of names to strings"))
    for name, content in value.items():
        if not isinstance(name, str):
            got = repr(name) if isinstance(name, (int, float)) else f"one of type {type(name).__name__}"
            raise TypeError(f"invalid {argument}: expected names that are strings, got {got}")
        if not name or "=" in name or "\0" in name:
            shown = re.sub("=.*", "=…", name, flags=re.DOTALL)  # the value may be secret
            raise ValueError(f"invalid {argument}: expected names of environment variables, got {shown!r}")
        if isinstance(content, (int, float)):
            raise TypeError(message(f"{argument}[{name!r}]", content, f'a string, such as "{content}"'))
        if not isinstance(content, str):
            raise TypeError(of_type(f"{argument}[{name!r}]", content, "a string"))
        if "\0" in content:
            raise ValueError(f"invalid {argument}[{name!r}]: expected a string without null characters")
    return {_plain(name): _plain(content) for name, content in value.items()}


def launch_parameters(argument: str, value: Any, own: Mapping[str, str | None]) -> dict[str, Any]:
    """Check more parameters of ``launch_workers``. Refuse those in `own`, which maps them to options."""
    if not isinstance(value, Mapping):
        raise TypeError(of_type(argument, value, "a mapping of parameters of launch_workers"))
    checked = {}
    for name, content in value.items():
        if not isinstance(name, str):
            raise TypeError(
                f"invalid {argument}: expected names of parameters of launch_workers, got {name!r}"
            )
        if name in own:
            raise ValueError(f"invalid {argument}: expected no {name!r}; {_instead(own[name])}")
        try:  # launch what the record contains, so that all managers launch the same
            checked[_plain(name)] = json.loads(json.dumps(content, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(of_type(f"{argument}[{name!r}]", content, "a value that JSON can represent")) from None
    return checked


def cluster_name(argument: str, value: Any, create_mode: str) -> str:
    """Check a cluster's name. By default a new cluster gets a random name."""
    if value is None and create_mode != "create":
        expected = f"the name of a cluster, which create_mode={create_mode!r} requires"
        raise ValueError(message(argument, value, expected))
    if value is None:
        return f"cml-{secrets.token_hex(4)}"
    expected = (
        f"1 to 100 printable characters of {_NAME_BYTES} bytes at most, without '/', "
        "not beginning with '.' or '-'"
    )
    if not isinstance(value, str):
        raise TypeError(message(argument, value, expected))
    if not 1 <= len(value) <= 100 or value[0] in ".-" or "/" in value or not value.isprintable():
        raise ValueError(message(argument, value, expected))
    if len(value.encode()) > _NAME_BYTES:
        raise ValueError(message(argument, value, expected))
    return _plain(value)


def security(argument: str, value: Any) -> bool | Security:
    """Check whether a cluster has keys, or which."""
    from distributed.security import Security

    if not isinstance(value, (bool, Security)):
        raise TypeError(message(argument, value, "True, False or a distributed.Security"))
    return value


def boolean(argument: str, value: Any) -> bool:
    """Check a boolean."""
    if not isinstance(value, bool):
        raise TypeError(message(argument, value, "True or False"))
    return value


def choice(argument: str, value: Any, choices: Sequence[str]) -> str:
    """Check one of several strings."""
    if value not in choices:
        raise ValueError(message(argument, value, f"one of {', '.join(map(repr, choices))}"))
    return _plain(value)
