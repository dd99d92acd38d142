"""The commands that change clusters: ``dask cml scale``, ``adapt``, ``group``, ``delete`` and ``prune``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import click

from dask_cml.cli.console import (
    Command,
    as_json,
    cml,
    complete_names,
    echo,
    first_line_of,
    of_cluster,
    print_json,
    print_table,
    show,
)
from dask_cml.cli.create import OptionsCommand, given
from dask_cml.cli.show import record_of
from dask_cml.errors import CMLError
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.words import adapts, command, counted, pending

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

#: Seconds between two polls of what a command waits for.
_INTERVAL = 0.2
#: A number of workers. If it is none, click's error contains the name of the type.
_N_WORKERS = click.IntRange(min=0)
_N_WORKERS.name = "number of workers: expected a whole number"
#: The option that names the worker group of a command.
_in_group = click.option(
    "--group", "worker_group", default=DEFAULT_GROUP, show_default=True, metavar="GROUP", help="Worker group."
)
#: The arguments of a command on one group. The group's is the `name` of Python's methods.
_of_cluster = click.argument("cluster_name", metavar="NAME", shell_complete=complete_names)
_of_group = click.argument("name", metavar="GROUP")
#: The option that limits the time of a command.
_time_limit = click.option(
    "--timeout", type=click.FloatRange(min=0), default=600.0, show_default=True, help="Time limit in seconds."
)


@cml.command(context_settings={"ignore_unknown_options": True})  # -1 is a number
@of_cluster
@click.argument("n", type=_N_WORKERS)
@_in_group
@_time_limit
async def scale(name: str, n: int, worker_group: str, timeout: float) -> None:
    """Scale a cluster to N worker sessions.

    The command waits until the workers are connected.
    """
    async with connected(name) as cluster:
        scaling: Any = cluster.scale(n, worker_group=worker_group)
        await scaling
        await wait_for_scale(cluster, n, worker_group, timeout)
    echo(f"Cluster {name} scaled to {_n_workers(n, worker_group)}")


@cml.command(context_settings={"ignore_unknown_options": True})
@of_cluster
@click.argument("minimum", type=_N_WORKERS)
@click.argument("maximum", type=_N_WORKERS, required=False)
@_in_group
async def adapt(name: str, minimum: int, maximum: int | None, worker_group: str) -> None:
    """Let a cluster scale with its workload.

    It gets at least MINIMUM and at most MAXIMUM worker sessions. Without MAXIMUM, the maximum is the
    limit of the site, or 100. The command returns at once. The process that manages the cluster adapts it.
    """
    from dask_cml.records import store

    async with connected(name) as cluster:
        adaptive: Any = cluster.adapt(minimum, maximum, worker_group=worker_group)
    record = store.read(name)
    words = (
        f"Cluster {name} adapts between {adaptive.minimum} and {_n_workers(adaptive.maximum, worker_group)}"
    )
    if record.manager is None and record.scheduler.orphan_timeout is not None:
        words += f" as soon as a process manages it. In Python, run: CMLCluster.from_name({name!r})"
    echo(words)


def connected(name: str) -> AbstractAsyncContextManager[CMLCluster]:
    """Connect to a cluster to change it, until its files show the change."""
    from dask_cml.observers import changing

    return changing(record_of(name))


def _n_workers(n: int, group: str = DEFAULT_GROUP) -> str:
    """Return a number of workers with its noun, and with its group unless that is the default one."""
    workers = counted(n, "worker")
    return workers if group == DEFAULT_GROUP else f"{workers} in worker group {group}"


async def wait_for_scale(cluster: CMLCluster, n: int, group: str, timeout: float) -> None:
    """Wait until exactly n sessions of a worker group are connected, and show the progress.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster, which was scaled.
    n : int
        Number of worker sessions.
    group : str
        The worker group.
    timeout : float
        Maximum time to wait, in seconds.

    Raises
    ------
    CMLError
        If the cluster shuts down, gives up, is scaled by another process, or takes longer, or if the platform
        refuses some workers.
    """
    from distributed.core import Status

    name, deadline = cluster.options.name, time.monotonic() + timeout
    while True:
        target, n_arrived = cluster.groups.target(group), len(cluster.processes.arrived(group))
        queued = pending(cluster.processes.waits(cluster.sessions, group))
        words = f"{n_arrived} of {_n_workers(n, group)} connected" + (f", {queued}" if queued else "")
        show(words)
        if n_arrived == len(cluster.processes.known(group)) == n == target:
            show()
            return
        problem = cluster.problem
        if cluster.status != Status.running:
            raise CMLError(f"the cluster {name} has shut down: {problem or 'deleted'}")
        if target != n:
            raise CMLError(f"another process scales the cluster {name}: {_n_workers(target, group)} wanted")
        if group in cluster.sharing.role.view.shortages:
            raise CMLError(f"the cluster {name} has {cluster.sharing.role.view.shortages[group]}")
        if group in cluster.sharing.role.view.gave_up:
            raise CMLError(f"the cluster {name} launches {cluster.sharing.role.view.gave_up[group]}")
        if time.monotonic() > deadline:
            words += f": {problem}" if problem else ""
            raise CMLError(f"the cluster {name} did not scale within {timeout:g} s: {words}")
        try:
            await asyncio.sleep(_INTERVAL)
        except asyncio.CancelledError:  # Ctrl-C
            show()
            echo(f"Cluster {name} still scales to {_n_workers(n, group)}", err=True)
            raise


@cml.group()
def group() -> None:
    """Add, delete and list the worker groups of a cluster."""


@group.command("add", cls=OptionsCommand, grouped=True)
@_of_cluster
@_of_group
@_time_limit
async def add_group(cluster_name: str, name: str, timeout: float, **options: Any) -> None:
    """Add a worker group to a cluster, and wait until its workers are connected.

    Without an option, the group takes the cluster's value.
    """
    async with connected(cluster_name) as cluster:
        await cluster.add_worker_group(name, **given(options))
        n = cluster.groups.target(name)
        await wait_for_scale(cluster, n, name, timeout)
    echo(f"Worker group {name} added to cluster {cluster_name}: {_n_workers(n)}")


@group.command("delete", cls=Command)
@_of_cluster
@_of_group
async def delete_group(cluster_name: str, name: str) -> None:
    """Delete a worker group, and stop its sessions after its workers have moved their results to others."""
    show(f"Deleting worker group {name}")
    async with connected(cluster_name) as cluster:
        await cluster.delete_worker_group(name)
    show()
    echo(f"Worker group {name} deleted from cluster {cluster_name}")


@group.command("list")
@of_cluster
@as_json
def list_groups(name: str, as_json: bool) -> None:
    """List the worker groups of a cluster."""
    from dask_cml.records import operations

    groups = operations.worker_groups(record_of(name))
    if as_json:
        print_json(groups)
        return
    rows = []
    for group in groups:
        resources = " ".join(f"{name}={amount:g}" for name, amount in group["resources"].items())
        size = group["size"]
        sizes = [f"{size['cpu']:g}", f"{size['memory']:g} GiB", str(size["nvidia_gpu"])]
        workers = f"{group['n_arrived']} of {group['n_workers']}"
        workers += f" ({adapts(**group['adapts'])})" if group["adapts"] else ""
        rows.append([group["name"], workers, *sizes, resources or "-"])
    print_table(["group", "workers", "cpu", "memory", "gpus", "resources"], rows)


@cml.command()
@click.argument("names", nargs=-1, shell_complete=complete_names)
@click.option("--all", "everything", is_flag=True, help="Delete all clusters of the project.")
@click.option(
    "--reason", metavar="TEXT", help="Reason to note in the history. Default: who deletes the clusters."
)
async def delete(names: Sequence[str], everything: bool, reason: str | None) -> None:
    """Delete clusters, and stop all their sessions."""
    from dask_cml.records import operations, store

    if bool(names) == everything:
        raise click.UsageError(f"expected names of clusters, such as {command('delete', 'night')}, or --all")
    try:
        records = store.records() if everything else [record_of(name) for name in dict.fromkeys(names)]
    except (CMLError, ValueError) as error:
        raise CMLError(f"{error}. Nothing was deleted" if len(names) > 1 else str(error)) from None
    show(f"Deleting {counted(len(records), 'cluster')}")
    results = await operations.end_all(records, reason=reason)
    _report(results, "No clusters.")


@cml.command()
async def prune() -> None:
    """Delete stale clusters, and skip clusters that may be alive.

    A cluster is stale if its scheduler has certainly ended: it has closed, or its session has ended. Silence
    alone proves nothing. To delete a cluster that does not answer any more, run `dask cml delete NAME`.
    """
    from dask_cml.records import operations

    show("Looking for stale clusters")
    results, skipped = await operations.prune()
    show()
    for name, why in skipped.items():
        echo(f"Cluster {name} skipped: {why}. To delete it anyway: {command('delete', name)}", err=True)
    _report(results, "No stale clusters.")


def _report(results: dict[str, Any], none: str) -> None:
    """Print which clusters were deleted and which not; the command fails if one was not."""
    show()
    for name, error in results.items():
        if error is None:
            echo(f"Cluster {name} deleted")
        else:
            retry = f"To try again: {command('delete', name)}"
            echo(f"Error: cluster {name} not deleted: {first_line_of(error)}. {retry}", err=True)
    if not results:
        echo(none, err=True)
    if any(results.values()):
        raise click.exceptions.Exit(1)
