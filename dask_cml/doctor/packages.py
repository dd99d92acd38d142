"""Check the installed packages."""

from __future__ import annotations

import signal
import site
import subprocess
import sys
import textwrap
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from dask_cml.doctor.finding import Finding, pip_command
from dask_cml.doctor.session import in_session

if TYPE_CHECKING:
    from packaging.requirements import Requirement

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

OLDEST_BOKEH = "3.1"
#: First broken bokeh, first fixed distributed, and the part of the dashboard that breaks between them.
BREAKS = ("3.7", "2025.3.0", "the profile panes"), ("3.9", "2026.3.0", "performance reports")

#: Packages with strict requirements, which Dask imports only when it needs them.
_IMPORTED = ("bokeh", "numba", "pandas", "pyarrow")
_LONGEST_REASON = 300


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> Finding:
    """Check that the requirements of dask-cml, dask and distributed are installed."""
    unmet = {
        f"{each.name}{each.specifier}": f"{owner} needs {each.name}{each.specifier}, {_found(each)}"
        for owner in ("dask-cml", "distributed", "dask")
        for each in _requirements(owner)
        if not _fits(each)
    }
    if unmet:
        return Finding("versions", "wrong", f"{'; '.join(unmet.values())}.", pip_command("install", *unmet))
    there = (f"{name} {version(name)}" for name in ("dask-cml", "dask", "distributed", "cloudpickle"))
    python = ".".join(map(str, sys.version_info[:3]))
    supported = next(each.specifier for each in _requirements("dask-cml") if each.name == "distributed")
    words = f"Python {python}, {', '.join(there)}. dask-cml supports distributed{supported}."
    return Finding("versions", "ok", words)


def _requirements(package: str, extra: str = "") -> list[Requirement]:
    """Return the requirements of a package, or the additional requirements of one of its extras."""
    from packaging.requirements import Requirement

    try:
        every = map(Requirement, metadata.requires(package) or ())
    except metadata.PackageNotFoundError:
        return []

    def applies(requirement: Requirement, extra: str) -> bool:
        return requirement.marker is None or requirement.marker.evaluate({"extra": extra})

    return [each for each in every if applies(each, extra) and not (extra and applies(each, ""))]


def _fits(requirement: Requirement) -> bool:
    there = version(requirement.name)
    return there is not None and requirement.specifier.contains(there, prereleases=True)


def _found(requirement: Requirement) -> str:
    there = version(requirement.name)
    return f"{requirement.name} {there} is installed" if there else f"{requirement.name} is not installed"


def one_dask() -> Finding:
    """Check that no second dask or distributed takes precedence over the image's."""
    several = {name: found for name in ("dask", "distributed") if len(found := _copies(name)) > 1}
    if not several:
        return Finding("dask", "ok", "One dask and one distributed are installed.")
    words = []
    for name, copies in several.items():
        (used, used_version), *hidden = copies.items()
        others = ", ".join(f"{other} in {folder}" for folder, other in hidden)
        words.append(f"{name} {used_version} in {used} takes precedence over {others}.")
    in_home = [name for name, copies in several.items() if next(iter(copies)) == _user_site()]
    if not in_home:
        return Finding("dask", "warning", " ".join(words))
    # pip removes the first copy on the path: a second run would remove the image's.
    words.append("Run this command once: it removes the copy in your home folder.")
    return Finding("dask", "warning", " ".join(words), pip_command("uninstall", "--yes", *in_home))


def _copies(package: str) -> dict[Path, str]:
    """Return a package's version in each folder of Python's path. Python uses the first."""
    copies: dict[Path, str] = {}
    for found in metadata.distributions(name=package):
        copies.setdefault(Path(str(found.locate_file(""))).resolve(), found.version)
    return copies


def _user_site() -> Path:
    return Path(site.getusersitepackages()).resolve()


