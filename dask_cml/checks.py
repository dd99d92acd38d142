"""Checks of values: each takes an argument's name and value, and returns the value as the code uses it.

Each check raises a TypeError or ValueError with the argument, the value and what is expected. Messages
contain no value that may be secret, such as that of an environment variable. :func:`validate` checks data of
other processes.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from dask_cml.layout import OWN_LOG, SCHEDULER
from dask_cml.naming import GROUP_NAME, RESERVED

# Functions import Dask and msgspec: the local platform and workers import this module, and do without them.
if TYPE_CHECKING:
    from distributed.security import Security

T = TypeVar("T")

#: What a value must not contain, by the reason.
Refused = Mapping[str, Sequence[str]]

#: The word for None, where None stands for the configured value.
NEVER = "never"
#: More GiB than any cluster has: a larger number must be meant in bytes.
_MOST_GIB = 100_000
#: More than any amount or time. Records refuse what is far larger.
_MOST = 10**9
#: The GiB that a Dask worker takes without a task. With less, its nanny would restart it again and again.
_LEAST_OF_A_WORKER = 0.125
_CLUSTER_NAME = re.compile(r"[^./-][^/]{0,99}")
#: A file name has 255 bytes at most, and the name of a session's log begins with the cluster's name.
_NAME_BYTES = 200
_GROUP_LENGTH = 40
#: The options of Dask's programs after which other words may follow.
_PRELOADS = ("--preload", "--preload-nanny")
_LONGEST_ERROR = 200
#: Two threads that both are the first to read a type would crash the interpreter (msgspec 0.22).
_reading = threading.RLock()
_NAMES = 'a list of names, such as ["a", "b"]'
SESSION_ID = re.compile(r"[A-Za-z0-9-]{4,64}")
#: Without quotes and brackets of HTML, because Dask's templates do not escape links, and not too long.
WEB_LINK = re.compile(r"https?://[A-Za-z0-9._~:/?#@!$&()*+,;=%\[\]-]{1,1990}")


def is_session_id(value: object) -> TypeGuard[str]:
    """Return whether a value can be a session id. CML's ids have 16 letters and digits."""
    return isinstance(value, str) and SESSION_ID.fullmatch(value) is not None


def web_link(url: object) -> str | None:
    """Return a URL if it is a link for a browser, with http or https. Else return None.

    Examples
    --------
    >>> web_link("javascript:alert(1)")
    """
    return url if isinstance(url, str) and WEB_LINK.fullmatch(url) else None


# By hand: the messages of a validator such as jsonschema lack what is expected, and may repeat secrets.
def message(argument: str, value: Any, expected: str) -> str:
    """Return the message for an invalid value."""
    return f"invalid {argument}={value!r}: expected {expected}"


def of_type(argument: str, value: Any, expected: str) -> str:
    """Return the message for an invalid value that may contain secrets."""
    return f"invalid {argument} of type {type(value).__name__}: expected {expected}"


def nearest(name: str, names: Sequence[str]) -> str:
    """Return what is expected instead of an unknown name."""
    near = difflib.get_close_matches(name, names, n=1)
    return near[0] if near else f"one of {', '.join(names)}"


def _typed(argument: str, value: Any, kind: Any, expected: str, message: Callable = message) -> Any:
    """Return a value of a type."""
    if not isinstance(value, kind):
        raise TypeError(message(argument, value, expected))
    return value


def _valid(argument: str, value: Any, valid: object, expected: str) -> Any:
    """Return a value that is valid."""
    if not valid:
        raise ValueError(message(argument, value, expected))
    return value


# -- numbers


