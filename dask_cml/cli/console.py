"""The command group, and what its commands share: errors in one line, progress, tables, completion."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click

from dask_cml import output
from dask_cml.errors import CMLError, LaunchRefused, reason_of
from dask_cml.words import first_line, printable, table

# Dask imports this with each of its commands, so functions import slow modules themselves.

_INTERRUPTED = 130  # as shells say it
_PARAMETERS = "dask_cml.parameters"


class Command(click.Command):
    """A command, whose errors name its parameters."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        ctx.meta[_PARAMETERS] = self.get_params(ctx)
        return super().invoke(ctx)


class _Commands(click.Group):
    """Runs commands, also coroutines. Errors of the user and of the platform are one line."""

    command_class = Command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            return asyncio.run(result) if asyncio.iscoroutine(result) else result
        except KeyboardInterrupt:
            raise click.exceptions.Exit(_INTERRUPTED) from None
        except BrokenPipeError:  # click knows what to do
            raise
        except (CMLError, ValueError, TypeError, ImportError, OSError, asyncio.TimeoutError) as error:
            raise in_shell(error, ctx) from error
        finally:
            show()


def in_shell(error: BaseException, ctx: click.Context) -> click.ClickException:
    """Return an error of a command with the names of the shell instead of Python's."""
    advice = error.advice if isinstance(error, LaunchRefused) else ""
    words, names = f"{first_line_of(error)}\n{advice}".strip(), {}
    for parameter in ctx.meta.get(_PARAMETERS, ()):
        argument = (parameter.metavar or parameter.name.upper()).strip("[].")
        names[parameter.name] = parameter.opts[0] if isinstance(parameter, click.Option) else argument
    invalid = re.match(r"invalid (\w+)", words)
    kind = click.UsageError if invalid and invalid[1] in names else click.ClickException
    return kind(re.sub(r"(?<=^invalid )\w+|(?<= )\w+(?==)", lambda name: names.get(name[0], name[0]), words))


@click.group(cls=_Commands)
@click.version_option(package_name="dask-cml", prog_name="dask-cml")
def cml() -> None:
    """Dask clusters on Cloudera Machine Learning sessions."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not replaced by the program
            stream.reconfigure(errors="backslashreplace")  # of a shell whose encoding lacks a character
    # Dask imports dask-ctl, if installed, with each command. It hands signals to an event loop that does not
    # run, so Ctrl-C would do nothing.
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if getattr(signal.getsignal(number), "__module__", None) == "distributed.cli.utils":
            signal.signal(number, default)


def complete_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a cluster."""
    from dask_cml.records import store

    given = context.params.get(str(parameter.name)) or ()
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError):  # the command itself says it
        names = [record.name for record in store.records() if record.name.startswith(incomplete)]
    # Click's script for bash quotes nothing.
    return [name for name in names if name not in given and name == shlex.quote(name)]


#: The argument of a command on one cluster.
of_cluster = click.argument("name", shell_complete=complete_names)
#: The option of commands that programs read.
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def first_line_of(error: object) -> str:
    """Return an error's first line, or its class where it has no text."""
    return printable(first_line(reason_of(error))) or type(error).__name__


def echo(text: str = "", *, err: bool = False) -> None:
    """Print a line. Nothing in it steers a terminal."""
    click.echo(printable(text), err=err)


class _Progress:
    """Shows what a command waits for in one line of a terminal, instead of the text before."""

    text = ""

    def __call__(self, text: str = "") -> None:
        if text != self.text and output.is_terminal(sys.stderr):
            click.echo(output.overwriting(text), err=True, nl=False)
            self.text = text


show = _Progress()


def print_json(value: Any) -> None:
    """Print a value for programs."""
    click.echo(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, in a terminal with bold headings.

    Parameters
    ----------
    columns : sequence of str
        The headings.
    rows : sequence of sequences of str
        The cells of the rows.
    """
    head, *lines = table([columns, *([printable(cell) for cell in row] for row in rows)])
    click.echo("\n".join([click.style(head, bold=True), *lines]))
