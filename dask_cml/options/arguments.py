"""Unknown arguments, such as those of other cluster managers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from dask_cml.checks import nearest
from dask_cml.options.table import OPTIONS

_MINIMUM = ("minimum_jobs", "minimum_workers", "min_workers", "n_min")
_MAXIMUM = ("maximum_jobs", "maximum_workers", "max_workers", "n_max")
#: Arguments of other cluster managers whose values sessions have by themselves.
_NEEDLESS = ("dashboard_address", "host", "interface", "namespace", "port", "protocol", "scheduler_port")


def unexpected_argument(function: str, name: str, arguments: Collection[str]) -> str:
    """Return the message of the TypeError for an unknown argument.

    Parameters
    ----------
    function : str
        The name of the function or class.
    name : str
        The unknown argument.
    arguments : collection of str
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
        here = ["none, because the cluster sets it"]
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
    known = {each.name for each in parameters if each.kind != each.VAR_KEYWORD} | {*more}
    for name in given:
        if name not in known:
            raise TypeError(unexpected_argument(function.__name__, name, known - {"self"}))


def arguments_of(cls: type) -> set[str]:
    """Return the arguments of a class and of its base classes, to which it may pass them on."""
    inits = [vars(each)["__init__"] for each in cls.__mro__[:-1] if "__init__" in vars(each)]
    parameters = [each for init in inits for each in inspect.signature(init).parameters.values()]
    return {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