def _number(argument: str, value: Any, expected: str, read: Callable[[Any], Any]) -> float:
    """Read a number from a value."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(read(value))
    except (TypeError, AttributeError):
        raise TypeError(message(argument, value, expected)) from None
    except (ValueError, LookupError, OverflowError):
        raise ValueError(message(argument, value, expected)) from None


def _above_0(argument: str, value: Any, expected: str, read: Callable[[Any], Any]) -> float:
    """Read a number above 0 from a value."""
    number = _number(argument, value, expected, read)
    _valid(argument, value, number > 0, expected)
    _valid(argument, value, number <= _MOST, f"{expected}; at most {_MOST}")
    return number


def _real(value: Any) -> float:
    if not isinstance(value, Real):
        raise TypeError
    return float(value)


def integer(argument: str, value: Any, least: int, most: float = math.inf) -> int:
    """Check an integer."""
    expected = f"a whole number {f'from {least} to {most}' if most < math.inf else f'of at least {least}'}"
    number = _number(argument, value, expected, _real)
    _valid(argument, value, number.is_integer() and least <= number <= most, expected)
    _valid(argument, value, number <= _MOST, f"{expected}; at most {_MOST}")
    return int(number)


def positive(argument: str, value: Any) -> float:
    """Check a number above 0."""
    return _above_0(argument, value, "a number above 0", _real)


def gibibytes(argument: str, value: Any, most: float = _MOST_GIB, least: float = 0.0) -> float:
    """Check an amount of memory or disk, and return it in GiB. A number above `most` needs a unit."""
    expected = 'GiB as a number above 0, or a string such as "16 GiB"'
    number = _above_0(argument, value, expected, _gib)
    if isinstance(value, float):  # a record has the GiB of a string as a float
        most = _MOST_GIB
    has_unit = str(value).rstrip()[-1].isalpha()
    _valid(argument, value, number <= most or has_unit, f"{expected}; above {most}, with a unit")
    _valid(argument, value, number >= least, f"{expected}; at least {least:g} GiB")
    return number


def _gib(value: Any) -> float:
    if not isinstance(value, str):
        return _real(value)
    try:
        return float(value)
    except ValueError:
        from dask.utils import parse_bytes

        # Dask reads a unit without a number as 1 of that unit.
        if not any(map(str.isdigit, value)):
            raise
        return parse_bytes(value) / 2**30


def memory_reserve(argument: str, value: Any, memory: float, processes: int) -> float:
    """Check the memory that Dask workers leave to other processes, in GiB. Its default depends on it."""
    # On the local platform, a session's kernel takes about 14 MB, and the workers' nanny about 65 MB.
    default = min(0.25 + 0.02 * memory, memory / 2)
    reserve = default if value is None else gibibytes_or_none(argument, value)
    n, most = int((memory - reserve) / _LEAST_OF_A_WORKER), memory - _LEAST_OF_A_WORKER
    _valid(argument, reserve, n > 0, f"at most {most:g} GiB, with memory={memory:g} GiB")
    _valid("processes", processes, processes <= n, f"at most {n}, with memory={memory:g} GiB")
    return reserve


def gibibytes_or_none(argument: str, value: Any, most: float = _MOST_GIB) -> float:
    """Check an amount of disk, and return it in GiB. Return 0 for ``"none"``."""
    if value in (None, "none", 0) and value is not False:
        return 0.0
    return gibibytes(argument, value, most)


def seconds(argument: str, value: Any, expected: str = 'or a string such as "90s"') -> float:
    """Check a duration, and return it in seconds."""
    from dask.utils import parse_timedelta

    # Dask does not know "min", which this package prints.
    value = re.sub(r"(?<=[\d\s])min\s*$", "minutes", value) if isinstance(value, str) else value
    return _above_0(argument, value, f"seconds as a number above 0, {expected}", parse_timedelta)


def seconds_or_none(argument: str, value: Any) -> float | None:
    """Check a duration, or None, or its word."""
    if value is None or value == NEVER:
        return None
    return seconds(argument, value, f'a string such as "90s", or "{NEVER}"')


def threads(argument: str, value: Any, least: int, cpu: float, processes: int) -> int:
    """Check the number of threads in a session, which its processes share evenly. By default one per CPU."""
    if value is None:
        return max(1, int(cpu) // processes) * processes
    value = integer(argument, value, least)
    expected = f"a multiple of processes={processes}, by default one for each GPU"
    return _valid(argument, value, value % processes == 0, expected)


def processes(argument: str, value: Any, least: int, nvidia_gpu: int, worker_command: Sequence[str]) -> int:
    """Check the number of Dask workers in a session. By default one for each GPU, or 1 without GPUs."""
    if value is None:
        return nvidia_gpu or 1
    value = integer(argument, value, least)
    per_gpu = runs_one_per_gpu(worker_command)
    expected = f"{nvidia_gpu}, one for each GPU with this worker_command"
    return _valid(argument, value, not per_gpu or value == nvidia_gpu, expected)


# -- texts


def _plain(text: str) -> str:
    """Return text as a plain str, because a session cannot evaluate the ``repr`` of a subclass."""
    return str.__str__(text)


def text(argument: str, value: Any) -> str:
    """Check a string."""
    expected = "a string that is not empty, without null characters, or None"
    _typed(argument, value, str, expected)
    return _plain(_valid(argument, value, value and "\0" not in value, expected))


def group_name(argument: str, value: Any) -> str:
    """Check the name of a worker group other than the default group."""
    expected = f"at most {_GROUP_LENGTH} letters and digits, the first a letter, in words joined by '-'"
    _typed(argument, value, str, expected)
    _valid(argument, value, GROUP_NAME.fullmatch(value) and len(value) <= _GROUP_LENGTH, expected)
    _valid(argument, value, value not in RESERVED, f"a name other than {' and '.join(map(repr, RESERVED))}")
    return _plain(value)


def cluster_name(argument: str, value: Any, create_mode: str) -> str:
    """Check a cluster's name. By default a new cluster gets a random name."""
    if value is None:
        expected = f"the name of a cluster, which create_mode={create_mode!r} requires"
        _valid("name", value, create_mode == "create", expected)
        return f"cml-{secrets.token_hex(4)}"
    expected = f"1 to 100 printable characters, at most {_NAME_BYTES} bytes, no '/', no leading '.' or '-'"
    _typed(argument, value, str, expected)
    _valid(argument, value, _CLUSTER_NAME.fullmatch(value) and value.isprintable(), expected)
    return _plain(_valid(argument, value, len(value.encode()) <= _NAME_BYTES, expected))


