"""A platform for laptops and tests: the functions of ``cml.workers_v1``, with processes of this machine.

Additional functions change settings, inject faults and show all sessions.
"""

from __future__ import annotations

from dask_cml.local.configuration import Settings, configure, settings, shares_host_network
from dask_cml.local.control import evict, log, prune, sessions
from dask_cml.local.engines import engine
from dask_cml.local.faults import clear_faults, inject
from dask_cml.local.installation import install
from dask_cml.local.workers import Response, await_workers, launch_workers, list_workers, stop_workers

__all__ = [
    "Response",
    "Settings",
    "await_workers",
    "clear_faults",
    "configure",
    "engine",
    "evict",
    "inject",
    "install",
    "launch_workers",
    "list_workers",
    "log",
    "prune",
    "sessions",
    "settings",
    "shares_host_network",
    "stop_workers",
]
