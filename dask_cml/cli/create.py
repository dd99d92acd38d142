"""``dask cml create``."""

from __future__ import annotations

import contextlib
import functools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import dask.config

from dask_cml.cli.console import in_one_line
from dask_cml.described import described_options, pairs, unattended_text, words


class GroupedOption(click.Option):
    """An option below a heading of the command's help.

    Parameters
    ----------
    group : str
        The heading.
    """

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


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

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below the headings of ``cml.yaml``; the command's own come last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in [*_cluster_options(self._method), *super().get_params(ctx)]:
            # Newer releases of click have records of arguments, too.
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                heading = param.group if isinstance(param, GroupedOption) else "This command"
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


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
            text = f'{text} Quote them as one argument: --{key} "--option 1".'
        elif each.kind == "pairs":
            more = {"multiple": True, "callback": _pairs, "metavar": "NAME=VALUE"}
            text = f"{text} May be given more than once."
            if key == "worker-groups":
                text = f"{text} For example: --{key} 'gpu={{\"nvidia-gpu\": 1}}'."
        elif each.kind == "choice":
            more = {"type": click.Choice(each.choices)}
        elif each.kind != "text":
            more = {"type": int if each.kind == "integer" else float}
        # A worker group takes the cluster's values, and a default in the words needs no second one.
        if method == "__init__" and "By default" not in text:
            text += _default(key)
        options.append(GroupedOption([declaration], help=text, group=each.group, **more))
    return options


def _default(key: str) -> str:
    """Return the configured value of an option for its help. A mapping may hold secrets."""
    value = dask.config.get(f"cml.{key}", None)
    if value in (None, []) or isinstance(value, dict):
        return ""
    if isinstance(value, bool):
        return f"  [default: {'' if value else 'no-'}{key}]"
    return f"  [default: {shlex.join(map(str, value)) if isinstance(value, list) else value}]"


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
    """Create a cluster that keeps running when this command ends, and print its name.

    The command waits until the scheduler answers and CML grants the workers. The cluster can run until the
    CML session of this command ends. SPEC is a file with arguments, as dask-ctl takes it. Options override
    it.
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
    cluster.sync(cluster.manager.outlive_this_process)
    click.echo(cluster.name)
    click.echo(f"Address: {cluster.scheduler_address}", err=True)
    if cluster.dashboard_link:
        click.echo(f"Dashboard: {cluster.dashboard_link}", err=True)
    click.echo(f"{lifetime(cluster.name)}.", err=True)
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