def worker_name(value: str) -> str:
    """Check a worker's name. No file that is called by it may be the scheduler's or the cluster's."""
    expected = f"printable characters without '/', neither {OWN_LOG!r} nor with {SCHEDULER!r} at the end"
    valid = value.isprintable() and value not in ("", ".", "..", OWN_LOG) and not value.endswith(SCHEDULER)
    return _valid("worker name", value, valid and "/" not in value, expected)


def folder(argument: str, value: Any) -> str:
    """Check a folder's path, and return the absolute path with variables expanded. It need not exist."""
    expected = "the path of a folder"
    path = _typed(argument, os.fspath(value) if isinstance(value, os.PathLike) else value, str, expected)
    _valid(argument, value, path and "\0" not in path, expected)
    expanded = os.path.expandvars(os.path.expanduser(_plain(path)))
    unset = re.search(r"^~|\$\{?[A-Za-z_]", expanded)
    _valid(argument, value, not unset, f"{expected}, with variables and a home that this process has")
    return os.path.abspath(expanded)


def choice(argument: str, value: Any, choices: Sequence[str]) -> str:
    """Check one of several strings."""
    return _plain(_valid(argument, value, value in choices, f"one of {', '.join(map(repr, choices))}"))


# -- booleans


def boolean(argument: str, value: Any) -> bool:
    """Check a boolean."""
    return _typed(argument, value, bool, "True or False")


def security(argument: str, value: Any) -> bool | Security:
    """Check whether a cluster has keys, or which."""
    from distributed.security import Security

    return _typed(argument, value, (bool, Security), "True, False or a distributed.Security")


# -- arguments of Dask's clusters


def dask_arguments(asynchronous: Any, loop: Any, silence_logs: Any, quiet: Any) -> None:
    """Check the arguments of a cluster that are no options."""
    from tornado.ioloop import IOLoop

    boolean("asynchronous", asynchronous)
    boolean("quiet", quiet)
    _typed("loop", loop, (IOLoop, type(None)), "a tornado.ioloop.IOLoop or None")
    level = getattr(logging, str(silence_logs).upper(), silence_logs)
    _typed("silence_logs", level, (int, type(None)), 'a level of logging, such as "WARNING", or False')


