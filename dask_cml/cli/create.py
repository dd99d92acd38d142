"""``dask cml create``."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from dask_cml.cli.console import in_one_line
from dask_cml.described import described_options, pairs, unattended_text, words


class OptionsCommand(click.Command):
    """A command with one option for each option of a cluster, as the schema of the configuration has them.

    Parameters
    ----------
    method : str
        The method of CMLCluster whose arguments these are.
    """

    def __init__(self, *args: Any, method: str = "__init__", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._method = method

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's own parameters and those of the method."""
        return [*super().get_params(ctx), *_cluster_options(self._method)]


@functools.cache
def _cluster_options(method: str) -> list[click.Parameter]:
    import inspect

    from dask_cml.cluster import CMLCluster

    options: list[click.Parameter] = []
    for each in described_options(inspect.signature(getattr(CMLCluster, method)).parameters):
        key, text = each.key, unattended_text(each).replace("`", "")
        if key == "name" and method != "__init__":  # of a cluster
            continue
        declaration = f"--{key}"
        more: dict[str, Any] = {}
        if each.kind == "flag":
            declaration, more = f"--{key}/--no-{key}", {"default": None}
        elif each.kind == "words":
            more = {"callback": _words, "metavar": "ARGUMENTS"}
            text = f'{text} In one word for the shell: --{key} "--option 1".'
        elif each.kind == "pairs":
            more = {"multiple": True, "callback": _pairs, "metavar": "NAME=VALUE"}
            text = f"{text} May be given more than once."
        elif each.kind == "choice":
            more = {"type": click.Choice(each.choices)}
        elif each.kind != "text":
            more = {"type": int if each.kind == "integer" else float}
        options.append(click.Option([declaration], help=text, **more))
    return options


def _words(context: click.Context, parameter: click.Parameter, value: str | None) -> list[str] | None:
    try:
        return None if value is None else words(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None


def _pairs(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict | None:
    try:
        return pairs(str(parameter.name), values) or None
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from None


@click.command(cls=OptionsCommand)
@click.argument("spec", required=False, type=click.Path(exists=True, dir_okay=False))
@in_one_line
def create(spec: str | None, **options: Any) -> None:
    """Create a cluster that runs on when this command ends.

    The cluster can run until the CML session ends in which this command runs. The command waits until the
    scheduler answers and the workers are granted, and prints the cluster's name. SPEC is a file as dask-ctl
    takes it, whose arguments the options override.
    """
    from dask_cml.cluster import CMLCluster
    from dask_cml.options import unattended
    from dask_cml.sessions.owner import lifetime

    positional, arguments = _read_spec(spec) if spec else ([], {})
    arguments.update({name: value for name, value in options.items() if value is not None})
    # Whatever ends this command before its end, ends the cluster, too.
    arguments.update(
        create_mode="create", shutdown_on_close=True, asynchronous=False, quiet=False, silence_logs="WARNING"
    )
    # The name alone goes to standard output, for scripts.
    with unattended(arguments) as arguments, contextlib.redirect_stdout(sys.stderr):
        cluster = CMLCluster(*positional, **arguments)
    cluster.quiet = True
    click.echo(cluster.name)
    click.echo(f"Address: {cluster.scheduler_address}", err=True)
    if cluster.dashboard_link:
        click.echo(f"Dashboard: {cluster.dashboard_link}", err=True)
    click.echo(f"{lifetime(cluster.name)}.", err=True)
    cluster.shutdown_on_close = False
    cluster.leave()


def _read_spec(path: str) -> tuple[list[Any], dict[str, Any]]:
    import yaml

    try:
        spec = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        # Not its own words, which show a line of the file.
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}: {getattr(error, 'problem', None)}" if mark else ""
        raise ValueError(f"{path} is not valid YAML{where}") from None
    wanted = {"version": 1, "module": "dask_cml", "class": "CMLCluster"}
    for key, value in wanted.items():
        found = spec.get(key) if isinstance(spec, dict) else None
        if found != value:
            raise ValueError(f"{path}: invalid {key}={found!r}: expected {value!r}")
    args, kwargs = spec.get("args") or [], spec.get("kwargs") or {}
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError(f"{path}: give args as a list and kwargs as a mapping")
    return args, {str(name).replace("-", "_"): value for name, value in kwargs.items()}
