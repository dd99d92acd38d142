"""The arguments in a call that a function does not have, and options as attributes of a cluster."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dask_cml.checks import nearest
from dask_cml.options.table import ARGUMENTS, GROUP_OPTIONS, METHODS, NEEDLESS


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
    elsewhere = {argument.name: argument.elsewhere for argument in ARGUMENTS.values()}
    n = ["n", "n_workers", *elsewhere["n_workers"]]
    elsewhere |= {"n": n} | {argument: [*names, *n] for argument, names in METHODS.items()}
    here = [argument for argument in arguments if name in elsewhere.get(argument, ())]
    if name in NEEDLESS:
        here = [f"none, because {NEEDLESS[name]}"]
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
            called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
            raise TypeError(unexpected_argument(called, name, known))


def set_attribute(cluster: Any, name: str, value: Any) -> None:
    """Set an attribute of a cluster, but no option: this would change no session of a running cluster."""
    # A subclass of a user may have attributes of these names.
    is_ours = type(cluster).__module__ == "dask_cml.cluster"
    if is_ours and name in GROUP_OPTIONS and hasattr(cluster, "status") and not hasattr(cluster, name):
        raise AttributeError(f"cannot set {name} of a running cluster: add a worker group with another one")
    object.__setattr__(cluster, name, value)


def arguments_of(cls: type) -> set[str]:
    """Return the arguments of a class and of its base classes, to which it may pass them on."""
    found = set()
    for base in cls.__mro__[:-1]:
        if "__init__" in vars(base):
            for parameter in inspect.signature(vars(base)["__init__"]).parameters.values():
                if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                    found.add(parameter.name)
    return found - {"self"}
