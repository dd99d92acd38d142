"""The local platform from the command line: ``python -m dask_cml.local``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import click

from dask_cml import local
from dask_cml.local import engines, state

#: Seconds to wait until sessions have ended, in addition to their grace period.
_PATIENCE = 15.0


@click.group()
def main() -> None:
    """List and stop sessions of the local platform.

    To limit memory and scratch space, or to inject faults, call dask_cml.local.configure() and
    dask_cml.local.inject() in Python.
    """


@main.command("list")
def list_sessions() -> None:
    """List the sessions of all launchers."""
    for each in local.sessions():
        columns = [each["id"], each["status"].ljust(10), each["created_at"], each["app_url"], each["name"]]
        if each["reason"]:
            columns.append(f"({each['reason']})")
        click.echo("  ".join(columns).rstrip())


@main.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Stop the sessions of all launchers.")
def stop(ids: Sequence[str], everything: bool) -> None:
    """Stop sessions, and wait until they have ended."""
    if bool(ids) == everything:
        raise click.UsageError("expected the ids of sessions, or --all")
    known = {each["id"] for each in local.sessions()}
    for session_id in sorted({*ids} - known):
        click.echo(f"no session {session_id!r}; to list all: `python -m dask_cml.local list`", err=True)
    stopped = known & {*(ids or _live())}
    # Each session has the grace period of its launch.
    grace = max((each["stop_grace"] for each in state.read_sessions() if each["id"] in stopped), default=0.0)
    if stopped:
        local.stop_workers(*stopped)
    deadline = time.monotonic() + grace + _PATIENCE
    while left := stopped & {*_live()}:
        if time.monotonic() > deadline:
            raise click.ClickException(f"sessions still running: {' '.join(sorted(left))}")
        time.sleep(0.05)
    sys.exit(not known.issuperset(ids))


def _live() -> list[str]:
    return [each["id"] for each in local.sessions() if each["status"] not in state.ENDED]


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def engine(command: Sequence[str]) -> None:
    """Run a command as your own session, and stop the sessions that it launched when it ends."""
    lock = engines.become(state.new_id())
    os.set_inheritable(lock, True)  # the command and its processes hold the lock until they end
    try:
        os.execvp(command[0], [*command])
    except OSError as error:
        raise click.ClickException(f"cannot run {command[0]!r}: {error.strerror}") from None


if __name__ == "__main__":
    main(prog_name="python -m dask_cml.local")