def subclass(argument: str, value: Any, base: type) -> None:
    """Check a class."""
    if not (isinstance(value, type) and issubclass(value, base)):
        raise TypeError(message(argument, value, f"a subclass of {base.__module__}.{base.__name__}"))


# -- lists


def names(argument: str, value: Any) -> tuple[str, ...]:
    """Check a list of names."""
    if not _is_list(value) or not all(isinstance(name, str) and name for name in value):
        raise TypeError(message(argument, value, _NAMES))
    return tuple(map(_plain, value))


def several(argument: str, value: Any) -> list[str]:
    """Check several names of workers, which Dask also gives as a set or as numbers."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(message(argument, value, _NAMES))
    return [*map(str, value)]


def sections(argument: str, value: Any) -> tuple[str, ...]:
    """Check a list of top-level sections of Dask's configuration."""
    checked = names(argument, value)
    for i, name in enumerate(checked):
        top = name.split(".")[0]
        _valid(f"{argument}[{i}]", name, name == top, f"the name of a top-level section, such as {top!r}")
    return checked


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def command_line(argument: str, value: Any, refused: Refused) -> tuple[str, ...]:
    """Check additional arguments of a program."""
    if not _is_list(value):
        raise TypeError(of_type(argument, value, 'a list of strings, such as ["--option", "3"]'))
    words = tuple(_hidden_text(f"{argument}[{i}]", word) for i, word in enumerate(value))
    for i, word in enumerate(words):
        option = word.split("=")[0]
        _refuse(argument, option, option, refused)
        if option.startswith("-") and option.split() != [option]:
            two = f'an option and its value as two strings, "{option.split()[0]}", "…"'
            raise ValueError(f"invalid {argument}[{i}]: expected {two}")
    return words


def worker_args(
    argument: str, value: Any, refused: Refused, processes: int, worker_command: Sequence[str]
) -> tuple[str, ...]:
    """Check additional arguments of the Dask workers' program."""
    if processes > 1:
        refused = {**refused, "several processes need nannies": ["--no-nanny"]}
    words = command_line(argument, value, refused)
    if [*worker_command] in ([], ["dask", "worker"]):
        _parse(argument, words, "worker")
    return words


def scheduler_args(argument: str, value: Any, refused: Refused) -> tuple[str, ...]:
    """Check additional arguments of ``dask scheduler``."""
    words = command_line(argument, value, refused)
    _parse(argument, words, "scheduler")
    return words


def _parse(argument: str, words: Sequence[str], program: str) -> None:
    """Refuse what the installed program does not know. Its session would end without a connection."""
    if not words:
        return
    import click

    command = import_module(f"distributed.cli.dask_{program}").main
    context = click.Context(command)
    # Words of a module that is preloaded are its own.
    context.ignore_unknown_options = any(word.split("=")[0] in _PRELOADS for word in words)
    try:
        given, _, _ = command.make_parser(context).parse_args([*words])
    except click.UsageError as error:
        expected = f"options of `dask {program}`. {error.format_message()}"
        raise ValueError(f"invalid {argument}: expected {expected}") from None
    # What is not given is None, an empty tuple, or a mark of newer releases of click.
    others = [given.get(name) for name in ("scheduler", "preload_argv")]
    has_others = any(isinstance(other, (str, tuple)) and other for other in others)
    if has_others and not context.ignore_unknown_options:
        raise ValueError(f"invalid {argument}: expected options of `dask {program}`, and no other words")


def _hidden_text(argument: str, value: Any) -> str:
    """Check a string that may be secret."""
    if "\0" in _typed(argument, value, str, "a string", of_type):
        raise ValueError(f"invalid {argument}: expected a string without null characters")
    return _plain(value)


def _refuse(argument: str, word: str, shown: str, refused: Refused) -> None:
    for reason, words in refused.items():
        if word in words:
            raise ValueError(f"invalid {argument}: expected no {shown}; {reason}")


def worker_command(argument: str, value: Any, nvidia_gpu: int) -> tuple[str, ...]:
    """Check the command that starts a session's Dask workers. By default, the session's plan chooses it."""
    words = command_line(argument, value, refused={})
    if not all(words):
        raise ValueError(f'invalid {argument}: expected a command, such as ["dask", "cuda", "worker"]')
    has_gpu = nvidia_gpu or not runs_one_per_gpu(words)
    _valid("nvidia_gpu", nvidia_gpu, has_gpu, f"at least 1 with this {argument}")
    return words


