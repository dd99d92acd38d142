"""Check this environment: the Workers API, the configuration, the folders, the packages and JupyterLab."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import click
import dask.config

from dask_cml import options
from dask_cml.errors import NotOnCML
from dask_cml.options.table import OPTIONS
from dask_cml.private_files import NotPrivate, check_folder, move_aside
from dask_cml.sessions import here
from dask_cml.sessions.here import this_session
from dask_cml.sessions.workers_api import load_platform, origin
from dask_cml.words import counted, printable

#: Characters of an answer of the platform, or of an error of an import.
_MOST_CHARACTERS = 300
#: The share of a disk below which it is nearly full.
_LEAST_FREE = 0.1

_DASK = ("dask", "distributed")
#: Sessions of the project may fail to start if the home folder contains other versions of these packages.
_OF_THE_IMAGE = (
    "ipykernel",
    "ipython",
    "jupyter-client",
    "jupyter-server",
    "jupyterlab",
    "tornado",
    "traitlets",
)

_SERVER_EXTENSIONS = ("dask_labextension", "dask_cml.jupyter")

State = Literal["ok", "warning", "wrong"]

_COLORS = {"ok": "green", "warning": "yellow", "wrong": "red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Parameters
    ----------
    state : {"ok", "warning", "wrong"}
        With ``"wrong"``, clusters cannot run. With ``"warning"``, clusters run, but a feature does not work.
    words : str
        The result, in sentences.
    command : str, optional
        A shell command that fixes the problem.
    name : str
        The name of the check, or of the cluster.
    """

    state: State
    words: str
    command: str | None = None
    name: str = ""

    def render(self) -> str:
        """Format the finding for a terminal, with the command on a separate line."""
        begin = f"{click.style(self.state, fg=_COLORS[self.state])}{' ' * (9 - len(self.state))}"
        command = f"\n{'':<28}{printable(self.command)}" if self.command else ""
        return f"{begin}{printable(self.name):<16} {printable(self.words)}" + command


def pip_install(*arguments: str) -> str:
    """Return a shell command that installs packages by this Python's pip."""
    user = ["--user"] if sys.prefix == sys.base_prefix else []
    return shlex.join([sys.executable, "-m", "pip", "install", *user, *arguments])


def dask_command() -> str:
    """Return the shell command ``dask``, or its long form if ``dask`` is not on the PATH."""
    return "dask" if shutil.which("dask") else shlex.join([sys.executable, "-m", "dask"])


def platform() -> Finding:
    """Check that this process can import the platform's module, and that the module lists sessions."""
    try:  # `configuration` finds an invalid platform
        module = load_platform(dask.config.get("cml.platform", None))
    except NotOnCML as error:
        if error.__cause__ is not None:  # the module is there
            return Finding("wrong", f"{textwrap.shorten(str(error), _MOST_CHARACTERS).rstrip('.')}.")
        words = f"{sys.executable} cannot import cml.workers_v1 or cdsw"
        if this_session() is None:
            return Finding("wrong", f"{words}.", "export DASK_CML__PLATFORM=local")
        runtime = getattr(sys, "_base_executable", None) or "python3"
        command = shlex.join([runtime, "-m", "dask", "cml", "doctor"])
        return Finding("wrong", f"{words}, because it is not the runtime's Python.", command)
    from dask_cml.sessions import workers_api

    file = f"{module.__name__} is {origin(module.__file__)}."
    try:
        listed = workers_api.listed(module.list_workers())
    except Exception as error:  # of the platform's library
        words = textwrap.shorten(f"list_workers() fails: {workers_api.in_words(error)}", _MOST_CHARACTERS)
        return Finding("wrong", f"{words.rstrip('.')}. If this persists, start a new session. {file}")
    live = sum(not workers_api.has_ended(session) for session in listed)
    words = f"{module.__name__} lists {counted(len(listed), 'worker session')}, {live} live."
    return Finding("ok", f"{words} {file}")


def launches_sessions() -> bool:
    """Return whether this process creates clusters of CML sessions."""
    return this_session() is not None and dask.config.get("cml.platform", None) != "local"


def network() -> Finding:
    """Check that no service mesh may keep Dask from connecting sessions."""
    if not launches_sessions():
        return Finding("ok", "Clusters on this machine use its loopback only.")
    if not here.has_sidecar():
        return Finding("ok", "No Istio sidecar runs in this session.")
    words = (
        f"{here.MESH_EFFECT} No cluster starts then. An administrator can see the mode by "
        f"`{here.SHOW_MESH}`, and let Dask pass by this command."
    )
    return Finding("warning", words, here.PERMIT_MESH)


def configuration() -> Finding:
    """Check all options in Dask's configuration."""
    try:
        checked = vars(options.Options.read())
        for key in OPTIONS:
            options.setting(key, checked)
    except (ValueError, TypeError) as error:
        return Finding("wrong", f"{error}.", f"{dask_command()} config list")
    return Finding("ok", "All options below cml are valid.")


