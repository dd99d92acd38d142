"""The commands that create clusters: ``dask cml create``, and ``serve`` with its web UI."""

from __future__ import annotations

import contextlib
import functools
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from dask_cml.cli.console import Command, cml, echo
from dask_cml.words import command

if TYPE_CHECKING:
    from dask_cml.options.table import Option


#: What help shows for the values of options, by their units or JSON types.
_METAVARS = {
    "array": "ARGUMENTS",
    "GiB": "SIZE",
    "integer": "INT",
    "number": "NUMBER",
    "object": "NAME=VALUE",
    "s": "DURATION",
}
#: What help shows for options whose values are several words.
_EXAMPLES = {"worker-command": "dask cuda worker", "inherit": "sql kafka"}


class OptionsCommand(Command):
    """A command with an option for each option of a cluster.

    Parameters
    ----------
    grouped : bool
        Whether the command has the options of a worker group alone.
    """

    def __init__(self, *args: Any, grouped: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grouped = grouped

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options of a cluster and the command's own parameters."""
        return [*_cluster_options(self._grouped), *super().get_params(ctx)]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below their headings; the command's own come last."""
        headings = _cluster_options(self._grouped)
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            # Newer releases of click have records of arguments, too.
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(headings.get(param, "This command"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


@functools.cache
def _cluster_options(grouped: bool) -> dict[click.Parameter, str]:
    """Return an option of the command line for each option of a cluster, with its heading."""
    from dask_cml.options.table import GROUP_OPTIONS
    from dask_cml.options.unattended import offered_options

    options = [option for option in offered_options() if option.name in GROUP_OPTIONS or not grouped]
    return {_option(option, grouped): option.heading for option in options}


def _option(option: Option, grouped: bool) -> click.Option:
    from dask_cml.options.unattended import summary

    key, kind, text = option.key.replace(".", "-"), option.kind, summary(option).replace("`", "")
    if kind == "array":
        example = _EXAMPLES.get(key, "--option 1")
        text = f'{text} Quote it as one argument: --{key} "{example}".'
    elif kind == "object":
        text = f"{text} May be given more than once."
    if key == "worker-groups":
        text = f"{text} For example: --{key} 'gpu={{\"nvidia-gpu\": 1}}'."
    # A worker group takes the cluster's values, and a default in the words needs no second one.
    if not grouped and "By default" not in text:
        text += _default(key, option.default)
    return click.Option(
        [f"--{key}/--no-{key}" if kind == "boolean" else f"--{key}"],
        default=None,
        help=text,
        metavar=_METAVARS.get(option.unit or kind),
        multiple=kind == "object",
        type=click.Choice(option.choices) if option.choices else {"integer": int}.get(kind),
    )


def _default(key: str, value: Any) -> str:
    """Return the configured value of an option for its help. A mapping may hold secrets."""
    if value in (None, []) or isinstance(value, dict):
        return ""
    if isinstance(value, bool):
        return f"  [default: {'' if value else 'no-'}{key}]"
    return f"  [default: {shlex.join(map(str, value)) if isinstance(value, list) else value}]"


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options that the command line sets."""
    from dask_cml.options.unattended import typed

    return typed({name: text for name, text in options.items() if text not in (None, ())})


@cml.command(cls=OptionsCommand)
@click.argument("new_name", metavar="[NAME]", required=False)
def create(new_name: str | None, **options: Any) -> None:
    """Create a cluster, and print its name.

    The cluster keeps running when this command ends. The command waits until the scheduler answers and
    CML grants the workers. The cluster can run until the CML session of this command ends.
    """
    import dask.config

    from dask_cml.cluster import CMLCluster
    from dask_cml.observers import until_shown
    from dask_cml.options.unattended import settings, unattended
    from dask_cml.sessions.here import lifetime

    if new_name is not None and options["name"] is not None:
        raise click.UsageError(f"expected one name: got {new_name!r}, and --name {options['name']}")
    options["name"] = options["name"] if new_name is None else new_name

    values = given(options)
    # The name alone goes to standard output, for scripts.
    with dask.config.set(settings(values)), contextlib.redirect_stdout(sys.stderr):
        cluster = CMLCluster(**unattended(values), quiet=False, silence_logs="WARNING")
    cluster.quiet = True
    cluster.sync(cluster.sharing.link.live_on)
    cluster.sync(until_shown, cluster)
    cluster.shutdown_on_close = False
    echo(cluster.name)
    echo(f"Address: {cluster.scheduler_address}", err=True)
    if not any(group.n_workers for group in cluster.worker_groups.values()):
        scale, adapt = command("scale", cluster.name, "N"), command("adapt", cluster.name, 0, 10)
        echo(f"Cluster {cluster.name} has no workers yet: run {scale} or {adapt}", err=True)
    if cluster.dashboard_link:
        echo(f"Dashboard: {cluster.dashboard_link}", err=True)
    echo(f"{lifetime(cluster.name, cluster.options.idle_timeout)}.", err=True)
    cluster.leave()


@cml.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port on 127.0.0.1. Default: $CDSW_APP_PORT, then $CDSW_READONLY_PORT, then a free one.",
)
@click.option(
    "--dashboard-port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the dashboards on 127.0.0.1, outside of CML. Default: a free one.",
)
@click.option("--open", "open_browser", is_flag=True, help="Open the web UI in a browser.")
async def serve(port: int | None, dashboard_port: int, open_browser: bool) -> None:
    """Serve a web UI of all clusters of the project.

    The command manages the clusters that you create there. It runs until Ctrl-C or SIGTERM, and then stops
    these clusters. In CML, run it as an Application.
    """
    from dask_cml.serve.servers import serve as serve_web_ui

    await serve_web_ui(port, _print_link, open_browser, dashboard_port)
    echo("The web UI is closed, and the clusters created there are stopped.", err=True)


def _print_link(link: str, behind_entry: bool) -> None:
    echo(f"Open the web UI: {link}")
    if behind_entry:
        echo("An Application has another link, which CML shows. It needs no token, because CML logs you in.")
    else:
        echo("To stop it and the clusters created there, press Ctrl-C.", err=True)
