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


@click.command()
@click.argument("name", shell_complete=complete_names)
@click.argument("n", type=click.IntRange(min=0))
@in_group
@click.option(
    "--timeout", type=click.FloatRange(min=0), default=600.0, show_default=True, help="Seconds to wait."
)
@in_one_line
def scale(name: str, n: int, group: str, timeout: float) -> None:
    """Scale to N worker sessions and wait for them."""
    with rebuilt(name) as cluster:
        cluster.scale(n, worker_group=group)
        with progress(lambda: here(cluster, n, group)):
            wait_for_scale(cluster, n, group, time.monotonic() + timeout)
    click.echo(f"{name} has {n_workers(n, group)}")


@click.command()
@click.argument("name", shell_complete=complete_names)
@click.argument("minimum", type=click.IntRange(min=0))
@click.argument("maximum", type=click.IntRange(min=0))
@in_group
@in_one_line
def adapt(name: str, minimum: int, maximum: int, group: str) -> None:
    """Scale with the work for as long as this command runs; end it with Ctrl-C.

    If `dask cml serve` runs in the project, it goes on to adapt the cluster then.
    """
    from dask_cml.errors import CMLError

    def target() -> int:
        return cluster._fleet.group(group).target

    with rebuilt(name) as cluster:
        try:
            cluster.adapt(minimum=minimum, maximum=maximum, worker_group=group)
            cluster.sync(cluster._carry_out)
            bounds = f"{minimum} and {n_workers(maximum, group)}"
            click.echo(f"{name} adapts between {bounds} while this command runs.")
            with progress(lambda: here(cluster, target(), group)):
                while cluster.status.name == "running" and cluster._fleet.group(group).driver is not None:
                    time.sleep(INTERVAL)
        except KeyboardInterrupt:
            if cluster._leadership.served:
                click.echo(f"The page of `dask cml serve` goes on to adapt {name}.")
            else:
                click.echo(f"{name} keeps {n_workers(target(), group)} and does not adapt any more.")
            return
        if cluster.status.name == "running":
            raise CMLError(f"{name} does not adapt any more: another manager scales it")
        raise CMLError(f"{name} has ended: {cluster._reconciler.problem or 'another process has deleted it'}")


@contextmanager
def rebuilt(name: str) -> Iterator[CMLCluster]:
    """Give the manager of a cluster for a while."""
    from dask_cml.cluster import CMLCluster

    cluster = CMLCluster.from_name(name, quiet=True, silence_logs="WARNING")
    try:
        yield cluster
    finally:
        cluster.leave()


def here(cluster: CMLCluster, n: int, group: str) -> str:
    """Return how many of n workers have come, and how many sessions wait for room."""
    from dask_cml.manager.waiting import waiting_workers

    waits = [waited for key, waited in cluster._fleet.waits.items() if cluster._fleet.group_of(key) == group]
    words = waiting_workers(waits)
    n_arrived = cluster._n_arrived(cluster._fleet.group(group))
    return f"{n_arrived} of {n_workers(n, group)} here" + f", {words}" * bool(words)


def wait_for_scale(cluster: CMLCluster, n: int, group: str, deadline: float) -> None:
    """Wait until a worker group has n workers and no others, and this manager has told that it was asked."""
    from dask_cml.errors import CMLError

    def is_done() -> bool:
        sessions = [key for key in cluster.workers if cluster._fleet.group_of(key) == group]
        n_arrived = cluster._n_arrived(cluster._fleet.group(group))
        return cluster._leadership.leads and n_arrived == len(sessions) == n

    # What is there may be as many as are wanted, but other managers must hear of it.
    cluster.sync(cluster._carry_out)
    while not is_done():
        problem = cluster._reconciler.problem
        if cluster.status.name != "running":
            raise CMLError(f"{cluster.name} has ended: {problem or 'another process has deleted it'}")
        if (target := cluster._fleet.group(group).target) != n:
            other = "" if cluster._leadership.leads else "another manager scales it: "
            raise CMLError(f"{cluster.name} has {problem or f'{other}{n_workers(target, group)} wanted'}")
        if cluster._reconciler.backoffs.of(group).gave_up:
            raise CMLError(f"{cluster.name} launches {problem}")
        if time.monotonic() > deadline:
            why = f": {problem}" if problem else ""
            raise CMLError(f"{cluster.name} has {here(cluster, n, group)}, and the time is up{why}")
        time.sleep(INTERVAL)


@click.command()
@click.argument("names", nargs=-1, shell_complete=complete_names)
@click.option("--all", "everything", is_flag=True, help="All clusters of the project.")
@in_one_line
def delete(names: Sequence[str], everything: bool) -> None:
    """End clusters: every session of theirs is stopped."""
    from dask_cml.records import operations, store

    if bool(names) == everything:
        raise click.UsageError("give names of clusters, or --all")
    records = store.records() if everything else [store.read(name) for name in dict.fromkeys(names)]
    with progress(lambda: f"{len(records)} cluster{'s' * (len(records) != 1)} being ended"):
        results = run(operations.end_all(records))
    _tell_ends(results, "there is no cluster")


@click.command()
@in_one_line
def prune() -> None:
    """Delete dead clusters, and pass over those that may live.

    A dead cluster's scheduler has ended by the platform's list, or has been silent for two minutes.
    """
    from dask_cml.records import operations

    with progress(lambda: "Looking for dead clusters"):
        results, passed_over = run(operations.prune())
    for name, why in passed_over.items():
        command = f"`dask cml delete {shlex.quote(name)}`"
        click.echo(f"{name} is passed over: {why}. To delete it all the same: {command}", err=True)
    _tell_ends(results, "no cluster is dead")


def _tell_ends(results: dict[str, Any], none: str) -> None:
    for name, error in results.items():
        if error is None:
            click.echo(f"{name} is deleted")
        else:
            click.echo(f"Error: {name}: {first_line_of(error)}", err=True)
    if not results:
        click.echo(none, err=True)
    if any(results.values()):
        raise click.exceptions.Exit(1)
