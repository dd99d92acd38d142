"""The process in the scheduler's session that keeps the cluster while no process of a user does.

The scheduler starts it, as ``python -m dask_cml.scheduler.resident NAME``: first its side, then the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from pathlib import Path

from distributed.core import Status

from dask_cml.cancellation import cancel, first_of, wait_until_set
from dask_cml.errors import CMLError, NoSuchCluster
from dask_cml.protocol import Rank
from dask_cml.timing import timing

# The scheduler's own logs, which cluster.get_logs() returns, are the loggers below this name.
logger = logging.getLogger("distributed.scheduler.dask_cml")

#: Who keeps the cluster then, for users.
WHO = "its scheduler's session"
#: Seconds without a keeper after which the process is started: a user's process may be about to keep it. They
#: double with each failure.
_ALONE, _LONGEST_ALONE = 10.0, 600.0
#: Seconds without keeping the cluster after which a process that runs counts as hung.
_HUNG = 120.0
#: Seconds for the process to stop the cluster's sessions when its scheduler closes.
_END = 4.0


class Resident:
    """Keeps a cluster from its scheduler's session, in a process of its own.

    Parameters
    ----------
    cluster : str
        The cluster's name.
    folder : Path
        The cluster's folder.

    Attributes
    ----------
    problem : str or None
        Why that process does not run although it is needed, as a clause.
    """

    def __init__(self, cluster: str, folder: Path) -> None:
        self.problem: str | None = None
        self._cluster, self._folder = cluster, folder
        self._running: asyncio.Task[None] | None = None
        #: Seconds for which nobody has kept the cluster, and for which somebody has since. Who passes by only
        #: interrupts the first ones.
        self._alone = self._kept = 0.0
        #: Seconds for which the process has run without keeping the cluster.
        self._useless = 0.0
        self._patience = _ALONE
        #: Set when the scheduler closes.
        self._closes = asyncio.Event()

    def check(self, seconds: float, is_needed: bool, *, keeps: bool) -> None:
        """Start the process if it has been needed for a while. It ends by itself, unless it hangs.

        Parameters
        ----------
        seconds : float
            Time since the last check, without pauses of the scheduler, which say nothing of the process.
        is_needed : bool
            Whether nobody keeps the cluster.
        keeps : bool
            Whether the process keeps it.
        """
        runs = self._running is not None and not self._running.done()
        self._useless = self._useless + seconds if runs and not keeps else 0.0
        if self._running is not None and self._useless > _HUNG:
            self._running.cancel()
        if not is_needed:
            self.problem = None
            self._kept += seconds
            if self._kept > timing.stay:
                self._alone = 0.0
            return
        self._kept = 0.0
        self._alone += seconds
        if not runs and self._alone >= self._patience:
            self._alone = 0.0
            self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Run the process until it ends, or is cancelled because it hangs."""
        logger.info("Cluster %s is not managed: starting a process for it in this session", self._cluster)
        began, why = time.monotonic(), f"no answer within {_HUNG:g} s"
        try:
            status = await run(self._cluster, self._folder, self._closes)
            why = f"exit status {status}" if status else ""
        except Exception as error:  # asyncio may be unable to start a process, in several ways
            why = repr(error)
        finally:
            if not why or time.monotonic() - began > _LONGEST_ALONE:  # it has kept the cluster
                self._patience = _ALONE
            if why and not self._closes.is_set():
                self._patience = min(2 * self._patience, _LONGEST_ALONE)
                if self.problem is None:
                    logger.warning("Cluster %s not managed by this session: %s", self._cluster, why)
                self.problem = (
                    f"no process replaces workers or adapts, because its own process in {WHO} failed with "
                    f"{why}. See the scheduler's log, and connect with CMLCluster.from_name"
                )

    async def close(self) -> None:
        """Let the process stop the sessions of a cluster that ends, or exit."""
        self._closes.set()
        if self._running is not None:
            await asyncio.wait([self._running], timeout=_END)
            await cancel(self._running)


async def run(cluster: str, folder: Path, closes: asyncio.Event) -> int:
    """Run the process that keeps a cluster, and return its exit status.

    Parameters
    ----------
    cluster : str
        The cluster's name.
    folder : Path
        The cluster's folder.
    closes : asyncio.Event
        Set when the scheduler closes. The process notices that by the end of its standard input, which also
        ends with a scheduler that is killed.

    Raises
    ------
    OSError
        If the process does not start.
    """
    env = {**os.environ, "DASK_CML__STATE_DIRECTORY": str(folder.parent)}
    command = (sys.executable, "-m", "dask_cml.scheduler.resident", cluster)
    process = await asyncio.create_subprocess_exec(*command, env=env, stdin=asyncio.subprocess.PIPE)
    try:
        await first_of(process.wait(), closes.wait())
        if process.stdin is not None:
            process.stdin.close()
        return await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def keep(name: str, closes: asyncio.Event) -> None:
    """Keep a cluster until another process does, its scheduler closes, or the cluster ends.

    Parameters
    ----------
    name : str
        The cluster's name.
    closes : asyncio.Event
        Set when the scheduler closes, or has ended.

    Raises
    ------
    CMLError
        If the scheduler does not answer, or this session cannot reach the platform.
    """
    from dask_cml.cluster import CMLCluster  # which the scheduler does not need

    class ResidentCluster(CMLCluster):
        """A cluster in its scheduler's session, with which it ends."""

        _rank = Rank.RESIDENT

    cluster = ResidentCluster(name=name, create_mode="connect", asynchronous=True, quiet=True)
    try:
        await cluster
    except NoSuchCluster:
        return
    while cluster.status != Status.closed and not closes.is_set():
        link = cluster.sharing.link
        if link.connected and link.board.keeper not in (None, link.id):
            break
        await wait_until_set(closes, timing.retry)
    try:
        if not closes.is_set():
            await cluster.leave()
        elif (why := await cluster.sharing.why_closed()) is not None:
            cluster.ending.reason = why
            await cluster.shutdown()
        # Else the scheduler is lost. This process ends with it, and carries out nothing more.
    except CMLError as error:
        logger.warning("%s", error)


async def _keep_until_input_ends(name: str) -> None:
    closes, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        loop.remove_reader(sys.stdin)
        closes.set()

    loop.add_reader(sys.stdin, end)  # nothing is written to it
    await keep(name, closes)


if __name__ == "__main__":
    logging.basicConfig(format="%(asctime)s - %(name)s - %(levelname)s - %(message)s", level=logging.INFO)
    try:
        asyncio.run(_keep_until_input_ends(sys.argv[1]))
    except CMLError as error:
        sys.exit(f"Cluster not kept: {error}")
