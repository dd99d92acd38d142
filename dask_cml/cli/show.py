"""The commands that only read: ``dask cml list``, ``info``, ``history``, ``logs`` and ``doctor``."""

from __future__ import annotations

import functools
import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from dask_cml.cli.console import (
    as_json,
    cml,
    complete_names,
    echo,
    first_line_of,
    of_cluster,
    print_json,
    print_table,
)
from dask_cml.errors import CMLError, NoSuchCluster
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.words import adapting, adapts, command, counted, format_duration, format_time, idle, waiting

if TYPE_CHECKING:
    from dask_cml.records.history import EndedCluster, SessionHours, Usage
    from dask_cml.records.store import Record

#: Seconds between two reads of the logs. A read opens every log, which is a call of the file server.
_FOLLOW_INTERVAL = 0.5
_NO_MANAGER = "no process: lost workers are not replaced, and nothing adapts until you run"
_MANAGER_SOON = "no process. Its scheduler's session takes over in some seconds"
_NO_CLUSTERS = "No clusters. Create one: dask cml create --n-workers 2"
_COLUMNS = ("name", "status", "workers", "threads", "memory", "tasks", "by", "age", "dashboard")


@cml.command(name="list")
@as_json
async def list_clusters(as_json: bool) -> None:
    """List the clusters of the project, and their problems."""
    from dask_cml.records import operations, store

    rows = await operations.describe(store.records())
    if as_json:
        print_json(rows)
        return
    if not rows:
        echo(_NO_CLUSTERS, err=True)
        return
    print_table(_COLUMNS, [[*_cells(row).values()] for row in rows])
    for row in rows:
        if row["problem"]:
            heading, words = _problem_of(row)
            echo(f"{heading} of {row['name']}: {words}")


def _problem_of(row: dict[str, Any]) -> tuple[str, str]:
    """Return a cluster's problem or end in one line, with the command that removes it or the rest."""
    words, delete = first_line_of(row["problem"]), f"run {command('delete', row['name'])}"
    if row["status"] == "stale":
        return "End", f"{words}; {delete}"
    return "Problem", f"{words}; if this persists, {delete}" if row["status"] == "not answering" else words


