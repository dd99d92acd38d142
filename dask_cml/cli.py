"""``dask cml``: make, find, steer and end clusters from a shell."""

from __future__ import annotations

import functools
import json
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dask_cml.cluster import CMLCluster
    from dask_cml.records.record import Record
    from dask_cml.sessions.session_logs import SessionLogs

# Dask imports this with every one of its commands, so what takes long to import is imported where it is used.

_INTERVAL = 0.2
#: Every log is opened at each look, which is a call of the file server.
_FOLLOW_INTERVAL = 0.5
_WIDEST = 10_000
_PATIENCE = 5.0
_INTERRUPTED = 130  # as shells say it
_IDLE_TIMEOUT = "1 hour"
_NEVER = "never"
#: What concerns this process, or makers that stay, is not an option of a cluster that is left to itself.
_NO_OPTIONS = ("create-mode", "shutdown-on-close", "orphan-timeout", "forward-dashboard")


def _names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a cluster."""
    from dask_cml.records import store

    given = context.params.get(str(parameter.name)) or ()
    return [r.name for r in store.records() if r.name.startswith(incomplete) and r.name not in given]


def _in_one_line(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the errors that a user can do something about in one line, without a traceback."""

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        import asyncio

        from dask_cml.errors import CMLError

        try:
            return function(*args, **kwargs)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(_INTERRUPTED) from None
        except BrokenPipeError:  # click knows what to do
            raise
        except (CMLError, ValueError, TypeError, ImportError, OSError, asyncio.TimeoutError) as error:
            raise click.ClickException(_first_line(error)) from error

    return told


def _first_line(error: object) -> str:
    from dask_cml.manager.display import first_line

    return first_line(str(error)) or type(error).__name__


class _CreateCommand(click.Command):
    """A command with one option for each option of a cluster, as the schema of the configuration has them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *_cluster_options()]


@functools.cache
def _cluster_options() -> list[click.Parameter]:
    import inspect

    import yaml

    from dask_cml.cluster import CMLCluster

    arguments = inspect.signature(CMLCluster).parameters
    schema = yaml.safe_load(Path(__file__).with_name("cml-schema.yaml").read_text())
    options: list[click.Parameter] = []
    for key, about in schema["properties"]["cml"]["properties"].items():
        if key.replace("-", "_") not in arguments or key in _NO_OPTIONS:
            continue
        types = about.get("type", "string")
        types = [types] if isinstance(types, str) else types
        declaration = f"--{key}"
        text = " ".join(about["description"].split()).replace("`", "")
        more: dict[str, Any] = {}
        if key == "idle-timeout":
            text = text.replace("By default never.", f'By default {_IDLE_TIMEOUT}; "{_NEVER}" is allowed.')
        if "boolean" in types:
            declaration, more = f"--{key}/--no-{key}", {"default": None}
        elif "array" in types:
            more = {"callback": _words, "metavar": "ARGUMENTS"}
            text = f'{text} In one word for the shell: --{key} "--option 1".'
        elif "object" in types:
            more = {"multiple": True, "callback": _pairs, "metavar": "NAME=VALUE"}
            text = f"{text} May be given more than once."
        elif "enum" in about:
            more = {"type": click.Choice(about["enum"])}
        elif "string" not in types:
            more = {"type": int if "integer" in types else float}
        options.append(click.Option([declaration], help=text, **more))
    return options


def _words(context: click.Context, parameter: click.Parameter, value: str | None) -> list[str] | None:
    try:
        return None if value is None else shlex.split(value)
    except ValueError as error:
        raise click.BadParameter(
            f"expected words for a shell, got {value!r}: {error}", context, parameter
        ) from None


def _pairs(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict | None:
    wrong = [value for value in values if "=" not in value]
    if wrong:
        raise click.BadParameter(f"expected NAME=VALUE, got {wrong[0]!r}", context, parameter)
    pairs = dict(value.split("=", 1) for value in values)
    if parameter.name != "env":
        return {name: _number_or_text(value) for name, value in pairs.items()} or None
    return pairs or None


def _number_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


@click.group()
def cml() -> None:
    """Dask clusters on Cloudera Machine Learning sessions."""
    # dask-ctl, where it is installed, is imported with every command of Dask's, and has signals handled by an
    # event loop that does not run: Ctrl-C would be without effect.
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if getattr(signal.getsignal(number), "__module__", None) == "distributed.cli.utils":
            signal.signal(number, default)


@cml.command(cls=_CreateCommand)
@click.argument("spec", required=False, type=click.Path(exists=True, dir_okay=False))
@_in_one_line
def create(spec: str | None, **options: Any) -> None:
    """Create a cluster that runs on when this command ends.

    The cluster can run until the CML session ends in which this command runs. The command waits until the
    scheduler answers and the workers are granted, and prints the cluster's name. SPEC is a file as dask-ctl
    takes it, whose arguments the options override.
    """
    import dask.config

    from dask_cml.cluster import CMLCluster
    from dask_cml.sessions.owner import lifetime

    positional, arguments = _read_spec(spec) if spec else ([], {})
    arguments.update({name: value for name, value in options.items() if value is not None})
    if dask.config.get("cml.idle-timeout") is None:
        arguments.setdefault("idle_timeout", _IDLE_TIMEOUT)
    if arguments.get("idle_timeout") == _NEVER:
        del arguments["idle_timeout"]
        dask.config.set({"cml.idle-timeout": None})
    # Whatever ends this command before its end, ends the cluster, too.
    arguments.update(
        create_mode="create", shutdown_on_close=True, asynchronous=False, quiet=True, silence_logs="WARNING"
    )
    with _progress(_starting):
        cluster = CMLCluster(*positional, **arguments)
    click.echo(cluster.name)
    n = cluster.options.n_workers
    click.echo(f"The scheduler answers at {cluster.scheduler_address}; {_workers(n)} granted.", err=True)
    if cluster.dashboard_link:
        click.echo(f"The dashboard is at {cluster.dashboard_link}", err=True)
    click.echo(f"{lifetime(cluster.name)}.", err=True)
    cluster.shutdown_on_close = False
    cluster.leave()


def _starting() -> str:
    """Return what the start of this process's cluster waits for."""
    from dask_cml.manager.at_exit import unclosed
    from dask_cml.manager.waiting import waiting

    for cluster in unclosed():
        if cluster.scheduler is not None and (waits := cluster.scheduler.waits_for) is not None:
            return f"The scheduler's session is {waiting(waits)}"
    return "The scheduler is being started"