def runs_one_per_gpu(worker_command: Sequence[str]) -> bool:
    """Return whether a command is dask-cuda's, which starts one Dask worker for each GPU."""
    if [*worker_command[:3]] == ["dask", "cuda", "worker"]:
        return True
    return bool(worker_command) and os.path.basename(worker_command[0]) == "dask-cuda-worker"


# -- mappings


def environment(argument: str, value: Any) -> dict[str, str]:
    """Check environment variables."""
    _typed(argument, value, Mapping, "a mapping of names to strings", of_type)
    for name, content in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^=\0]+", name):
            shown = re.sub("=.*", "=…", str(name), flags=re.DOTALL)  # the value may be secret
            raise ValueError(f"invalid {argument}: expected names of environment variables, got {shown!r}")
        if isinstance(content, (int, float)):
            raise TypeError(message(f"{argument}[{name!r}]", content, f'a string, such as "{content}"'))
    return {_plain(name): _hidden_text(f"{argument}[{name!r}]", content) for name, content in value.items()}


def resources(argument: str, value: Any, nvidia_gpu: int) -> dict[str, float]:
    """Check the resources of a session. By default its GPUs."""
    if value is None:
        return {"GPU": float(nvidia_gpu)} if nvidia_gpu else {}
    expected = 'a mapping of names to numbers above 0, such as {"GPU": 1}'
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError(message(argument, value, expected))
    valid = all(re.fullmatch(r"[^\s,=\0]+", name) for name in value)
    _valid(argument, value, valid, f"{expected}, with names without spaces, commas and '='")
    return {_plain(name): positive(f"{argument}[{name!r}]", amount) for name, amount in value.items()}


def launch_parameters(argument: str, value: Any, refused: Refused) -> dict[str, Any]:
    """Check additional parameters of ``launch_workers``."""
    expected = "parameters of launch_workers"
    _typed(argument, value, Mapping, f"a mapping of {expected}", of_type)
    checked = {}
    for name, content in value.items():
        _typed(argument, name, str, f"names of {expected}", of_type)
        _refuse(argument, name, repr(name), refused)
        try:  # launch what the record contains, so that each keeper launches the same
            checked[_plain(name)] = json.loads(json.dumps(content, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            raise ValueError(of_type(f"{argument}[{name!r}]", content, "a JSON value")) from None
    return checked


def worker_groups(argument: str, value: Any) -> dict[str, dict[str, Any]]:
    """Check a mapping of worker groups. :meth:`Options.groups` checks the options of each group."""
    _typed(argument, value, Mapping, 'a mapping of names to options, such as {"gpu": {"nvidia_gpu": 1}}')
    groups = {}
    for name, options in value.items():
        group = group_name(f"name in {argument}", name)
        if not isinstance(options, Mapping) or not all(isinstance(option, str) for option in options):
            raise TypeError(of_type(f"{argument}[{name!r}]", options, "a mapping of options"))
        groups[group] = {option.replace("-", "_"): given for option, given in options.items()}
    return groups


def validate(value: Any, kind: type[T], what: str) -> T:
    """Return data of another process, such as a message or a record, as a value of a type.

    No value is converted to another type, except whole numbers to floats. Unknown fields are ignored, unless
    the type forbids them.

    Parameters
    ----------
    value : object
        The data, as JSON or msgpack is read.
    kind : type
        The type, such as a dataclass. ``Annotated`` types of its fields have the bounds.
    what : str
        What the data is, for the message.

    Raises
    ------
    ValueError
        If the data is invalid. The message names the field.

    Examples
    --------
    >>> validate({"n": "2"}, dict[str, int], "number of workers")
    Traceback (most recent call last):
        ...
    ValueError: invalid number of workers: Expected `int`, got `str` - at `$[...]`
    """
    import msgspec

    try:
        with _reading:
            return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:  # in some releases no ValueError
        raise ValueError(f"invalid {what}: {str(error)[:_LONGEST_ERROR]}") from None