def _cells(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a cluster's row, with the queued sessions."""
    from dask.utils import format_bytes

    shown = row | {"age": format_duration(row["age"]), "tasks": None}
    if row["status"] == "running":
        shown["tasks"] = "busy" if row["idle"] is None else idle(row["idle"])
    if row["memory"] is not None:
        shown["memory"] = format_bytes(row["memory"])
    cells = {column: "-" if shown[column] is None else str(shown[column]) for column in _COLUMNS}
    if row["waiting"]:
        words = waiting(row["waiting_for"])
        if row["workers"] is None:
            cells["status"] += f", {words}"
        else:
            cells["workers"] += f" ({row['waiting']} {words})"
    if row["adapts"]:
        bounds = adapting(row["adapts"], row["groups"] or {DEFAULT_GROUP, *row["adapts"]})
        cells["workers"] += f" ({bounds}{_as_soon(row)})"
    return cells


def _as_soon(row: dict[str, Any]) -> str:
    """Return the words for a cluster that runs and does not adapt, because no process manages it."""
    is_unmanaged = row["status"] == "running" and row["manager"] is None
    return " as soon as a process manages it" if is_unmanaged else ""


@cml.command()
@click.argument("name", required=False, shell_complete=complete_names)
@as_json
async def info(name: str | None, as_json: bool) -> None:
    """Show one cluster: its sessions, worker groups and usage.

    NAME may be left out if the project has one cluster.
    """
    from dask_cml.records import history, operations

    record = _the_only_record() if name is None else record_of(name)
    [row] = await operations.describe([record])
    usage = history.usage_of(record, history.end_of(record))
    row["created"], row["folder"] = record.created.isoformat(), str(record.folder)
    sessions = dict(sorted(record.sessions.items(), key=lambda item: (item[1] != "scheduler", item[1])))
    # Sessions of the local platform end with no other session.
    owned = [launch for launch in record.launches.values() if launch.owner and record.maker.session]
    owners = {launch.id: launch.owner for launch in owned}
    if as_json:
        row |= {
            "usage": usage.to_json(),
            "cost": usage.total.cost,
            "security": record.security is not None,
            "creator": asdict(record.maker),
            "sessions": sessions,
            "owners": owners,
        }
        print_json(row)
        return
    manager = row["manager"]
    if manager is None and row["status"] == "running":
        manager = _MANAGER_SOON if record.scheduler.manages_soon else f"{_NO_MANAGER} {_repeated(record)}"
    values = {"name": row["name"], "status": row["status"]}
    if row["problem"]:
        heading, words = _problem_of(row)
        values[heading.lower()] = words
    values |= _cells(row) | {
        "address": row["address"],
        "ends": "; ".join(row["ends"]) or ("" if row["status"] == "stale" else "not by itself"),
        "scheduler": row["scheduler"],
        "manager": manager,
        "created": row["created"],
        "folder": row["folder"],
        "security": "none" if record.security is None else "TLS with its own keys",
        "creator": f"process {record.maker.pid} on {record.maker.host}",
    }
    lines = [*values.items()]
    later = _as_soon(row)
    for group in operations.worker_groups(record):
        name = group["name"]
        sizes = [f"{name}={n:g}" for name, n in group["size"].items() if isinstance(n, (int, float))]
        connected = (row["groups"] or {}).get(name, "-")
        bounds = f", {adapts(*row['adapts'][name])}{later}" if name in row["adapts"] else ""
        workers = counted(connected, "Dask worker")
        lines.append(("group", f"{name}  {workers} connected{bounds}, {' '.join(sizes)}"))
    doubt = "  if it still runs" if row["status"] == "stale" else ""
    for session, role in sessions.items():
        owner = f"  ends with the session {owners[session]}" if session in owners else ""
        lines.append(("session", f"{session}  {role}{owner}{doubt}"))
    _print(lines, usage)


def _repeated(record: Record) -> str:
    """Return the command that asks for what is wanted of a cluster: then, a process manages it."""
    if record.bounds:
        group, bounds = next(iter(record.bounds.items()))
        return command("adapt", record.name, *bounds, group=group)
    return command("scale", record.name, record.scheduler.groups[DEFAULT_GROUP].target)


def record_of(name: str) -> Record:
    """Return the record of a cluster. The error for one that has ended names the command that shows it."""
    from dask_cml.checks import cluster_name
    from dask_cml.records import store

    try:
        return store.read(name)
    except NoSuchCluster as error:
        cluster_name("NAME", name, "connect")  # whether any cluster can have it
        if _ended(name):
            raise CMLError(f"{error}. It has ended: run {command('history', name)}") from None
        raise


def _ended(name: str) -> list[EndedCluster]:
    """Return the clusters with a name that have ended, the last one first."""
    from dask_cml.records import history

    return [cluster for cluster in history.ended_clusters() if cluster.name == name]


def _the_only_record() -> Record:
    """Return the record of the only cluster of the project."""
    from dask_cml.records import store

    records = store.records()
    if len(records) != 1:
        names = ", ".join(record.name for record in records)
        raise click.UsageError(f"expected the name of a cluster: {names}" if names else _NO_CLUSTERS)
    return records[0]


@cml.command(name="history")
@click.argument("name", required=False)
@click.option("--since", metavar="TIME", help="Only clusters that ended within this time, such as 7d or 12h.")
@click.option("--by", metavar="USER", help="Only clusters that this user created.")
@as_json
async def ended(name: str | None, since: str | None, by: str | None, as_json: bool) -> None:
    """List the clusters that have ended, or show one.

    With NAME, the command shows the last cluster with this name. Times are in UTC. The hours are sums
    over all sessions. Costs appear if the site has set prices.
    """
    from dask_cml.checks import seconds
    from dask_cml.records import operations

    after = 0.0 if since is None else time.time() - seconds("since", since, "or a time such as 7d or 12h")
    clusters = [
        cluster
        for cluster in await operations.ended_clusters()
        if cluster.ended >= after and name in (None, cluster.name) and by in (None, cluster.user)
    ]
    if as_json:
        print_json([cluster.describe() for cluster in clusters])
    elif name is None:
        _print_ended(clusters)
    elif clusters:
        _print_one(clusters[0])
    else:
        raise CMLError(f"no ended cluster named {name!r}: to list all, run `dask cml history`")


def _print_ended(clusters: Sequence[EndedCluster]) -> None:
    from dask_cml.records.history import SessionHours

    if not clusters:
        echo("No ended clusters.", err=True)
        return
    rows = []
    for cluster in clusters:
        ended, duration = format_time(cluster.ended), format_duration(cluster.duration)
        hours = _hours(cluster.usage.total)
        rows.append([cluster.name, cluster.user or "-", ended, duration, *hours, cluster.why])
    total = sum((cluster.usage.total for cluster in clusters), SessionHours())
    rows.append(["total", "", "", "", *_hours(total), ""])
    columns = ["name", "by", "ended", "duration", "sessions", "vCPU hours", "GiB hours", "GPU hours"]
    print_table([*columns, *["cost"] * (len(rows[0]) - len(columns) - 1), "why"], rows)


def _hours(used: SessionHours) -> list[str]:
    """Return the cells of a usage: sessions, hours and, if the site has prices, the cost."""
    amounts = [used.vcpu_hours, used.gib_hours, used.gpu_hours, used.cost]
    return [str(used.sessions), *(f"{amount:,.2f}" for amount in amounts if amount is not None)]


def _print_one(cluster: EndedCluster) -> None:
    from dask_cml.records.history import where_logs_are

    values = {
        "name": cluster.name,
        "by": cluster.user,
        "session": cluster.session,
        "created": format_time(cluster.created),
        "ended": f"{format_time(cluster.ended)}, after {format_duration(cluster.duration)}",
        "why": cluster.why,
        "tasks": cluster.task_words,
        "workers": f"{cluster.most_workers} at most",
    }
    lines = [*values.items(), *(("failed", failure) for failure in cluster.failures)]
    _print([*lines, ("logs", where_logs_are(cluster))], cluster.usage)


def _print(lines: Iterable[tuple[str, str | None]], usage: Usage) -> None:
    """Print lines with their keys, and a table of the usage."""
    for key, text in [*lines, *(("usage", line) for line in repr(usage).splitlines())]:
        if text:
            echo(f"{key:<10} {text}")


@cml.command()
@of_cluster
@click.argument("workers", nargs=-1, metavar="[WORKER]...")
@click.option(
    "-f", "--follow", is_flag=True, help="Print new lines until Ctrl-C, or until the cluster shuts down."
)
@click.option("--tail", type=click.IntRange(min=1), metavar="N", help="Only the last N lines of each log.")
@click.option("--warnings", is_flag=True, help="Only warnings and errors.")
def logs(name: str, workers: Sequence[str], follow: bool, tail: int | None, warnings: bool) -> None:
    """Print the logs of a cluster, even after it has ended.

    WORKER is the name of a worker, "Cluster" or "Scheduler". Without it, the command prints all logs.
    """
    from dask_cml.records import store

    record = store.find(name)
    if record is None:
        clusters = _ended(name)
        if not clusters:
            record_of(name)  # says which clusters exist
        session_logs, launched = clusters[0].logs(), []
        echo(f"Cluster {name} ended at {format_time(clusters[0].ended)}: {clusters[0].why}", err=True)
    else:
        session_logs = record.logs()
        launched = [key for key in record.sessions.values() if key != "scheduler"]
    chosen = session_logs.choose(workers, launched) if workers else None
    read = functools.partial(session_logs.lines, chosen)
    followed = record if follow else None
    last: str | None = None
    for session, line in _lines(read, followed, tail, warnings):
        if session != last:
            if last is not None:
                echo()
            echo(f"==> {session} <==")
            last = session
        echo(line)
    if last is None:
        what = "warnings" if warnings else "logs"
        echo(f"No {what} of cluster {name}" if record is None else f"No {what} of {name} yet", err=True)
    if followed is not None:
        echo(f"Cluster {name} shut down", err=True)


def _lines(
    read: Callable[..., Iterable[tuple[str, str]]], followed: Record | None, tail: int | None, warnings: bool
) -> Iterator[tuple[str, str]]:
    """Yield lines of logs with their sessions, first the last `tail` lines of each, until a cluster ends."""
    from dask_cml.records import store
    from dask_cml.sessions.session_logs import CLUSTER, Warnings

    picks: defaultdict[str, Warnings] = defaultdict(Warnings)

    def is_wanted(line: tuple[str, str]) -> bool:
        # The cluster's own log has no levels: it contains what its users were told.
        return not warnings or line[0] == CLUSTER or picks[line[0]](line[1])

    first = filter(is_wanted, read(whole=followed is None))
    for _, log in itertools.groupby(first, lambda line: line[0]):
        yield from deque(log, maxlen=tail)
    while followed is not None:
        runs = not store.is_removed(followed)
        yield from filter(is_wanted, read(whole=not runs))
        if not runs:
            break
        time.sleep(_FOLLOW_INTERVAL)


@cml.command()
@click.argument("names", nargs=-1, shell_complete=complete_names)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Time limit of each check in seconds.",
)
@as_json
def doctor(names: Sequence[str], timeout: float, as_json: bool) -> None:
    """Check this environment and running clusters.

    For a problem, the command prints a command that fixes it. NAMES are the clusters to check, by default
    all of the project. The exit code is 1 if a check fails.
    """
    from dask_cml.doctor import examine

    findings = []
    for finding in examine(names, timeout):
        findings.append(finding)
        if not as_json:
            click.echo(finding.render())
    if as_json:
        print_json([asdict(finding) for finding in findings])
    if any(finding.state == "wrong" for finding in findings):
        raise click.exceptions.Exit(1)