def state_directory() -> Finding:
    """Check that the state directory belongs to this user, is private, and is writable."""
    directory = options.state_directory()
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
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"written")
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
    configured = dask.config.get("temporary-directory", None) or tempfile.gettempdir()
    folder = Path(os.path.expanduser(os.path.expandvars(configured)))
    disk, shared = _existing(folder), _existing(options.state_directory())
    if launches_sessions() and disk.stat().st_dev == shared.stat().st_dev:
        words = f"{folder} is on the project file system, which is slow. Dask workers spill data to it."
        return Finding("warning", words, "export TMPDIR=/tmp")
    total, _, free = shutil.disk_usage(disk)
    words = f"{folder} has {free / 1e9:.1f} of {total / 1e9:.1f} GB free."
    if free > _LEAST_FREE * total:
        return Finding("ok", words)
    return Finding("warning", words, f"du -sh {shlex.quote(str(folder))}")


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if os.path.lexists(folder))


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def unmet(package: str, extra: str = "") -> dict[str, str]:
    """Return the unmet requirements of a package, or of an extra, each with what is installed."""
    from packaging.requirements import Requirement

    found = {}
    for needed in map(Requirement, metadata.requires(package) or ()):
        there = version(needed.name)
        fits = there is not None and needed.specifier.contains(there, prereleases=True)
        applies = needed.marker.evaluate({"extra": extra}) if needed.marker else not extra
        if applies and not fits:
            found[f"{needed.name}{needed.specifier}"] = (
                f"{needed.name} {f'{there} is' if there else 'is not'} installed"
            )
    return found


def versions() -> Finding:
    """Check that the requirements of dask-cml, dask and distributed are installed."""
    missing = {
        requirement: f"{owner} needs {requirement}, {found}"
        for owner in ("dask-cml", "distributed", "dask")
        if version(owner)
        for requirement, found in unmet(owner).items()
    }
    if missing:
        return Finding("wrong", f"{'; '.join(missing.values())}.", pip_install(*missing))
    there = (f"{name} {version(name)}" for name in ("dask-cml", "dask", "distributed", "cloudpickle"))
    return Finding("ok", f"Python {sys.version.split()[0]}, {', '.join(there)}.")


def image() -> Finding:
    """Check that no second copy of Dask or, in sessions, of the image's packages takes precedence."""
    words = []
    for name in (*_DASK, *(_OF_THE_IMAGE if this_session() else ())):
        copies = _copies(name)
        if len(copies) > 1:
            (used, first), *hidden = copies.items()
            others = ", ".join(f"{other} in {folder}" for folder, other in hidden)
            words.append(f"{name} {first} in {used} takes precedence over {others}.")
    if words:
        return Finding("warning", f"{' '.join(words)} Sessions may fail.")
    return Finding("ok", "No package takes precedence over the image's own.")


def _copies(package: str) -> dict[Path, str]:
    """Return a package's version in each folder of Python's path. Python uses the first."""
    copies: dict[Path, str] = {}
    for found in metadata.distributions(name=package):
        copies.setdefault(Path(str(found.locate_file(""))).resolve(), found.version)
    return copies


def dashboard() -> Finding:
    """Check that what dask-cml requires for the scheduler's dashboard is installed."""
    if missing := unmet("dask-cml", "dashboard"):
        lacks = " and ".join(missing.values())
        words = f"Parts of the dashboard fail, because {lacks}. It needs {', '.join(missing)}."
        return Finding("warning", words, pip_install(*missing))
    return Finding("ok", "What the dashboard needs is installed.")


def pyarrow(timeout: float) -> Finding:
    """Import pyarrow in another process, because the import may crash: Dask says only that it is missing.

    Parameters
    ----------
    timeout : float
        Time limit of the import, in seconds.
    """
    if version("pyarrow") is None:
        return Finding("ok", "Not installed. Only dask.dataframe needs it.")
    code, output = [sys.executable, "-c", "import pyarrow"], subprocess.PIPE
    try:
        subprocess.run(code, stdout=output, stderr=subprocess.STDOUT, timeout=timeout, check=True)
    except subprocess.TimeoutExpired:
        why = "the import timed out"
    except subprocess.CalledProcessError as error:
        last = error.stdout.decode(errors="replace").strip().rpartition("\n")[2]
        why = textwrap.shorten(last or str(error), _MOST_CHARACTERS).rstrip(".")
    else:
        return Finding("ok", "Python can import pyarrow.")
    fitting = [needed for needed in unmet("dask-cml", "notebooks") if needed.startswith("pyarrow")]
    command = pip_install(*fitting) if fitting else None
    return Finding("warning", f"pyarrow {version('pyarrow')} fails to import: {why}.", command)


def sidebar() -> Finding:
    """Check that JupyterLab's Dask sidebar is installed and enabled."""
    if version("jupyterlab") is None:
        return Finding("ok", "Only JupyterLab shows it, and JupyterLab is not installed.")
    if missing := unmet("dask-cml", "jupyter"):
        words = f"{'; '.join(missing.values())}. JupyterLab shows no Dask sidebar without these packages."
        return Finding("warning", words, pip_install(*missing))
    from jupyter_core.paths import jupyter_config_path
    from jupyter_server.extension.config import ExtensionConfigManager

    path = jupyter_config_path()
    enabled = ExtensionConfigManager(read_config_path=path).get_jpserver_extensions()
    off = [name for name in _SERVER_EXTENSIONS if not enabled.get(name)]
    if not off:
        return Finding("ok", "The Dask sidebar is installed, and the Jupyter server enables it.")
    words = (
        f"The Jupyter server's configuration does not enable {' and '.join(off)}. "
        "Run this command, and start a new session."
    )
    return Finding("warning", words, _enable(off, path[0]))


def _enable(extensions: Sequence[str], directory: str) -> str:
    # `jupyter server extension enable` does not find the extensions that pip installed into ~/.local.
    settings = {"ServerApp": {"jpserver_extensions": dict.fromkeys(extensions, True)}}
    code = (
        "from jupyter_server.config_manager import BaseJSONConfigManager as Manager; "
        f'Manager(config_dir="{directory}").update("jupyter_server_config", {settings})'
    ).replace("'", '"')
    return shlex.join([sys.executable, "-c", code])
