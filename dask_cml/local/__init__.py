"""A platform for laptops: the functions of ``cml.workers_v1``, with processes of this machine as sessions."""

from __future__ import annotations

from dask_cml.local.installation import install
from dask_cml.local.quota import configure
from dask_cml.local.workers import (
    Response,
    await_workers,
    launch_workers,
    list_workers,
    shares_host_network,
    stop_workers,
)

__all__ = [
    "Response",
    "await_workers",
    "configure",
    "install",
    "launch_workers",
    "list_workers",
    "shares_host_network",
    "stop_workers",
]
