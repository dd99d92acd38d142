"""Dask clusters on Cloudera Machine Learning (CML) worker sessions."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster as CMLCluster
    from dask_cml.cluster import WorkerGroup as WorkerGroup
    from dask_cml.cluster import close_all as close_all
    from dask_cml.core.groups import CMLAdaptive as CMLAdaptive
    from dask_cml.errors import CallFailed as CallFailed
    from dask_cml.errors import ClusterExists as ClusterExists
    from dask_cml.errors import CMLError as CMLError
    from dask_cml.errors import LaunchRefused as LaunchRefused
    from dask_cml.errors import NoSuchCluster as NoSuchCluster
    from dask_cml.errors import NotOnCML as NotOnCML
    from dask_cml.errors import SchedulerTimeout as SchedulerTimeout
    from dask_cml.errors import SessionFailed as SessionFailed
    from dask_cml.private_files import NotPrivate as NotPrivate
    from dask_cml.records.history import SessionHours as SessionHours
    from dask_cml.records.history import Usage as Usage
    from dask_cml.sessions.process import CMLScheduler as CMLScheduler
    from dask_cml.sessions.process import CMLWorker as CMLWorker
    from dask_cml.sessions.process import Session as Session

#: What the package offers, by the modules.
_OFFERED = {
    "cluster": "CMLCluster WorkerGroup close_all",
    "errors": "CMLError CallFailed ClusterExists LaunchRefused NoSuchCluster NotOnCML SchedulerTimeout "
    "SessionFailed",
    "core.groups": "CMLAdaptive",
    "private_files": "NotPrivate",
    "records.history": "SessionHours Usage",
    "sessions.process": "CMLScheduler CMLWorker Session",
}
_HOMES = {name: module for module, names in _OFFERED.items() for name in names.split()}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import an attribute on demand, because the command line and the local platform need only a few."""
    if name == "__version__":
        return import_module("importlib.metadata").version("dask-cml")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dask_cml.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
