"""Check the Workers API, the configuration and the state directory."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import stat
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from dask_cml.doctor.finding import Finding, State, dask_command

_LONGEST_ANSWER = 300
#: The share of a disk below which it is nearly full.
_LEAST_FREE = 0.1


def platform() -> Finding:
    """Check that this process can import the platform's module."""
    from dask_cml.errors import NotOnCML

    try:
        module = _module()
    except NotOnCML:
        if not in_session():
            words = "Cannot import cml.workers_v1 or cdsw: not in a CML session."
            return Finding("platform", "wrong", words, "export DASK_CML__PLATFORM=local")
        words = f"{sys.executable} cannot import cml.workers_v1, because it is not the runtime's Python."
        runtime = getattr(sys, "_base_executable", None) or "python3"
        return Finding("platform", "wrong", words, shlex.join([runtime, "-m", "dask", "cml", "doctor"]))
    if _is_local():
        return Finding("platform", "ok", "The local platform runs sessions as processes of this machine.")
    return Finding("platform", "ok", f"{module.__name__} is available.")


def _module() -> Any:
    import dask.config

    from dask_cml.sessions.loading import load_platform

    return load_platform(dask.config.get("cml.platform", None))  # `configuration` finds an invalid one


def _is_local() -> bool:
    return _module().__name__ == "dask_cml.local"


def in_session() -> bool:
    """Return whether this process runs in a CML session."""
    return bool(os.environ.get("CDSW_ENGINE_ID"))


def launches_sessions() -> bool:
    """Return whether this process creates clusters of CML sessions."""
    from dask_cml.errors import NotOnCML

    try:
        return in_session() and not _is_local()
    except NotOnCML:
        return False


def key() -> Finding:
    """Check that the environment contains the API key that the Workers API requires."""
    if os.environ.get("CDSW_API_KEY"):
        return Finding("key", "ok", "CDSW_API_KEY is set.")
    if not launches_sessions():
        return Finding("key", "ok", "CDSW_API_KEY is needed only on CML.")
    words = (
        "CDSW_API_KEY is not set, and the Workers API requires it. CML sets it in every session: "
        "start a new session, or find the code that removes it from the environment."
    )
    return Finding("key", "wrong", words)


def sessions() -> Finding | list[Finding]:
    """Check that the platform lists this session's worker sessions."""
    from dask_cml.errors import NotOnCML
    from dask_cml.sessions import answers

    try:
        listed = answers.listed(_module().list_workers())
    except NotOnCML:
        return []
    except Exception as error:
        words = textwrap.shorten(f"list_workers() fails: {answers.in_words(error)}", _LONGEST_ANSWER)
        return Finding("sessions", "wrong", f"{words.rstrip('.')}. If this lasts, start a new session.")
    live = sum(not answers.has_ended(each) for each in listed)
    words = f"The platform lists {len(listed)} worker sessions; {live} of them are live."
    return Finding("sessions", "ok", words)


def configuration() -> Finding:
    """Check all options in Dask's configuration."""
    from dask_cml.options import Options

    try:
        Options.read()
    except (ValueError, TypeError) as error:
        return Finding("configuration", "wrong", f"{error}.", f"{dask_command()} config list")
    return Finding("configuration", "ok", "All options below cml are valid.")


def state_directory() -> Finding:
    """Check that the state directory belongs to this user, is private, and is writable."""
    from dask_cml.options import state_directory
    from dask_cml.private_files import NotPrivate, check_folder, move_aside

    directory = state_directory()
    there = _existing(directory)
    if not there.is_dir():
        return _state("wrong", f"{there} is not a folder.", move_aside(there))
    if there == directory:
        try:
            check_folder(directory)
        except NotPrivate as error:
            return _state("wrong", f"{directory} {error.why}.", error.command)
        mode = stat.S_IMODE(directory.stat().st_mode)
        if mode & 0o777 != 0o700:
            usable = mode & 0o700 == 0o700
            effect = "other users can open it" if usable else "you cannot use it"
            words = f"{directory} has mode {mode:04o}, so {effect}."
            command = f"chmod 700 {shlex.quote(str(directory))}"
            return _state("warning" if usable else "wrong", words, command)
    probe = there / f".doctor-{secrets.token_hex(8)}"
    try:
        probe.write_text("written")
        probe.unlink()
    except OSError as error:
        return _state("wrong", f"Cannot write to {there}: {error}.", f"df -h {shlex.quote(str(there))}")
    if launches_sessions() and not directory.resolve().is_relative_to(Path.home().resolve()):
        words = f"{directory} is outside {Path.home()}, the only folder that all sessions share."
        return _state("wrong", words, 'export DASK_CML__STATE_DIRECTORY="$HOME/.dask-cml"')
    if there != directory:
        return _state("ok", f"The first cluster will create {directory}.")
    return _state("ok", f"{directory} belongs to you, and only you can read and write it.")


def scratch() -> Finding:
    """Check that Dask spills to a disk of the session itself, with room."""
    import dask.config

    from dask_cml.options import state_directory

    folder = Path(dask.config.get("temporary-directory", None) or tempfile.gettempdir())
    disk, shared = _existing(folder), _existing(state_directory())
    if launches_sessions() and disk.stat().st_dev == shared.stat().st_dev:
        words = f"{folder} is on the project file system, which is slow. Dask workers spill data to it."
        return Finding("scratch", "warning", words, "export TMPDIR=/tmp")
    total, _, free = shutil.disk_usage(disk)
    words = f"{folder} has {free / 1e9:.1f} of {total / 1e9:.1f} GB free."
    if free > _LEAST_FREE * total:
        return Finding("scratch", "ok", words)
    return Finding("scratch", "warning", words, f"du -sh {shlex.quote(str(folder))}")


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


def _state(state: State, words: str, command: str | None = None) -> Finding:
    return Finding("state directory", state, words, command)
