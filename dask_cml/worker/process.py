"""Protects a session from its Dask worker, and moves its data when the platform is about to stop the session.

``dask worker`` runs this module by ``--preload`` in a worker's process, and by ``--preload-nanny`` in the
parent process of workers. ``dask cuda worker``, which lacks the second one, finds it in Dask's configuration.

A session's size is a hard limit on all of its processes. Over it, the kernel kills one or all of them. Before
the platform stops a session, it sends SIGTERM to the session's main process, or to all of its processes. The
main process passes it on as SIGUSR1 to the process of ``dask worker``, and the others ignore it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import dask.config
import psutil
from dask.utils import parse_bytes
from distributed.comm.core import FatalCommClosedError
from distributed.core import Status
from distributed.nanny import Nanny
from distributed.worker import Worker

from dask_cml import compat
from dask_cml.layout import FOUND_GPUS, GPUS, NANNY_PRELOAD, WORKER, WORKER_GROUP, find_modules
from dask_cml.protocol import EXITED, NOTICE

logger = logging.getLogger("distributed.worker.dask_cml")

#: The highest value: the kernel kills this process first. Any process may raise its own.
_FIRST_CHOICE = "1000"
_NOTICE_TIMEOUT = 20.0
#: Seconds before a nanny that did not reach the scheduler tries again.
_RETRY = 0.5
#: The exit status of a process whose status was lost (distributed/process.py:255).
_UNKNOWN = 255
#: The variable from which CUDA reads which GPUs a process can use.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_COUNT_TIMEOUT = 60.0
_DEVICES = Path("/dev")
_fork = threading.local()
#: The nannies, or the worker without one, of this process, with a connection to the scheduler.
_servers: list[Any] = []


async def dask_setup(server: Any) -> None:
    """Prepare the process of a worker, or of nannies."""
    compat.limit_handshakes()
    compat.find_keys_by_address()  # for clients that tasks create
    _ignore_sigterm()
    if isinstance(server, Worker):
        _come_first(has_nanny=server.nanny is not None)
        find_modules()
        server.startup_information["cml"] = _about
    if not isinstance(server, Worker) or server.nanny is None:
        _servers.append(server)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, server.loop.add_callback, _tell)
        await assign_gpus(str(server.name), getattr(server, "env", os.environ))
    if isinstance(server, Nanny):
        _report_exits(server)
        _forget_preloads(server)
        await _reach_scheduler(server)


async def _reach_scheduler(nanny: Nanny) -> None:
    """Connect to the scheduler. Try again until ``--death-timeout``, as a worker does, and a nanny not."""
    address = nanny.scheduler.addr
    while True:
        try:
            comm = await nanny.rpc.connect(address)
        except FatalCommClosedError:  # of keys; the nanny's own attempt ends it
            return
        except OSError as error:
            logger.info("Scheduler not reached: %s", error)
            await asyncio.sleep(_RETRY)
        else:
            nanny.rpc.reuse(address, comm)  # the nanny takes it next
            return


def _ignore_sigterm() -> None:
    """Let nothing end this process but SIGINT and SIGKILL.

    What tasks start does not ignore the signal: a new program gets the default, and a fork gets it back.
    """
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, lambda *_: None)
        os.register_at_fork(
            before=_hold_sigterm, after_in_parent=_release_sigterm, after_in_child=_heed_sigterm
        )
    compat.terminate_by_kill()


def _hold_sigterm() -> None:
    # A child that ignores the signal until it heeds it would lose one that comes at once.
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _release_sigterm() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _heed_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release_sigterm()


def _forget_preloads(nanny: Nanny) -> None:
    """Let nannies that tasks start not preload this module, which the configuration has for dask-cuda."""
    configured = dask.config.get("distributed.nanny.preload")
    if __name__ in configured:
        os.environ.pop(NANNY_PRELOAD, None)
        others = [name for name in configured if name != __name__]
        compat.configure_worker(nanny, {"distributed": {"nanny": {"preload": others}}})


def _report_exits(nanny: Nanny) -> None:
    """Tell the scheduler how the worker's process has ended, before the nanny starts another one."""

    def report(status: int) -> None:
        if nanny.status == Status.running:
            known = None if status == _UNKNOWN else status
            asked = getattr(nanny.process, "asked", False)
            nanny.log_event(EXITED, {"worker": nanny.worker_address, "status": known, "asked": asked})

    compat.report_exits(nanny, report)
    compat.note_whether_asked()


async def _tell() -> None:
    """Tell the scheduler that the session is about to be stopped. It has to know the session's worker."""
    if all(server.status is Status.init for server in _servers):
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)  # ends this process, as before it had the handler
    names = [str(server.name) for server in _servers]
    logger.info("Session about to be stopped: workers %s retire", ", ".join(names))
    try:
        await asyncio.wait_for(getattr(_servers[0].scheduler, NOTICE)(names=names), _NOTICE_TIMEOUT)
    except Exception as error:  # of Dask's RPC: the scheduler may have ended, too
        logger.warning("Scheduler not informed of the session's end: %r", error)


def _come_first(has_nanny: bool) -> None:
    """Let the kernel kill this process first, which the nanny replaces.

    While this process ends, the kernel may not see it any more although its threads still hold the memory,
    and kill another one. So the nanny's other processes come before the nanny: other workers, and the
    resource tracker of multiprocessing, which starts again with the next worker.
    """
    chosen = {os.getpid()}
    if has_nanny:
        with contextlib.suppress(psutil.Error):
            chosen |= {child.pid for child in psutil.Process(os.getppid()).children()}
    for pid in chosen:
        with contextlib.suppress(OSError):  # not on this system, or it has ended
            Path(f"/proc/{pid}/oom_score_adj").write_text(_FIRST_CHOICE)


async def _about(worker: Worker) -> dict[str, Any]:
    """Return what the scheduler keeps of a worker: its session, name, group, GPUs, and spill limit."""
    most = dask.config.get("distributed.worker.memory.max-spill")
    return {
        "session": os.environ.get("CDSW_ENGINE_ID"),
        "name": os.environ.get(WORKER),
        "group": os.environ.get(WORKER_GROUP),
        "found_gpus": os.environ.get(FOUND_GPUS),
        "max_spill": None if not most else parse_bytes(most),
    }


# -- GPUs


async def assign_gpus(name: str, env: MutableMapping[str, str]) -> None:
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
    found = await asyncio.to_thread(count_gpus)
    if found < wanted:
        env[FOUND_GPUS] = f"{found} of {wanted}"
        logger.warning("Worker %s: %d of %d GPUs found in this session, and it uses any", name, found, wanted)
    elif len(shares) > 1 and _VISIBLE not in os.environ and _VISIBLE not in env:
        env[_VISIBLE] = shares[int(name.rpartition("-")[2])]


def count_gpus() -> int:
    """Return the number of GPUs of this session, by ``nvidia-smi`` of its driver, or by its devices.

    ``NVIDIA_VISIBLE_DEVICES`` does not tell: in a session with GPUs it may be ``void``, or missing.
    """
    try:
        command = ["nvidia-smi", "-L"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):  # an image may have CUDA alone
        return sum(re.fullmatch("nvidia[0-9]+", device.name) is not None for device in _DEVICES.iterdir())
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
