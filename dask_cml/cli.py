"""``dask cml``: make, find, steer and end clusters from a shell."""

from __future__ import annotations

import functools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

# Dask imports this with every one of its commands, so what takes long to import is imported where it is used.

_SCALE_INTERVAL = 0.2


def _names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a cluster."""
    from dask_cml import registry

    return [r.name for r in registry.records() if r.name.startswith(incomplete)]


def _in_one_line(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the errors that a user can do something about in one line, without a traceback."""

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        from dask_cml.errors import CMLError

        try:
            return function(*args, **kwargs)
        except (CMLError, ValueError, TypeError, ImportError, OSError) as error:
            message = " ".join(str(error).split("\n")[:1]) or type(error).__name__
            raise click.ClickException(message) from error

    return told


class _CreateCommand(click.Command):
    """A command with one option for each option of a cluster, as the schema of the configuration has them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *_cluster_options()]


@functools.cache
def _cluster_options() -> list[click.Parameter]:
    import yaml

    schema = yaml.safe_load(Path(__file__).with_name("cml-schema.yaml").read_text())
    options: list[click.Parameter] = []
    for key, about in schema["properties"]["cml"]["properties"].items():
        types = about.get("type", "string")
        types = [types] if isinstance(types, str) else types
        # What concerns every cluster, or this process, is not an option of one.
        if key in ("api", "failure-limit", "quota-retry", "state-directory", "shutdown-on-close", "adaptive"):
            continue
        declaration = f"--{key}"
        more: dict[str, Any] = {}
        if "boolean" in types:
            declaration = f"--{key}/--no-{key}"
            more = {"default": None}
        elif "array" in types:
            more = {"callback": lambda _, __, value: shlex.split(value) if value else None}
        elif "object" in types:
            more = {"multiple": True, "callback": _pairs, "metavar": "NAME=VALUE"}
        elif "enum" in about:
            more = {"type": click.Choice(about["enum"])}
        elif "string" not in types:
            more = {"type": int if "integer" in types else float}
        text = " ".join(about["description"].split()).replace("`", "")
        options.append(click.Option([declaration], help=text, **more))
    return options


def _pairs(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict | None:
    wrong = [value for value in values if "=" not in value]
    if wrong:
        raise click.BadParameter(f"{wrong[0]!r} is not allowed; give NAME=VALUE", context, parameter)
    return dict(value.split("=", 1) for value in values) or None


@click.group()
def cml() -> None:
    """Dask clusters on Cloudera Machine Learning sessions."""


@cml.command(cls=_CreateCommand)
@click.argument("spec", required=False, type=click.Path(exists=True, dir_okay=False))
@_in_one_line
def create(spec: str | None, **options: Any) -> None:
    """Make a cluster that lives on when this command ends.

    SPEC is a file as dask-ctl takes it, whose arguments the options override. Without --idle-timeout the
    cluster ends when it was idle for an hour.
    """
    from dask_cml.cluster import CMLCluster

    arguments = _read_spec(spec) if spec else {}
    arguments.update({name: value for name, value in options.items() if value is not None})
    arguments.setdefault("idle_timeout", "1 hour")
    cluster = CMLCluster(**{**arguments, "shutdown_on_close": False}, quiet=True)
    n = cluster.options.n_workers
    click.echo(cluster.name)
    with _progress(f"{n} workers granted, {{}} here, {{:.0f}} s") as show:
        show(len(cluster.arrived))
    click.echo(f"Scheduler at {cluster.scheduler_address}, dashboard at {cluster.dashboard_link}", err=True)
    cluster.close()


def _read_spec(path: str) -> dict[str, Any]:
    import yaml

    spec = yaml.safe_load(Path(path).read_text())
    if not isinstance(spec, dict) or spec.get("module") != "dask_cml" or spec.get("class") != "CMLCluster":
        raise ValueError(f"{path}: the spec is not allowed; give one of module dask_cml and class CMLCluster")
    return {name.replace("-", "_"): value for name, value in (spec.get("kwargs") or {}).items()}


@cml.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@_in_one_line
def list_clusters(as_json: bool) -> None:
    """List the clusters of the project."""
    rows = _look()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    columns = ["name", "status", "workers", "threads", "memory", "age", "dashboard"]
    _print_table(columns, [[_shown(column, row[column]) for column in columns] for row in rows])


def _look(names: Iterable[str] = ()) -> list[dict[str, Any]]:
    import asyncio

    from dask_cml import lifecycle, registry

    chosen = [registry.read(name) for name in names] or registry.records()
    return asyncio.run(lifecycle.describe(chosen))


def _shown(column: str, value: Any) -> str:
    from dask.utils import format_bytes, format_time

    if value is None:
        return "-"
    if column == "memory":
        return format_bytes(value)
    if column == "age":
        return format_time(value)
    return str(value)


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        for row in [columns, *rows]:
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    # Not cut to the width of a pipe, which programs read.
    Console(width=None if sys.stdout.isatty() else 1000, soft_wrap=True).print(table)


@cml.command()
@click.argument("name", shell_complete=_names)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@_in_one_line
def info(name: str, as_json: bool) -> None:
    """Tell all about one cluster."""
    from dask_cml import registry

    [row] = _look([name])
    row["sessions"] = dict(registry.read(name).sessions)
    if as_json:
        click.echo(json.dumps(row, indent=2))
        return
    sessions = row.pop("sessions")
    for key, value in row.items():
        click.echo(f"{key:<10} {_shown(key, value)}")
    for session, what in sessions.items():
        click.echo(f"session    {session}  {what}")


@cml.command()
@click.argument("name", shell_complete=_names)
@click.argument("n", type=click.IntRange(min=0))
@click.option("--timeout", default=600.0, show_default=True, help="Seconds to wait for the workers.")
@_in_one_line
def scale(name: str, n: int, timeout: float) -> None:
    """Have N worker sessions, and wait until they are there."""
    from dask_cml.cluster import CMLCluster
    from dask_cml.errors import CMLError

    cluster = CMLCluster.from_name(name, quiet=True)
    try:
        cluster.scale(n)
        deadline = time.monotonic() + timeout
        with _progress(f"{{}} of {n} workers, {{:.0f}} s") as show:
            while not (len(cluster.arrived) == len(cluster.workers) == cluster.wanted):
                if time.monotonic() > deadline:
                    raise CMLError(f"{len(cluster.arrived)} of {n} workers after {timeout:g} s: {cluster!r}")
                show(len(cluster.arrived))
                time.sleep(_SCALE_INTERVAL)
        if cluster.wanted != n:
            raise CMLError(f"{cluster.name} has {cluster.reconciler.trouble}")
    finally:
        cluster.leave()
    click.echo(f"{name} has {n} workers")


@cml.command()
@click.argument("name", shell_complete=_names)
@click.argument("minimum", type=click.IntRange(min=0))
@click.argument("maximum", type=click.IntRange(min=0))
@_in_one_line
def adapt(name: str, minimum: int, maximum: int) -> None:
    """Scale with the work for as long as this command runs; end it with Ctrl-C."""
    from dask_cml.cluster import CMLCluster

    cluster = CMLCluster.from_name(name)
    try:
        adaptive = cluster.adapt(minimum=minimum, maximum=maximum)
        click.echo(
            f"Adapting {name} between {minimum} and {maximum} workers until this command ends (Ctrl-C)."
        )
        while cluster.status.name == "running" and adaptive.state != "stopped":
            time.sleep(_SCALE_INTERVAL)
        click.echo(f"{name} is {cluster.status.name}; it is not adapted any more.")
    except KeyboardInterrupt:
        click.echo(f"\n{name} keeps {len(cluster.workers)} workers from now on.")
    finally:
        cluster.leave()


@cml.command()
@click.argument("name", shell_complete=_names)
@_in_one_line
def logs(name: str) -> None:
    """Print what the scheduler and the workers have logged."""
    from dask_cml.cluster import CMLCluster

    cluster = CMLCluster.from_name(name, quiet=True)
    try:
        for source, text in cluster.get_logs(cluster=False).items():
            click.echo(f"==> {source} <==\n{text}\n")
    finally:
        cluster.leave()


@cml.command()
@click.argument("names", nargs=-1, shell_complete=_names)
@click.option("--all", "everything", is_flag=True, help="All clusters of the project.")
@_in_one_line
def delete(names: Sequence[str], everything: bool) -> None:
    """End clusters: every session of theirs is stopped."""
    import asyncio

    from dask_cml import lifecycle, registry

    if bool(names) == everything:
        raise click.UsageError("give names of clusters, or --all")
    for record in [registry.read(name) for name in names] or registry.records():
        asyncio.run(lifecycle.end(record))
        click.echo(f"{record.name} is deleted")


@cml.command()
@_in_one_line
def prune() -> None:
    """End what is left of clusters whose maker and scheduler are both gone."""
    import asyncio

    from dask_cml import lifecycle

    results = asyncio.run(lifecycle.prune())
    for name, error in results.items():
        click.echo(f"{name}: {error}" if error else f"{name} is deleted", err=error is not None)
    if not results:
        click.echo("nothing is left over")
    if any(results.values()):
        raise click.exceptions.Exit(1)


@contextmanager
def _progress(template: str) -> Any:
    """Give a function that shows its argument and the time in one line that moves, on terminals only."""
    started, shown = time.monotonic(), sys.stderr.isatty()

    def show(state: object) -> None:
        if shown:
            line = template.format(state, time.monotonic() - started)
            click.echo(f"\r{line:<60}", err=True, nl=False)

    yield show
    if shown:
        click.echo(f"\r{'':<60}\r", err=True, nl=False)
