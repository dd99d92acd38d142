"""Gives each Dask worker of a session GPUs of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess

from distributed.nanny import Nanny

from dask_cml.layout import GPUS

logger = logging.getLogger("distributed.worker.dask_cml")

#: The variable from which CUDA reads which GPUs a process can use.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_COUNT_TIMEOUT = 60.0


async def assign(nanny: Nanny) -> None:
    """Let a nanny's worker use its own GPUs only.

    The worker uses all GPUs if the session has fewer than were asked for, or if a user has set
    ``CUDA_VISIBLE_DEVICES``.
    """
    shares = os.environ.get(GPUS, "").split()
    if not shares or _VISIBLE in os.environ or _VISIBLE in nanny.env:
        return
    wanted = 1 + max(int(gpu) for share in shares for gpu in share.split(","))
    found = await asyncio.to_thread(count)
    number = int(str(nanny.name).rpartition("-")[2])
    if found >= wanted:
        nanny.env[_VISIBLE] = shares[number]
    elif number == 0:
        logger.warning(
            "%d of %d GPUs found in this session: its workers have no GPUs of their own, and use any",
            found,
            wanted,
        )


def count() -> int:
    """Return the number of GPUs of this session, by NVML or by ``nvidia-smi``.

    ``NVIDIA_VISIBLE_DEVICES`` does not tell: in a session with GPUs it may be ``void``, or missing.
    """
    with contextlib.suppress(Exception):  # of NVML, of its own classes; importing it may raise any
        import pynvml

        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    try:
        command = ["nvidia-smi", "-L"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
