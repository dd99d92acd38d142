"""The options of unattended clusters, which outlive the command or the request that creates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import dask.config

from dask_cml.checks import NEVER
from dask_cml.options import OPTION_NAMES
from dask_cml.options.table import OPTIONS, Option

#: Default idle time after which an unattended cluster shuts down.
_IDLE_TIMEOUT = "1 hour"


def unattended(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an unattended cluster, which shuts down after an idle time by default.

    Parameters
    ----------
    arguments : mapping
        Arguments of the cluster. An ``idle_timeout`` of ``"never"`` disables the default.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if dask.config.get("cml.idle-timeout") is None:
        given.setdefault("idle_timeout", _IDLE_TIMEOUT)
    return given


def offered_options() -> list[Option]:
    """Return the options that an unattended cluster can be given, with their configured defaults."""
    offered = []
    for option in OPTIONS.values():
        default, text = dask.config.get(f"cml.{option.key}", None), option.description
        if option.key == "idle-timeout":
            default = default or _IDLE_TIMEOUT
            text = text.replace("By default never.", f'By default {_IDLE_TIMEOUT}; "{NEVER}" is allowed.')
        if option.argument in OPTION_NAMES and option.unattended:
            offered.append(replace(option, default=default, description=text))
    return offered
