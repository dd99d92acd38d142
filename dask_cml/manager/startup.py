"""Creates a cluster, or takes over one that runs."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed.security import Security

from dask_cml.display.words import span
from dask_cml.errors import CMLError
from dask_cml.manager.at_exit import unclosed
from dask_cml.manager.state import ClusterState
from dask_cml.options.limits import check_new, limits
from dask_cml.records import liveness
from dask_cml.records.operations import take_name
from dask_cml.records.record import Maker, Record
from dask_cml.sessions import owner, tls


async def create(state: ClusterState, maker: Maker, show: bool) -> None:
    """Create a cluster. Return when its scheduler answers.

    Parameters
    ----------
    state : ClusterState
        The parts of the manager, which leads at first.
    maker : Maker
        What the record says of this process.
    show : bool
        Whether to show the progress.

    Raises
    ------
    ValueError
        If the cluster exceeds a limit of the site.
    """
    options, launcher, record_keeper = state.options, state.launcher, state.record_keeper
    files = await launcher.prepare()
    keys = tls.paths(launcher.security)
    record = Record(options.name, maker=maker, options=options.arguments(), security=keys)
    timeout = options.orphan_timeout if options.shutdown_on_close else None
    wanted = first_state(state, record, options.first_groups(), limits().get("hours"), orphan_timeout=timeout)
    record_keeper.record = record  # to remove it if this is cancelled
    await take_name(record, wanted, state.api)
    check_new(options)  # only now it is known that no running cluster is to be connected to
    record_keeper.start()
    if not maker.serves:  # the page creates clusters for several users
        _tell_others(state)
    await launcher.launch(record.id, files, show, lambda: join(state, record, options.scheduler_timeout))
    await record_keeper.write()
    if not options.shutdown_on_close:
        state.log(owner.lifetime(options.name))


def first_state(
    state: ClusterState,
    record: Record,
    groups: Mapping[str, Mapping[str, Any]],
    hours: float | None,
    **more: Any,
) -> dict[str, Any]:
    """Return what the next scheduler begins with: the content of its file ``wanted-<number>.json``."""
    return {
        "cluster": record.name,
        "record": record.id,
        "leader": state.fleet.manager,
        "groups": groups,
        "created": record.created.isoformat(),
        "hours": hours,
        **more,
    }


def _tell_others(state: ClusterState) -> None:
    """Name the user's other clusters in this process. A cell that runs again may have left them."""
    opened = [each.state for each in unclosed() if not each.state.observes]
    for other in opened:
        name, sessions = other.fleet.name, other.sessions
        if name != state.fleet.name and sessions:
            age = span(sessions[0].age)
            close = f"from dask_cml import CMLCluster; CMLCluster.from_name({name!r}).close()"
            state.log(f"This process has another cluster, open for {age}. To close it, run: {close}")


async def adopt(state: ClusterState, record: Record) -> None:
    """Take over the sessions of a running cluster.

    Raises
    ------
    CMLError
        If its scheduler does not answer.
    """
    # As long as Dask's clients wait: a busy scheduler may need it. Without a scheduler this fails at once.
    patience = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
    if not await liveness.is_alive(record, timeout=patience):
        address = record.scheduler.address or "an unknown address"
        raise CMLError(
            f"the scheduler of cluster {record.name!r} does not answer at {address}: to stop its "
            f"sessions, run `dask cml delete {shlex.quote(record.name)}`"
        )
    state.launcher.take_over(record)
    await join(state, record, patience)
    state.record_keeper.start()
    state.launcher.attach_launched(record)


async def follow(state: ClusterState, record: Record) -> None:
    """Connect to the scheduler that another manager has launched instead of a lost one."""
    await state.client.leave()
    state.launcher.take_over(record)
    await join(state, record, state.options.scheduler_timeout)


async def join(state: ClusterState, record: Record, timeout: float) -> None:
    """Connect to the scheduler, which may be busy."""
    scheduler = state.launcher.scheduler
    assert scheduler is not None
    assert scheduler.address is not None
    arguments = await asyncio.to_thread(tls.connection_args, state.launcher.security or Security())
    await state.client.join_within(timeout, scheduler.address, arguments, record.id)
