"""Dask clusters on Cloudera Machine Learning (CML) worker sessions."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import dask.config

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster
    from dask_cml.display.group import WorkerGroup
    from dask_cml.errors import (
        ClusterExists,
        CMLError,
        LaunchRefused,
        NoSuchCluster,
        NotOnCML,
        SchedulerTimeout,
        SessionFailed,
    )
    from dask_cml.manager.adaptive import CMLAdaptive
    from dask_cml.records.usage import SessionHours, Usage
    from dask_cml.sessions.process import CMLScheduler, CMLWorker
    from dask_cml.sessions.session import Session

__all__ = [
    "CMLAdaptive",
    "CMLCluster",
    "CMLError",
    "CMLScheduler",
    "CMLWorker",
    "ClusterExists",
    "LaunchRefused",
    "NoSuchCluster",
    "NotOnCML",
    "SchedulerTimeout",
    "Session",
    "SessionFailed",
    "SessionHours",
    "Usage",
    "WorkerGroup",
    "close_all",
]

_HOMES = {
    "CMLAdaptive": "manager.adaptive",
    "CMLCluster": "cluster",
    "CMLScheduler": "sessions.process",
    "CMLWorker": "sessions.process",
    "Session": "sessions.session",
    "SessionHours": "records.usage",
    "Usage": "records.usage",
    "WorkerGroup": "display.group",
    "close_all": "process_clusters",
}


# Clients find a cluster's keys by its plain address. One of Dask's defaults would not last: the default of
# distributed, which may be imported later, would replace it.
if dask.config.get("distributed.client.security-loader", None) is None:
    dask.config.set({"distributed.client.security-loader": "dask_cml.address.load_security"})


def __getattr__(name: str) -> Any:
    """Import an attribute on demand, because the command line and the local platform need only a few."""
    if name == "__version__":
        return import_module("importlib.metadata").version("dask-cml")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dask_cml.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
