"""The commands that change clusters: ``dask cml scale``, ``adapt``, ``delete`` and ``prune``."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    run,
)

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster

_DELETED = "another process has deleted it"


@click.command()
@click.argument("name", shell_complete=complete_names)
@click.argument("n", type=click.IntRange(min=0))
@in_group
@click.option(
    "--timeout", type=click.FloatRange(min=0), default=600.0, show_default=True, help="Time limit in seconds."
)
@in_one_line
def scale(name: str, n: int, group: str, timeout: float) -> None:
    """Scale a cluster to N worker sessions, and wait until they are connected."""
    with rebuilt(name) as cluster:
        cluster.scale(n, worker_group=group)
        with progress(lambda: here(cluster, n, group)):
            wait_for_scale(cluster, n, group, timeout)
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
    from dask_cml.errors import CMLError

    def target() -> int:
        return cluster._fleet.group(group).target

    with rebuilt(name) as cluster:
        try:
            cluster.adapt(minimum=minimum, maximum=maximum, worker_group=group)
            cluster.sync(cluster._carry_out)
            bounds = f"{minimum} and {n_workers(maximum, group)}"
            click.echo(f"Cluster {name} adapts between {bounds} until Ctrl-C")
            with progress(lambda: here(cluster, target(), group)):
                while cluster.status.name == "running" and cluster._fleet.group(group).driver is not None:
                    time.sleep(INTERVAL)
        except KeyboardInterrupt:
            if cluster._leadership.served:
                click.echo(f"The page of `dask cml serve` continues to adapt cluster {name}")
            else:
                click.echo(f"Cluster {name} keeps {n_workers(target(), group)} and no longer adapts")
            return
        if cluster.status.name == "running":
            raise CMLError(f"the cluster {name} no longer adapts: another manager scales it")
        raise CMLError(f"the cluster {name} has shut down: {cluster._reconciler.problem or _DELETED}")


@contextmanager
def rebuilt(name: str) -> Iterator[CMLCluster]:
    """Rebuild the manager of a cluster for the time of a ``with`` block; the cluster runs on."""
    from dask_cml.cluster import CMLCluster

    cluster = CMLCluster.from_name(name, quiet=True, silence_logs="WARNING")
    try:
        yield cluster
    finally:
        cluster.leave()


def here(cluster: CMLCluster, n: int, group: str) -> str:
    """Return in words how many of n worker sessions are connected, and how many wait for room."""
    from dask_cml.manager.waiting import waiting_workers

    waits = [waited for key, waited in cluster._fleet.waits.items() if cluster._fleet.group_of(key) == group]
    words = waiting_workers(waits)
    n_arrived = cluster._n_arrived(cluster._fleet.group(group))
    return f"{n_arrived} of {n_workers(n, group)} connected" + f", {words}" * bool(words)


def wait_for_scale(cluster: CMLCluster, n: int, group: str, timeout: float) -> None:
    """Wait until exactly n sessions of a worker group are connected.

    Parameters
    ----------
    cluster : CMLCluster
        The cluster, which has been scaled.
    n : int
        Worker sessions.
    group : str
        The worker group.
    timeout : float
        Seconds to wait.

    Raises
    ------
    CMLError
        If the cluster shuts down, gives up, is scaled by another manager, or takes longer.
    """
    from dask_cml.errors import CMLError

    deadline = time.monotonic() + timeout

    def is_done() -> bool:
        sessions = [key for key in cluster.workers if cluster._fleet.group_of(key) == group]
        n_arrived = cluster._n_arrived(cluster._fleet.group(group))
        return cluster._leadership.leads and n_arrived == len(sessions) == n

    # The number may be right already, but other managers must hear of the target.
    cluster.sync(cluster._carry_out)
    while not is_done():
        problem = cluster._reconciler.problem
        if cluster.status.name != "running":
            raise CMLError(f"the cluster {cluster.name} has shut down: {problem or _DELETED}")
        if (target := cluster._fleet.group(group).target) != n:
            other = "" if cluster._leadership.leads else "another manager scales it: "
            raise CMLError(
                f"the cluster {cluster.name} has {problem or f'{other}{n_workers(target, group)} wanted'}"
            )
        if cluster._reconciler.backoffs.of(group).gave_up:
            raise CMLError(f"the cluster {cluster.name} launches {problem}")
        if time.monotonic() > deadline:
            why = f": {problem}" if problem else ""
            state = f"{here(cluster, n, group)}{why}"
            raise CMLError(f"the cluster {cluster.name} did not scale within {timeout:g} s: {state}")
        time.sleep(INTERVAL)


@click.command()
@click.argument("names", nargs=-1, shell_complete=complete_names)
@click.option("--all", "everything", is_flag=True, help="Delete all clusters of the project.")
@in_one_line
def delete(names: Sequence[str], everything: bool) -> None:
    """Delete clusters: stop all their sessions and remove their records."""
    from dask_cml.records import operations, store

    if bool(names) == everything:
        raise click.UsageError(f"expected names of clusters, such as `{_delete('night')}`, or --all")
    records = store.records() if everything else [store.read(name) for name in dict.fromkeys(names)]
    with progress(lambda: f"Deleting {len(records)} cluster{'s' * (len(records) != 1)}"):
        results = run(operations.end_all(records))
    _report(results, "No clusters.")


@click.command()
@in_one_line
def prune() -> None:
    """Delete dead clusters, and skip those that may be alive.

    A cluster is dead if the platform lists its scheduler's session as ended, or if its scheduler has been
    silent for two minutes.
    """
    from dask_cml.records import operations

    with progress(lambda: "Looking for dead clusters"):
        results, passed_over = run(operations.prune())
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