def _workers(n: int) -> str:
    return f"{n} worker{'s' * (n != 1)}"


def _read_spec(path: str) -> tuple[list[Any], dict[str, Any]]:
    import yaml

    try:
        spec = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    wanted = {"version": 1, "module": "dask_cml", "class": "CMLCluster"}
    for key, value in wanted.items():
        found = spec.get(key) if isinstance(spec, dict) else None
        if found != value:
            raise ValueError(f"{path}: invalid {key}={found!r}: expected {value!r}")
    args, kwargs = spec.get("args") or [], spec.get("kwargs") or {}
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError(f"{path}: give args as a list and kwargs as a mapping")
    return args, {str(name).replace("-", "_"): value for name, value in kwargs.items()}


@cml.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@_in_one_line
def list_clusters(as_json: bool) -> None:
    """List the clusters of the project."""
    from dask_cml.records import operations, store

    rows = _run(operations.describe(store.records()))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    columns = ["name", "status", "workers", "threads", "memory", "age", "dashboard"]
    _print_table(columns, [_cells(columns, row) for row in rows])


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    import asyncio

    return asyncio.run(coroutine)


def _shown(column: str, value: Any) -> str:
    from dask.utils import format_bytes

    from dask_cml.manager.waiting import span

    if value is None:
        return "-"
    if column == "memory":
        return format_bytes(value)
    return span(value) if column == "age" else str(value)


def _cells(columns: Sequence[str], row: dict[str, Any]) -> list[str]:
    """Return the cells of a cluster's row; where sessions wait for room, they say so."""
    from dask_cml.manager.waiting import waiting

    cells = {column: _shown(column, row[column]) for column in columns}
    if row["waiting"]:
        words = waiting(row["waiting_for"])
        if row["workers"] is None:
            cells["status"] += f", {words}"
        else:
            cells["workers"] += f" ({row['waiting']} {words})"
    return [*cells.values()]


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            pass
        else:
            table = Table(*columns, box=None, pad_edge=False)
            for row in rows:
                table.add_row(*map(Text, row))
            # A name or a link that is cut to the terminal's width is of no use.
            Console(width=_WIDEST).print(table, soft_wrap=True)
            return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in [columns, *rows]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@cml.command()
