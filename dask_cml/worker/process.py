"""Protects a session from its Dask worker, for ``dask worker --preload``.

A session's size is a hard limit on all of its processes. Over it, the kernel kills one or all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
from pathlib import Path
from typing import Any

import dask.config
from dask.utils import parse_bytes
from distributed.worker import Worker

from dask_cml.layout import ALLOCATION_LIMIT
from dask_cml.worker.notice import take_notice

logger = logging.getLogger("distributed.worker.dask_cml")

#: The highest value: the kernel kills this process first. Any process may raise its own.
_FIRST_CHOICE = "1000"


async def dask_setup(worker: Worker) -> None:
    """Prepare a worker's process, and tell the scheduler about its session."""
    _come_first()
    _limit_allocations(int(os.environ.get(ALLOCATION_LIMIT) or 0))
    worker.startup_information["cml"] = _about
    if worker.nanny is None:
        take_notice(worker)


def _come_first() -> None:
    """Let the kernel kill this process first, which the nanny replaces."""
    with contextlib.suppress(OSError):  # not on this system
        Path("/proc/self/oom_score_adj").write_text(_FIRST_CHOICE)


def _limit_allocations(most: int) -> None:
    """Let allocations fail with MemoryError that the session could never hold.

    Dask's nanny looks at the memory ten times a second, and a large array is filled faster. The limit counts
    reserved memory, of which libraries use only a part, so it is far above the session's size.
    """
    if most <= 0:
        return
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        reserved = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = reserved + most
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
            logger.info("Allocations limited to %s bytes", limit)


async def _about(worker: Worker) -> dict[str, Any]:
    """Return what the scheduler keeps of a worker: its session, and how much it may spill."""
    most = dask.config.get("distributed.worker.memory.max-spill")
    return {
        "session": os.environ.get("CDSW_ENGINE_ID"),
        "max_spill": None if not most else parse_bytes(most),
    }
