"""Creates a cluster, or takes over one that runs."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable

import dask.config
from dask.utils import parse_timedelta
from distributed.security import Security

from dask_cml.errors import CMLError
from dask_cml.manager.at_exit import unclosed
from dask_cml.manager.launcher import Launcher
from dask_cml.manager.record_keeper import RecordKeeper
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.records import liveness
from dask_cml.records.record import Maker, Record
from dask_cml.sessions import tls
from dask_cml.sessions.owner import lifetime


class Startup:
    """Brings one manager and its cluster's scheduler together.

    Parameters
    ----------
    launcher : Launcher
        Launches the sessions.
    client : SchedulerClient
        Connects to the scheduler.
    record_keeper : RecordKeeper
        Takes the cluster's name.
    log : callable
        Gets each line for the user.
    """

    def __init__(
        self,
        launcher: Launcher,
        client: SchedulerClient,
        record_keeper: RecordKeeper,
        log: Callable[[str], None],
    ) -> None:
        self._launcher = launcher
        self._client = client
        self._record_keeper = record_keeper
        self._log = log

    async def create(self, maker: Maker, leader: str, show: bool) -> None:
        """Create the cluster. Return when its scheduler answers.

        Parameters
        ----------
        maker : Maker
            What the record says of this process.
        leader : str
            The id of this manager, which leads at first.
        show : bool
            Whether to show the progress.
        """
        options = self._launcher.options
        files = await self._launcher.prepare()
        keys = tls.paths(self._launcher.security)
        record = Record(options.name, maker=maker, options=options.arguments(), security=keys)
        wanted = {"cluster": options.name, "record": record.id, "leader": leader}
        await self._record_keeper.take_name(record, {**wanted, "groups": options.first_groups()})
        self._record_keeper.start()
        if others := [repr(name) for each in unclosed() if (name := each.options.name) != options.name]:
            self._log(f"This process has other open clusters, with their own sessions: {', '.join(others)}")
        await self._launcher.launch(record.id, files, show)
        await self._join(record, options.scheduler_timeout)
        # Until now, the scheduler has waited for a manager for some time.
        timeout = options.orphan_timeout if options.shutdown_on_close else None
        await self._client.change_within(options.scheduler_timeout, orphan_timeout=timeout)
        await self._record_keeper.write()
        if not options.shutdown_on_close:
            self._log(lifetime(options.name))

    async def adopt(self, record: Record) -> None:
        """Take over the sessions of a running cluster.

        Raises
        ------
        CMLError
            If its scheduler does not answer.
        """
        # As long as Dask's clients wait: a busy scheduler may need it. Without a scheduler this fails at
        # once.
        patience = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
        if not await liveness.is_alive(record, timeout=patience):
            address = record.scheduler.address or "an unknown address"
            raise CMLError(
                f"the scheduler of cluster {record.name!r} does not answer at {address}: to stop its "
                f"sessions, run `dask cml delete {shlex.quote(record.name)}`"
            )
        self._launcher.take_over(record)
        await self._join(record, patience)
        self._record_keeper.start()
        self._launcher.attach_launched(record)

    async def _join(self, record: Record, timeout: float) -> None:
        """Connect to the scheduler, which may be busy."""
        scheduler = self._launcher.scheduler
        assert scheduler is not None
        assert scheduler.address is not None
        security = self._launcher.security or Security()
        arguments = await asyncio.to_thread(tls.connection_args, security)
        await self._client.join_within(timeout, scheduler.address, arguments, record.id)