@click.argument("name", shell_complete=_names)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@_in_one_line
def info(name: str, as_json: bool) -> None:
    """Tell all about one cluster."""
    from dataclasses import asdict

    from dask_cml.manager.waiting import waiting
    from dask_cml.options import state_directory
    from dask_cml.records import operations, store

    record = store.read(name)
    [row] = _run(operations.describe([record], timeout=_PATIENCE))
    row.update(
        created=record.created,
        folder=str(state_directory() / name),
        security=record.security is not None,
        maker=asdict(record.maker),
        sessions=dict(sorted(record.sessions.items(), key=lambda each: (each[1] != "scheduler", each[1]))),
        owners=record.owners,
    )
    if as_json:
        click.echo(json.dumps(row, indent=2))
        return
    row["maker"] = f"process {record.maker.pid} on {record.maker.host}"
    row["security"] = "keys of its own" if row["security"] else "no keys of its own"
    sessions, owners = row.pop("sessions"), row.pop("owners")
    n, seconds = row.pop("waiting"), row.pop("waiting_for")
    if n:
        row["waiting"] = f"{n} {waiting(seconds)}"
    for key, value in row.items():
        click.echo(f"{key:<10} {_shown(key, value)}")
    for session, role in sessions.items():
        owner = f"  ends with the session {owners[session]}" if session in owners else ""
        click.echo(f"{'session':<10} {session}  {role}{owner}")


@contextmanager
def _rebuilt(name: str) -> Iterator[CMLCluster]:
    """Give the manager of a cluster for a while."""
    from dask_cml.cluster import CMLCluster

    cluster = CMLCluster.from_name(name, quiet=True, silence_logs="WARNING")
    try:
        yield cluster
    finally:
        cluster.leave()


@cml.command()
@click.argument("name", shell_complete=_names)
@click.argument("n", type=click.IntRange(min=0))
@click.option(
    "--timeout", type=click.FloatRange(min=0), default=600.0, show_default=True, help="Seconds to wait."
)
@_in_one_line
def scale(name: str, n: int, timeout: float) -> None:
    """Have N worker sessions, and wait until they are there."""
    with _rebuilt(name) as cluster:
        cluster.scale(n)
        with _progress(lambda: _here(cluster, n)):
            _wait_for_scale(cluster, n, time.monotonic() + timeout)
    click.echo(f"{name} has {_workers(n)}")


def _here(cluster: CMLCluster, n: int) -> str:
    """Return how many of n workers have come, and how many sessions wait for room."""
    from dask_cml.manager.waiting import waiting_workers

    words = waiting_workers(cluster._reconciler.waits)
    return f"{len(cluster._arrived)} of {_workers(n)} here" + f", {words}" * bool(words)


def _wait_for_scale(cluster: CMLCluster, n: int, deadline: float) -> None:
    from dask_cml.errors import CMLError

    # What is there may be as many as are wanted, but other managers must hear of it.
    cluster.sync(cluster._carry_out)
    while not (cluster._leadership.leads and len(cluster._arrived) == len(cluster.workers) == n):
        trouble = cluster._reconciler.trouble
        if cluster.status.name != "running":
            raise CMLError(f"{cluster.name} has ended: {trouble or 'another process has deleted it'}")
        if cluster._fleet.target != n:
            other = "" if cluster._leadership.leads else "another manager scales it: "
            raise CMLError(
                f"{cluster.name} has {trouble or f'{other}{_workers(cluster._fleet.target)} wanted'}"
            )
        if cluster._reconciler.gave_up:
            raise CMLError(f"{cluster.name} launches {trouble}")
        if time.monotonic() > deadline:
            why = f": {trouble}" if trouble else ""
            raise CMLError(f"{cluster.name} has {_here(cluster, n)}, and the time is up{why}")
        time.sleep(_INTERVAL)


@cml.command()
@click.argument("name", shell_complete=_names)
@click.argument("minimum", type=click.IntRange(min=0))
@click.argument("maximum", type=click.IntRange(min=0))
@_in_one_line
def adapt(name: str, minimum: int, maximum: int) -> None:
    """Scale with the work for as long as this command runs; end it with Ctrl-C."""
    from dask_cml.errors import CMLError

    with _rebuilt(name) as cluster:
        try:
            cluster.adapt(minimum=minimum, maximum=maximum)
            cluster.sync(cluster._carry_out)
            click.echo(f"{name} adapts between {minimum} and {_workers(maximum)} while this command runs.")
            with _progress(lambda: _here(cluster, cluster._fleet.target)):
                while cluster.status.name == "running" and cluster._leadership.leads:
                    time.sleep(_INTERVAL)
        except KeyboardInterrupt:
            click.echo(f"{name} keeps {_workers(cluster._fleet.target)} and does not adapt any more.")
            return
        if cluster.status.name == "running":
            raise CMLError(f"{name} does not adapt any more: another manager scales it")
        raise CMLError(f"{name} has ended: {cluster._reconciler.trouble or 'another process has deleted it'}")


