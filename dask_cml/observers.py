"""Follows all clusters in the project's records, for a process that shows them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from distributed.core import Status

from dask_cml.cancellation import cancel
from dask_cml.cluster import CMLCluster
from dask_cml.core.at_exit import unclosed
from dask_cml.errors import CMLError
from dask_cml.output import get_logger
from dask_cml.protocol import Rank
from dask_cml.records import liveness, store
from dask_cml.records.liveness import Finding, State
from dask_cml.records.record import Record

logger = get_logger(__name__)

#: Seconds after which a scheduler that did not answer is asked again, unless its record changes before.
_RETRY = 15.0
#: Seconds without a connection after which a cluster that this process only shows is left, and judged anew.
_DISCONNECTED = 60.0
#: Seconds to shut down the owned clusters. Kubernetes grants 30.
_GRACE = 25.0
#: Errors that occur when a cluster ends meanwhile, or its record is invalid.
EXPECTED = (CMLError, OSError, asyncio.TimeoutError, ValueError, TypeError)


class ObservedCluster(CMLCluster):
    """A cluster of another process, which this process shows. The cluster can still become an orphan."""

    _rank = Rank.OBSERVER


class CommandedCluster(CMLCluster):
    """A cluster of another process, which a command asks for something."""

    _rank = Rank.COMMAND


@dataclass
class Observed:
    """A cluster in the records that no other part of this process uses, or that a subclass creates.

    Parameters
    ----------
    record : Record
        The cluster's last known record.
    cluster : CMLCluster or None
        The cluster itself. None while its scheduler does not answer, and if it has no keys.
    finding : Finding or None
        What was last found out about a cluster that is not connected.
    failure : Exception or None
        Why a cluster that a subclass creates did not start.
    task : asyncio.Task or None
        Starts, joins or leaves the cluster.
    not_before : float
        The monotonic time before which it is not joined.
    lost_since : float or None
        The monotonic time since which its scheduler has not answered. None: it answers.
    """

    record: Record
    cluster: CMLCluster | None = None
    finding: Finding | None = None
    failure: Exception | None = None
    task: asyncio.Task[None] | None = None
    not_before: float = 0.0
    lost_since: float | None = None

    @property
    def owned(self) -> bool:
        """Whether the cluster shuts down with this process."""
        return self.cluster is not None and self.cluster.shutdown_on_close


class Observers:
    """Observes all clusters in the project's records. A subclass shows them, and may own some.

    Each cluster has a task of its own, so that no cluster waits for the scheduler of another.

    Parameters
    ----------
    interval : float
        Time between two reads of the records, in seconds.

    Attributes
    ----------
    observed : dict of str to Observed
        The clusters, by the ids of their records.
    """

    def __init__(self, interval: float = 2.0) -> None:
        self.observed: dict[str, Observed] = {}
        self._interval = interval
        self._polling: asyncio.Task[None] | None = None
        #: The last errors that are logged, by what failed.
        self._logged: dict[str, str] = {}

    # -- for subclasses

    def connect(self, record: Record) -> CMLCluster:
        """Return an object for a running cluster, which is not connected yet."""
        return ObservedCluster(name=record.name, create_mode="connect", asynchronous=True, quiet=True)

    def joined(self, observed: Observed) -> None:
        """Show a cluster, which is connected now."""

    async def polled(self) -> None:
        """React after the records were read."""

    # -- polling

    def start(self) -> None:
        """Start to observe. Call this in the event loop."""
        self._polling = asyncio.create_task(self._poll_for_ever())

    async def close(self) -> None:
        """Stop observing, and shut down the owned clusters. The others keep running.

        Raises
        ------
        CMLError
            If CML did not stop some sessions in time. The message names their clusters.
        """
        await cancel(self._polling)
        await cancel(*(observed.task for observed in self.observed.values()))
        ending = {}
        for id, observed in self.observed.items():
            cluster = observed.cluster
            if cluster is not None:
                ending[id] = asyncio.ensure_future(cluster.close() if observed.owned else cluster.leave())
        if ending:
            await asyncio.wait(ending.values(), timeout=_GRACE)
        failed = [id for id, task in ending.items() if not task.done() or task.exception() is not None]
        for id in failed:
            cluster, task = self.observed[id].cluster, ending[id]
            words = task.exception() if task.done() else "it took too long"
            if words and not self.observed[id].owned:
                logger.warning("%s", words)
        await cancel(*ending.values())
        if left := [self.observed[id].record.name for id in failed if self.observed[id].owned]:
            raise CMLError(f"some sessions of these clusters were not stopped: {', '.join(left)}")

    async def _poll_for_ever(self) -> None:
        while True:
            try:
                await self._poll()
            except EXPECTED as error:
                logger.warning("Records of clusters not read: %s", error)
            except Exception as error:  # of a subclass, which changes what another library lists
                self._log_once(error, "List of clusters not updated")
            await asyncio.sleep(self._interval)

    async def _poll(self) -> None:
        records = {record.id: record for record in await asyncio.to_thread(store.records)}
        used = {cluster.options.name for cluster in unclosed()}
        for id, record in records.items():
            known = self.observed.get(id)
            if known is None and record.name not in used:
                self.observed[id] = Observed(record)
            elif known is not None and known.failure is None and known.record != record:
                known.record, known.not_before = record, 0.0
        for id, observed in self.observed.items():
            if observed.failure is None and (observed.task is None or observed.task.done()):
                observed.task = asyncio.create_task(self._join_or_leave(observed, is_read=id in records))
        await self.polled()

    async def _join_or_leave(self, observed: Observed, is_read: bool) -> None:
        """Connect to a cluster that runs. Leave a cluster that has ended."""
        cluster = observed.cluster
        try:
            # A record that cannot be read for a moment has not ended its cluster.
            has_ended = not is_read and await asyncio.to_thread(store.has_ended, observed.record)
            if cluster is not None and self._is_to_leave(observed, cluster, has_ended):
                await self._leave(observed, cluster)
            if observed.cluster is None and has_ended:
                self.observed.pop(observed.record.id, None)
            elif observed.cluster is None and time.monotonic() >= observed.not_before:
                await self._join(observed)
        except EXPECTED as error:
            logger.info("Cluster %s not shown: %s", observed.record.name, error)
        except Exception as error:  # of Dask or a subclass
            self._log_once(error, f"Cluster {observed.record.name} not shown")

    def _log_once(self, error: Exception, what: str) -> None:
        """Log an error with its traceback if it is a new one. The next poll may raise it again."""
        if self._logged.get(what) != repr(error):
            self._logged[what] = repr(error)
            logger.exception("%s", what)

    def _is_to_leave(self, observed: Observed, cluster: CMLCluster, has_ended: bool) -> bool:
        if cluster.status == Status.closed:
            return True
        if observed.owned:  # it closes by itself
            return False
        now = time.monotonic()
        observed.lost_since = None if cluster.sharing.is_connected else observed.lost_since or now
        is_lost = observed.lost_since is not None and now - observed.lost_since > _DISCONNECTED
        return has_ended or (is_lost and cluster._rank is Rank.OBSERVER)

    async def _join(self, observed: Observed) -> None:
        observed.not_before = time.monotonic() + _RETRY
        findings = await liveness.judge([observed.record])
        observed.finding = findings[observed.record.name]
        # Without keys, another program may answer at the cluster's address.
        if observed.finding.state is State.ALIVE and observed.record.security is not None:
            cluster = observed.cluster = self.connect(observed.record)
            try:
                await cluster
            except BaseException:
                await self._leave(observed, cluster)
                raise
            self.joined(observed)

    async def _leave(self, observed: Observed, cluster: CMLCluster) -> None:
        await cluster.leave()
        observed.cluster, observed.lost_since, observed.not_before = None, None, time.monotonic() + _RETRY
