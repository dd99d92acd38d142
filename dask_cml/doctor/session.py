"""Check the Workers API, the configuration and the state directory."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path

from dask_cml.doctor.finding import Finding, dask_command

_LONGEST_ANSWER = 300
#: The share of a disk below which it is nearly full.
_LEAST_FREE = 0.1


def platform() -> Finding:
    """Check that this process can import the platform's module, and that the module lists sessions."""
    import dask.config

    from dask_cml.errors import NotOnCML
    from dask_cml.sessions import answers
    from dask_cml.sessions.loading import load_platform

    try:  # `configuration` finds an invalid platform
        module = load_platform(dask.config.get("cml.platform", None))
        listed = answers.listed(module.list_workers())
    except NotOnCML:
        words = f"{sys.executable} cannot import cml.workers_v1 or cdsw"
        if not in_session():
            return Finding("wrong", f"{words}.", "export DASK_CML__PLATFORM=local")
        runtime = getattr(sys, "_base_executable", None) or "python3"
        command = shlex.join([runtime, "-m", "dask", "cml", "doctor"])
        return Finding("wrong", f"{words}, because it is not the runtime's Python.", command)
    except Exception as error:
        words = textwrap.shorten(f"list_workers() fails: {answers.in_words(error)}", _LONGEST_ANSWER)
        return Finding("wrong", f"{words.rstrip('.')}. If this persists, start a new session.")
    live = sum(not answers.has_ended(each) for each in listed)
    words = f"{module.__name__} lists {len(listed)} worker sessions; {live} of them are live."
    return Finding("ok", words)


def in_session() -> bool:
    """Return whether this process runs in a CML session."""
    return bool(os.environ.get("CDSW_ENGINE_ID"))


def launches_sessions() -> bool:
    """Return whether this process creates clusters of CML sessions."""
    import dask.config

    return in_session() and dask.config.get("cml.platform", None) != "local"


def configuration() -> Finding:
    """Check all options in Dask's configuration."""
    from dask_cml.options import Options

    try:
        Options.read()
    except (ValueError, TypeError) as error:
        return Finding("wrong", f"{error}.", f"{dask_command()} config list")
    return Finding("ok", "All options below cml are valid.")


def state_directory() -> Finding:
    """Check that the state directory belongs to this user, is private, and is writable."""
    from dask_cml.options import state_directory
    from dask_cml.private_files import NotPrivate, check_folder, move_aside

    directory = state_directory()
    there = _existing(directory)
    if not there.is_dir():
        return Finding("wrong", f"{there} is not a folder.", move_aside(there))
    if there == directory:
        try:
            check_folder(directory)
        except NotPrivate as error:
            return Finding("wrong", f"{directory} {error.why}.", error.command)
        if (mode := directory.stat().st_mode & 0o777) != 0o700:
            words = f"{directory} has mode {mode:04o}, expected 0700."
            command = f"chmod 700 {shlex.quote(str(directory))}"
            return Finding("warning" if mode & 0o700 == 0o700 else "wrong", words, command)
    probe = there / f".doctor-{secrets.token_hex(8)}"
    try:
        probe.write_text("written")
        probe.unlink()
    except OSError as error:
        return Finding("wrong", f"Cannot write to {there}: {error}.", f"df -h {shlex.quote(str(there))}")
    if launches_sessions() and not directory.resolve().is_relative_to(Path.home().resolve()):
        words = f"{directory} is outside {Path.home()}, the only folder that all sessions share."
        return Finding("wrong", words, 'export DASK_CML__STATE_DIRECTORY="$HOME/.dask-cml"')
    if there != directory:
        return Finding("ok", f"The first cluster will create {directory}.")
    return Finding("ok", f"{directory} belongs to you, and only you can read and write it.")


def scratch() -> Finding:
    """Check that Dask spills to a local disk of the session, and that the disk has free space."""
    import dask.config

    from dask_cml.options import state_directory

    folder = Path(dask.config.get("temporary-directory", None) or tempfile.gettempdir())
    disk, shared = _existing(folder), _existing(state_directory())
    if launches_sessions() and disk.stat().st_dev == shared.stat().st_dev:
        words = f"{folder} is on the project file system, which is slow. Dask workers spill data to it."
        return Finding("warning", words, "export TMPDIR=/tmp")
    total, _, free = shutil.disk_usage(disk)
    words = f"{folder} has {free / 1e9:.1f} of {total / 1e9:.1f} GB free."
    if free > _LEAST_FREE * total:
        return Finding("ok", words)
    return Finding("warning", words, f"du -sh {shlex.quote(str(folder))}")


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if os.path.lexists(each))
