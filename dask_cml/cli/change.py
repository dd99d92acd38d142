"""The commands that change clusters: ``dask cml scale``, ``adapt``, ``delete`` and ``prune``."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

from dask_cml.cli.console import (
    INTERVAL,
    complete_names,
    first_line_of,
    in_group,
    in_one_line,
    n_workers,
    progress,
    time_limit,
)

if TYPE_CHECKING:
    from dask_cml.manager.manager import Manager

_DELETED = "another process has deleted it"


@click.command()
@click.argument("name", shell_complete=complete_names)
@click.argument("n", type=click.IntRange(min=0))
@in_group
@time_limit
@in_one_line
async def scale(name: str, n: int, group: str, timeout: float) -> None:
    """Scale a cluster to N worker sessions, and wait until they are connected."""
    async with managing(name) as manager:
        manager.wishes.scale(n, group)
        await wait_for_scale(manager, n, group, timeout)
    click.echo(f"Cluster {name} scaled to {n_workers(n, group)}")


@click.command()
@click.argument("name", shell_complete=complete_names)
@click.argument("minimum", type=click.IntRange(min=0))
@click.argument("maximum", type=click.IntRange(min=0))
@in_group
@in_one_line
def adapt(name: str, minimum: int, maximum: int, group: str) -> None:
    """Scale a cluster with its workload, between MINIMUM and MAXIMUM worker sessions, until Ctrl-C.

    After Ctrl-C, the cluster keeps its workers. If `dask cml serve` runs in the project, it continues to
    adapt the cluster.
    """
    try:
        if asyncio.run(_adapt(name, minimum, maximum, group)):
            click.echo(f"Cluster {name} adapts between {minimum} and {n_workers(maximum, group)}")
    except KeyboardInterrupt:
        return


async def _adapt(name: str, minimum: int, maximum: int, group: str) -> bool:
    """Adapt a cluster until Ctrl-C. Return True at once if another manager does it."""
    from distributed.core import Status

    from dask_cml.errors import CMLError
    from dask_cml.manager.adaptive import CMLAdaptive

    async with managing(name) as manager:
        state = manager.state
        manager.fleet.group(group)  # raises the error of an unknown group
        if minimum > maximum:
            raise ValueError(f"invalid maximum={maximum}: expected at least the minimum, {minimum}")
        adaptive = CMLAdaptive(manager.wishes, worker_group=group, minimum=minimum, maximum=maximum)
        manager.wishes.adapt(adaptive, group)
        await manager.wishes.settle()
        if not state.leads:
            return True
        limits = f"{minimum} and {n_workers(maximum, group)}"
        click.echo(f"Cluster {name} adapts between {limits} until Ctrl-C")
        try:
            with progress(lambda: here(manager, len(adaptive.plan), group)):
                while state.status == Status.running and not adaptive.released:  # noqa: ASYNC110
                    await asyncio.sleep(INTERVAL)
        except asyncio.CancelledError:
            if state.alone:
                manager.wishes.stop_adapting(group, adaptive.key)
                kept = n_workers(manager.fleet.group(group).target, group)
                click.echo(f"Cluster {name} keeps {kept} and no longer adapts")
            else:
                click.echo(f"Another manager continues to adapt cluster {name}")
            raise
        if state.status == Status.running:
            raise CMLError(f"the cluster {name} no longer adapts: another manager scales it")
        raise CMLError(f"the cluster {name} has shut down: {state.problem or _DELETED}")


@asynccontextmanager
async def managing(name: str) -> AsyncIterator[Manager]:
    """Manage a cluster for the time of an ``async with`` block. The cluster runs on."""
    from distributed.utils import silence_logging_cmgr

    from dask_cml.manager.manager import Manager
    from dask_cml.records import store

    with silence_logging_cmgr(logging.WARNING):
        manager = Manager.adopt(store.read(name))
        await manager.start()
        try:
            yield manager
        finally:
            await manager.close(shutdown=False)


def here(manager: Manager, n: int, group: str) -> str:
    """Return in words how many of n worker sessions are connected, and how many wait for room."""
    from dask_cml.display.words import waiting_workers

    fleet = manager.fleet
    mine = {each.name for each in fleet.members if each.group == group}
    words = waiting_workers([waited for name, waited in fleet.waits.items() if name in mine])
    return f"{len(fleet.arrived(group))} of {n_workers(n, group)} connected" + f", {words}" * bool(words)


async def wait_for_scale(manager: Manager, n: int, group: str, timeout: float) -> None:
    """Wait until exactly n sessions of a worker group are connected, and show the progress.

    Parameters
    ----------
    manager : Manager
        The cluster's manager, which has scaled it.
    n : int
        Number of worker sessions.
    group : str
        The worker group.
    timeout : float
        Maximum time to wait, in seconds.

    Raises
    ------
    CMLError
        If the cluster shuts down, gives up, is scaled by another manager, or takes longer.
    """
    from distributed.core import Status

    from dask_cml.errors import CMLError

    name, state, fleet = manager.options.name, manager.state, manager.fleet
    deadline = time.monotonic() + timeout
    await manager.wishes.settle()
    with progress(lambda: here(manager, n, group)):
        while True:
            there = [each for each in fleet.members if each.group == group]
            if len(fleet.arrived(group)) == len(there) == n:
                return
            problem = state.problem
            if state.status != Status.running:
                raise CMLError(f"the cluster {name} has shut down: {problem or _DELETED}")
            if (target := fleet.group(group).target) != n:  # raises the error of a deleted group
                other = f"another manager scales the cluster {name}: {n_workers(target, group)} wanted"
                raise CMLError(f"the cluster {name} has {problem}" if problem else other)
            if state.gave_up(group):
                raise CMLError(f"the cluster {name} launches {problem}")
            if time.monotonic() > deadline:
                words = f"{here(manager, n, group)}" + f": {problem}" * bool(problem)
                raise CMLError(f"the cluster {name} did not scale within {timeout:g} s: {words}")
            await asyncio.sleep(INTERVAL)


@click.command()
@click.argument("names", nargs=-1, shell_complete=complete_names)
@click.option("--all", "everything", is_flag=True, help="Delete all clusters of the project.")
@in_one_line
async def delete(names: Sequence[str], everything: bool) -> None:
    """Delete clusters: stop all their sessions and remove their records."""
    from dask_cml.records import operations, store

    if bool(names) == everything:
        raise click.UsageError(f"expected names of clusters, such as `{_delete('night')}`, or --all")
    removed = {record.name: record for record in store.records(removed=True)}
    if everything:
        records = [*store.records(), *removed.values()]
    else:
        records = [removed.get(name) or store.read(name) for name in dict.fromkeys(names)]
    with progress(lambda: f"Deleting {len(records)} cluster{'s' * (len(records) != 1)}"):
        results = await operations.end_all(records)
    _report(results, "No clusters.")


@click.command()
@in_one_line
async def prune() -> None:
    """Delete dead clusters, and skip those that may be alive.

    A cluster is dead if the platform lists its scheduler's session as ended, or if its scheduler has been
    silent for two minutes.
    """
    from dask_cml.records import operations

    with progress(lambda: "Looking for dead clusters"):
        results, passed_over = await operations.prune()
    for name, why in passed_over.items():
        click.echo(f"Cluster {name} skipped: {why}. To delete it all the same: `{_delete(name)}`", err=True)
    _report(results, "No dead clusters.")


def _delete(name: str) -> str:
    return f"dask cml delete {shlex.quote(name)}"


def _report(results: dict[str, Any], none: str) -> None:
    """Print which clusters were deleted and which not; the command fails if one was not."""
    for name, error in results.items():
        if error is None:
            click.echo(f"Cluster {name} deleted")
        else:
            again = f"To try again: `{_delete(name)}`"
            click.echo(f"Error: cluster {name} not deleted: {first_line_of(error)}. {again}", err=True)
    if not results:
        click.echo(none, err=True)
    if any(results.values()):
        raise click.exceptions.Exit(1)
