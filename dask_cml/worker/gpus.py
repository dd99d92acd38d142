"""Gives each Dask worker of a session GPUs of its own, and notes the GPUs that the session lacks."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
from collections.abc import MutableMapping
from pathlib import Path

from dask_cml.layout import FOUND_GPUS, GPUS

logger = logging.getLogger("distributed.worker.dask_cml")

#: The variable from which CUDA reads which GPUs a process can use.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_COUNT_TIMEOUT = 60.0
_DEVICES = Path("/dev")


async def assign(name: str, env: MutableMapping[str, str]) -> None:
    """Let a Dask worker use its own GPUs only, and tell the scheduler if its session has too few.

    The worker uses all GPUs if the session has fewer than were asked for, or if a user has set
    ``CUDA_VISIBLE_DEVICES``.

    Parameters
    ----------
    name : str
        The Dask worker's name.
    env : mutable mapping of str to str
        The environment variables of its process, in addition to those of this process.
    """
    shares = os.environ.get(GPUS, "").split()
    if not shares:
        return
    wanted = 1 + max(int(gpu) for share in shares for gpu in share.split(","))
    found = await asyncio.to_thread(count)
    if found < wanted:
        env[FOUND_GPUS] = f"{found} of {wanted}"
        logger.warning("Worker %s: %d of %d GPUs found in this session, and it uses any", name, found, wanted)
    elif len(shares) > 1 and _VISIBLE not in os.environ and _VISIBLE not in env:
        env[_VISIBLE] = shares[int(name.rpartition("-")[2])]


def count() -> int:
    """Return the number of GPUs of this session, by ``nvidia-smi`` of its driver, or by its devices.

    ``NVIDIA_VISIBLE_DEVICES`` does not tell: in a session with GPUs it may be ``void``, or missing.
    """
    try:
        command = ["nvidia-smi", "-L"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):  # an image may have CUDA alone
        return sum(re.fullmatch("nvidia[0-9]+", device.name) is not None for device in _DEVICES.iterdir())
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