def _sessions(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a session that has a log."""
    from dask_cml.errors import CMLError

    try:
        sessions = _session_logs(context.params["name"])[0].paths()
    except (CMLError, OSError):
        return []
    given = context.params.get(str(parameter.name)) or ()
    return [each for each in sessions if each.startswith(incomplete) and each not in given]


def _session_logs(name: str) -> tuple[SessionLogs, Record]:
    from dask_cml.options import state_directory
    from dask_cml.records import store
    from dask_cml.sessions.session_logs import SessionLogs

    record = store.read(name)
    log_directory, processes = record.options.get("log_directory"), record.options.get("processes") or 1
    return SessionLogs(name, state_directory() / name, log_directory, processes), record


@cml.command()
@click.argument("name", shell_complete=_names)
@click.argument("workers", nargs=-1, metavar="[WORKER]...", shell_complete=_sessions)
@click.option("-f", "--follow", is_flag=True, help="Print new lines until Ctrl-C or the end of the cluster.")
@_in_one_line
def logs(name: str, workers: Sequence[str], follow: bool) -> None:
    """Print the logs of the scheduler and the workers, ended workers too.

    WORKER is the name of a worker, or "Scheduler". The default is all of them.
    """
    session_logs, record = _session_logs(name)
    launched = [each for each in record.sessions.values() if each != "scheduler"]
    chosen = session_logs.choose(workers, launched) if workers else None
    shown = None
    while True:
        lasts = follow and _lasts(record)
        for session, line in session_logs.lines(chosen, whole=not lasts):
            if session != shown:
                click.echo("\n" * bool(shown) + f"==> {session} <==")
                shown = session
            click.echo(line)
        if not lasts:
            break
        time.sleep(_FOLLOW_INTERVAL)
    if follow:
        click.echo(f"the cluster {name!r} has ended", err=True)


def _lasts(record: Record) -> bool:
    """Return whether a cluster's record is still there."""
    from dask_cml.errors import NoSuchCluster
    from dask_cml.records import store

    try:
        return store.read(record.name).id == record.id
    except NoSuchCluster:
        return False


@cml.command()
@click.argument("names", nargs=-1, shell_complete=_names)
@click.option("--all", "everything", is_flag=True, help="All clusters of the project.")
@_in_one_line
def delete(names: Sequence[str], everything: bool) -> None:
    """End clusters: every session of theirs is stopped."""
    from dask_cml.records import operations, store

    if bool(names) == everything:
        raise click.UsageError("give names of clusters, or --all")
    records = store.records() if everything else [store.read(name) for name in dict.fromkeys(names)]
    with _progress(lambda: f"{len(records)} cluster{'s' * (len(records) != 1)} being ended"):
        results = _run(operations.end_all(records))
    _tell_ends(results, "there is no cluster")


@cml.command()
@_in_one_line
def prune() -> None:
    """Delete dead clusters, and pass over those that may live.

    A dead cluster's scheduler has ended by the platform's list, or has been silent for two minutes.
    """
    from dask_cml.records import operations

    with _progress(lambda: "Looking for dead clusters"):
        results, passed_over = _run(operations.prune())
    for name, why in passed_over.items():
        command = f"`dask cml delete {shlex.quote(name)}`"
        click.echo(f"{name} is passed over: {why}. To delete it all the same: {command}", err=True)
    _tell_ends(results, "no cluster is dead")


@cml.command()
@click.argument("names", nargs=-1, shell_complete=_names)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds for each check.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def doctor(names: Sequence[str], timeout: float, as_json: bool) -> None:
    """Check this environment and running clusters, and print the commands that mend what is wrong.

    NAMES are the clusters to check, by default all of the project. The exit code is 1 if anything is wrong.
    """
    from dataclasses import asdict
    from shutil import get_terminal_size

    from dask_cml.doctor import examine

    width = get_terminal_size().columns if sys.stdout.isatty() else None
    findings = []
    for finding in examine(names, timeout):
        findings.append(finding)
        if not as_json:
            click.echo(finding.render(width))
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    if any(finding.state == "wrong" for finding in findings):
        raise click.exceptions.Exit(1)


def _tell_ends(results: dict[str, Any], none: str) -> None:
    for name, error in results.items():
        if error is None:
            click.echo(f"{name} is deleted")
        else:
            click.echo(f"Error: {name}: {_first_line(error)}", err=True)
    if not results:
        click.echo(none, err=True)
    if any(results.values()):
        raise click.exceptions.Exit(1)


@contextmanager
def _progress(state: Callable[[], str]) -> Iterator[None]:
    """Keep one line on what is waited for. Nothing, where nobody would see it move."""
    if not sys.stderr.isatty():
        yield
        return
    from shutil import get_terminal_size

    started, over = time.monotonic(), threading.Event()

    def show() -> None:
        while not over.wait(_INTERVAL):
            line = f"{state()}, {time.monotonic() - started:.0f} s"
            click.echo(f"\r\x1b[2K{line[: get_terminal_size().columns - 1]}", err=True, nl=False)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        click.echo("\r\x1b[2K", err=True, nl=False)
