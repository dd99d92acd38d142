"""``dask cml create``."""

from __future__ import annotations

import contextlib
import functools
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import click

from dask_cml.cli.console import in_one_line


class OptionsCommand(click.Command):
    """A command with one option for each option of a cluster.

    Parameters
    ----------
    grouped : bool
        Whether the command has the options of a worker group alone.
    """

    def __init__(self, *args: Any, grouped: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grouped = grouped

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own parameters and the options of a cluster."""
        return [*super().get_params(ctx), *(option for _, option in _cluster_options(self._grouped))]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below their headings; the command's own come last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        own = [("This command", param) for param in super().get_params(ctx)]
        for heading, param in [*_cluster_options(self._grouped), *own]:
            # Newer releases of click have records of arguments, too.
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


@functools.cache
def _cluster_options(grouped: bool) -> list[tuple[str, click.Parameter]]:
    """Return the options of a cluster, each with its heading."""
    from dask_cml.options.unattended import offered_options

    options: list[tuple[str, click.Parameter]] = []
    for each in offered_options():
        if grouped and not each.grouped:
            continue
        key, text = each.key, each.description.replace("`", "")
        declaration = f"--{key}"
        more: dict[str, Any] = {}
        if each.kind == "boolean":
            declaration, more = f"--{key}/--no-{key}", {"default": None}
        elif each.kind == "array":
            more = {"callback": _parsed, "metavar": "ARGUMENTS"}
            text = f'{text} Quote them as one argument: --{key} "--option 1".'
        elif each.kind == "object":
            more = {"multiple": True, "callback": _parsed, "metavar": "NAME=VALUE"}
            text = f"{text} May be given more than once."
            if key == "worker-groups":
                text = f"{text} For example: --{key} 'gpu={{\"nvidia-gpu\": 1}}'."
        elif each.enum:
            more = {"type": click.Choice(each.enum)}
        elif each.kind != "string":
            more = {"type": int if each.kind == "integer" else float}
        # A worker group takes the cluster's values, and a default in the words needs no second one.
        if not grouped and "By default" not in text:
            text += _default(key, each.default)
        options.append((each.heading, click.Option([declaration], help=text, **more)))
    return options


def _default(key: str, value: Any) -> str:
    """Return the configured value of an option for its help. A mapping may hold secrets."""
    if value in (None, []) or isinstance(value, dict):
        return ""
    if isinstance(value, bool):
        return f"  [default: {'' if value else 'no-'}{key}]"
    return f"  [default: {shlex.join(map(str, value)) if isinstance(value, list) else value}]"


def _parsed(
    context: click.Context, parameter: click.Parameter, value: str | Sequence[str] | None
) -> list[str] | dict[str, Any] | None:
    """Parse a command line, or the texts of an option that may be given more than once."""
    from dask_cml.options.texts import pairs, words

    try:
        if isinstance(value, str):
            return words(value)
        return pairs(str(parameter.name), value or ()) or None
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None


@click.command(cls=OptionsCommand)
@in_one_line
def create(**options: Any) -> None:
    """Create a cluster that keeps running when this command ends, and print its name.

    The command waits until the scheduler answers and CML grants the workers. The cluster can run until the
    CML session of this command ends.
    """
    from dask_cml.cluster import CMLCluster
    from dask_cml.options.unattended import unattended
    from dask_cml.sessions.owner import lifetime

    # Whatever ends this command before its end, ends the cluster, too.
    arguments = {**unattended(options), "create_mode": "create", "shutdown_on_close": True}
    # The name alone goes to standard output, for scripts.
    with contextlib.redirect_stdout(sys.stderr):
        cluster = CMLCluster(**arguments, quiet=False, silence_logs="WARNING")
    cluster.quiet = True
    cluster.sync(cluster.manager.outlive_this_process)
    click.echo(cluster.name)
    click.echo(f"Address: {cluster.scheduler_address}", err=True)
    if cluster.dashboard_link:
        click.echo(f"Dashboard: {cluster.dashboard_link}", err=True)
    click.echo(f"{lifetime(cluster.name)}.", err=True)
    cluster.leave()
