"""Checks of options: each takes an argument's name and value, and returns the value as the code uses it.

Each raises a TypeError or ValueError that names the argument, the value and what is expected. What may hold a
secret, such as an environment variable's value, is never in a message.
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

# Dask is imported where it is needed, because the local platform imports this and starts without Dask.
if TYPE_CHECKING:
    from distributed.security import Security

#: No session and no cluster has so many GiB: who gives more gives bytes.
_MOST_GIB = 100_000
#: A file's name has 255 at most, and that of a session's log begins with the cluster's.
_NAME_BYTES = 200
_GROUP_LENGTH = 40
_SESSION_ID = re.compile(r"[A-Za-z0-9-]{4,64}")


def is_session_id(value: object) -> TypeGuard[str]:
    """Return whether this can be the id of a session. The platform's have 16 letters and digits."""
    return isinstance(value, str) and _SESSION_ID.fullmatch(value) is not None


def message(argument: str, value: Any, expected: str) -> str:
    """Return the words in which every option is refused."""
    return f"invalid {argument}={value!r}: expected {expected}"


def integer(argument: str, value: Any, least: int) -> int:
    """Check a whole number."""
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
    """Check the number that a value stands for."""
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

    # Dask takes a unit without a number for 1 of it.
    if not any(map(str.isdigit, text)):
        raise ValueError(message(argument, text, expected))
    try:
        number = parse_bytes(text) / 2**30
    except (ValueError, OverflowError):
        raise ValueError(message(argument, text, expected)) from None
    return _above_0(argument, text, number, expected)


def seconds(argument: str, value: Any) -> float:
    """Check a span of time, and return it in seconds."""
    from dask.utils import parse_timedelta

    expected = 'seconds as a number above 0, or a string such as "90s"'
    try:
        return _above_0(argument, value, parse_timedelta(value), expected)
    except (TypeError, AttributeError):
        raise TypeError(message(argument, value, expected)) from None
    except (ValueError, LookupError, OverflowError):
        raise ValueError(message(argument, value, expected)) from None


def seconds_or_none(argument: str, value: Any) -> float | None:
    """Check a span of time, or None."""
    return None if value is None else seconds(argument, value)


def runs_one_per_gpu(worker_command: Sequence[str]) -> bool:
    """Return whether a command is that of dask-cuda, which starts a Dask worker for each GPU."""
    return [*worker_command[:3]] == ["dask", "cuda", "worker"] or os.path.basename(
        worker_command[0]
    ) == "dask-cuda-worker"


def worker_command(argument: str, value: Any, nvidia_gpu: int) -> tuple[str, ...]:
    """Check the command that runs a session's Dask workers."""
    words = command_line(argument, value, own={})
    if not all(words) or not words:
        raise ValueError(f'invalid {argument}: expected a command, such as ["dask", "cuda", "worker"]')
    if runs_one_per_gpu(words) and not nvidia_gpu:
        raise ValueError(message("nvidia_gpu", nvidia_gpu, f"at least 1 with this {argument}"))
    return words


def processes(argument: str, value: Any, nvidia_gpu: int, worker_command: Sequence[str]) -> int:
    """Check the Dask workers in a session: by default one, or as many as the command starts."""
    per_gpu = runs_one_per_gpu(worker_command)
    if value is None:
        return nvidia_gpu if per_gpu else 1
    value = integer(argument, value, 1)
    if per_gpu and value != nvidia_gpu:
        expected = f"{nvidia_gpu}, one for each GPU with this worker_command"
        raise ValueError(message(argument, value, expected))
    return value


def resources(argument: str, value: Any, nvidia_gpu: int) -> dict[str, float]:
    """Check what a session's workers offer to tasks, by default their GPUs."""
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
    """Check a mapping of worker groups; what each asks for is checked with the cluster's options."""
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
    """Check the name of a worker group that is not the default one."""
    expected = (
        f"words of at most {_GROUP_LENGTH} letters and digits in all that begin with a letter, joined by '-'"
    )
    if not isinstance(value, str):
        raise TypeError(message(argument, value, expected))
    if not GROUP_NAME.fullmatch(value) or len(value) > _GROUP_LENGTH:
        raise ValueError(message(argument, value, expected))
    if value in RESERVED:
        raise ValueError(message(argument, value, f"a name other than {' and '.join(map(repr, RESERVED))}"))
    return _plain(value)


