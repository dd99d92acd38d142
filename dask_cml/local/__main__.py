"""The local platform from the command line: ``python -m dask_cml.local``."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from dask_cml import local
from dask_cml.local import processes, session_state

#: Seconds to wait until sessions have ended, in addition to their grace period.
_PATIENCE = 15.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dask_cml.local",
        description="List, stop and inspect sessions of the local platform.",
        epilog="To limit memory and scratch space, or to inject faults, call dask_cml.local.configure() and "
        "dask_cml.local.inject() in Python.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="list the sessions of all launchers")
    stop = commands.add_parser("stop", help="stop sessions, and wait until they have ended")
    stop.add_argument("ids", metavar="ID", nargs="*")
    stop.add_argument("--all", action="store_true", help="stop the sessions of all launchers")
    logs = commands.add_parser("logs", help="print the log of a session")
    logs.add_argument("id", metavar="ID")
    commands.add_parser("prune", help="remove sessions that have ended, and their logs")
    engine = commands.add_parser(
        "engine",
        help="run a command as your own session; its sessions end with it",
        description="Run a command as your own session, and stop the sessions that it launched when it ends. "
        "SIGTERM ends the command: by SIGTERM, and after the grace period by SIGKILL.",
    )
    engine.add_argument("program", metavar="COMMAND")
    engine.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    if options.command == "stop" and bool(options.ids) == options.all:
        parser.error("expected the ids of sessions, or --all")
    if options.command == "list":
        return _list()
    if options.command == "stop":
        return _stop(_live() if options.all else options.ids)
    if options.command == "logs":
        return _logs(options.id)
    if options.command == "engine":
        return _engine([options.program, *options.arguments])
    sys.stdout.write(f"{len(local.prune())} sessions removed\n")
    return 0


def _live() -> list[str]:
    return [each["id"] for each in local.sessions() if each["status"] not in session_state.ENDED]


def _list() -> int:
    for each in local.sessions():
        columns = [each["id"], each["status"].ljust(10), each["created_at"], each["app_url"], each["name"]]
        if each["reason"]:
            columns.append(f"({each['reason']})")
        sys.stdout.write("  ".join(columns).rstrip() + "\n")
    return 0


def _stop(ids: Sequence[str]) -> int:
    unknown = sorted({*ids} - {each["id"] for each in local.sessions()})
    for session_id in unknown:
        sys.stderr.write(f"no session {session_id!r}; to list all: `python -m dask_cml.local list`\n")
    known = [session_id for session_id in ids if session_id not in unknown]
    if known:
        local.stop_workers(*known)
    deadline = time.monotonic() + local.settings().stop_grace + _PATIENCE
    while left := {*known} & {*_live()}:
        if time.monotonic() > deadline:
            sys.stderr.write(f"sessions still running: {' '.join(sorted(left))}\n")
            return 1
        time.sleep(0.05)
    return 1 if unknown else 0


def _engine(command: Sequence[str]) -> int:
    name = session_state.new_id()
    # By default, the signal would end this process alone.
    before = signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))
    program = None
    with local.engine(name):
        try:
            program = subprocess.Popen(command)
            status = program.wait()
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if program and program.returncode is None:
                program.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.wait(local.settings().stop_grace)
            processes.kill(name)
            signal.signal(signal.SIGTERM, before)
    return status if status >= 0 else 128 - status


def _logs(session_id: str) -> int:
    try:
        sys.stdout.write(local.log(session_id))
    except LookupError as error:
        sys.stderr.write(f"{error.args[0]}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