def image() -> Finding:
    """Check that the home folder contains no copies of packages that kernels and JupyterLab use."""
    if not in_session():
        return Finding("image", "ok", "Only CML sessions have a runtime image.")
    there = {
        name: copies[_user_site()] for name in _OF_THE_IMAGE if _user_site() in (copies := _copies(name))
    }
    if not there:
        return Finding("image", "ok", "Kernels and JupyterLab use the image's own packages.")
    listed = ", ".join(f"{name} {found}" for name, found in there.items())
    words = (
        f"{_user_site()} contains {listed}. Sessions of the project may fail to start with these. "
        "Run this command once: it removes the copies in your home folder."
    )
    return Finding("image", "warning", words, pip_command("uninstall", "--yes", *there))


def dashboard() -> Finding:
    """Check that bokeh is installed, and works with the installed distributed."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    distributed, bokeh = version("distributed") or "0", version("bokeh")
    breaks = {since: part for since, until, part in BREAKS if Version(distributed) < Version(until)}
    supported = SpecifierSet(",".join([f">={OLDEST_BOKEH}", *(f"<{since}" for since in [*breaks][:1])]))
    if bokeh and supported.contains(bokeh, prereleases=True):
        return Finding("dashboard", "ok", f"bokeh {bokeh} works with distributed {distributed}.")
    if not bokeh:
        words = "bokeh is not installed. Without it, schedulers have no dashboard."
    elif broken := [part for since, part in breaks.items() if Version(bokeh) >= Version(since)]:
        words = f"bokeh {bokeh} is too new for distributed {distributed}: {' and '.join(broken)} fail."
    else:
        words = f"bokeh {bokeh} is too old. Schedulers have no dashboard before bokeh {OLDEST_BOKEH}."
    return Finding("dashboard", "warning", words, pip_command("install", f"bokeh{supported}"))


def imports(timeout: float) -> Finding:
    """Import packages that computations often use, each in a separate process, because an import may crash.

    Parameters
    ----------
    timeout : float
        Time limit of all imports together, in seconds.
    """
    deadline = time.monotonic() + timeout
    processes = {name: _begin_import(name) for name in _IMPORTED if version(name)}
    reasons = {name: _why_it_failed(process, deadline) for name, process in processes.items()}
    failed = {name: reason for name, reason in reasons.items() if reason}
    if not failed:
        return Finding("imports", "ok", f"Python can import {', '.join(processes) or 'all packages'}.")
    words = " ".join(f"{name} {version(name)} fails to import: {why}." for name, why in failed.items())
    bounds = [each for each in _requirements("dask-cml", "notebooks") if each.name in failed]
    mending = [f"{each.name}{each.specifier}" for each in bounds if not _fits(each)]
    return Finding("imports", "warning", words, pip_command("install", *mending) if mending else None)


def _begin_import(name: str) -> subprocess.Popen[str]:
    command, output = [sys.executable, "-c", f"import {name}"], subprocess.PIPE
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, errors="replace")


def _why_it_failed(process: subprocess.Popen[str], deadline: float) -> str | None:
    try:
        output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return "the import timed out"
    if process.returncode < 0:
        return f"it crashed ({signal.strsignal(-process.returncode)})"
    if process.returncode == 0:
        return None
    last = output.strip().rpartition("\n")[2] or f"exit code {process.returncode}"
    return textwrap.shorten(last, _LONGEST_REASON).rstrip(".")


def optional(name: str, extra: str, without: str) -> Finding:
    """Check that the packages of an extra are installed."""
    needed = [each for each in _requirements("dask-cml", extra) if each.name != "dask-cml"]
    missing = {f"{each.name}{each.specifier}": _found(each) for each in needed if not _fits(each)}
    if not missing:
        there = ", ".join(f"{each.name} {version(each.name)}" for each in needed)
        return Finding(name, "ok", f"{there}.")
    words = f"{'; '.join(missing.values())}. {without}"
    return Finding(name, "warning", words, pip_command("install", *missing))