def threads(argument: str, value: Any, cpu: float, processes: int) -> int:
    """Check the threads of a session, by default as many as its CPUs, which its processes share evenly."""
    if value is None:
        return max(1, int(cpu) // processes) * processes
    value = integer(argument, value, 1)
    if value % processes:
        raise ValueError(message(argument, value, f"a multiple of processes={processes}"))
    return value


def _plain(text: str) -> str:
    """Return text that is no subclass of str: the ``repr`` of such means nothing in a session."""
    return str.__str__(text)


def text_or_none(argument: str, value: Any) -> str | None:
    """Check text, or None."""
    expected = "text, or None"
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise TypeError(message(argument, value, expected))
    if "\0" in value:
        raise ValueError(message(argument, value, f"{expected}, without zero bytes"))
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
    """Check a folder's path, and return it absolute; the folder need not exist."""
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
    """Check more arguments of a program; ``own`` are the cluster's, each with the argument to use instead."""
    strings = 'a list of strings, such as ["--option", "3"]'
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(of_type(argument, value, strings))
    for i, part in enumerate(value):
        if not isinstance(part, str):
            raise TypeError(of_type(f"{argument}[{i}]", part, "a string"))
        if "\0" in part:
            raise ValueError(f"invalid {argument}[{i}]: expected a string without zero bytes")
        option = part.split("=")[0]
        if option in own:
            raise ValueError(f"invalid {argument}: expected no {option}; {_instead(own[option])}")
    return tuple(map(_plain, value))


def _instead(argument: str | None) -> str:
    return f"use the argument {argument}" if argument else "the cluster sets it"


def of_type(argument: str, value: Any, expected: str) -> str:
    """Return the message for what may hold secrets."""
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
            shown = re.sub("=.*", "=…", name, flags=re.DOTALL)  # the value, it seems
            raise ValueError(f"invalid {argument}: expected names of environment variables, got {shown!r}")
        if isinstance(content, (int, float)):
            raise TypeError(message(f"{argument}[{name!r}]", content, f'a string, such as "{content}"'))
        if not isinstance(content, str):
            raise TypeError(of_type(f"{argument}[{name!r}]", content, "a string"))
        if "\0" in content:
            raise ValueError(f"invalid {argument}[{name!r}]: expected a string without zero bytes")
    return {_plain(name): _plain(content) for name, content in value.items()}


def launch_parameters(argument: str, value: Any, own: Mapping[str, str | None]) -> dict[str, Any]:
    """Check more parameters of ``launch_workers``; ``own`` are the cluster's, as in `command_line`."""
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
        try:  # what the cluster's record has of it is what is launched, here and by other managers
            checked[_plain(name)] = json.loads(json.dumps(content, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(of_type(f"{argument}[{name!r}]", content, "what JSON can hold")) from None
    return checked


def cluster_name(argument: str, value: Any, create_mode: str) -> str:
    """Check a cluster's name; by default a new cluster has a random one."""
    if value is None and create_mode != "create":
        expected = f"the name of a cluster, because create_mode={create_mode!r} looks for it"
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
    """Check what says whether a cluster has keys."""
    from distributed.security import Security

    if not isinstance(value, (bool, Security)):
        raise TypeError(message(argument, value, "True, False or a distributed.Security"))
    return value


def boolean(argument: str, value: Any) -> bool:
    """Check True or False."""
    if not isinstance(value, bool):
        raise TypeError(message(argument, value, "True or False"))
    return value


def choice(argument: str, value: Any, choices: Sequence[str]) -> str:
    """Check one of several words."""
    if value not in choices:
        raise ValueError(message(argument, value, f"one of {', '.join(map(repr, choices))}"))
    return _plain(value)
