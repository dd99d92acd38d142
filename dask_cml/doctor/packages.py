"""Checks of the installed packages."""

from __future__ import annotations

import site
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dask_cml.doctor.finding import Finding, pip_command
from dask_cml.doctor.session import in_session

if TYPE_CHECKING:
    from packaging.requirements import Requirement

#: Packages that keep sessions of the project from starting if the home folder contains other versions of
#: them.
_OF_THE_IMAGE = (
    "ipykernel",
    "ipython",
    "jupyter-client",
    "jupyter-server",
    "jupyterlab",
    "tornado",
    "traitlets",
)


def version(package: str) -> str | None:
    """Return the version of an installed package. Return None if it is not installed."""
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
    """Check that no second dask or distributed, for example in the home folder, hides the image's."""
    several = {name: found for name in ("dask", "distributed") if len(found := _copies(name)) > 1}
    if not several:
        return Finding("dask", "ok", "One dask and one distributed are installed.")
    words = []
    for name, copies in several.items():
        (used, used_version), *hidden = copies.items()
        others = ", ".join(f"{other} in {folder}" for folder, other in hidden)
        words.append(f"{name} {used_version} in {used} hides {others}.")
    in_home = [name for name, copies in several.items() if next(iter(copies)) == _user_site()]
    if not in_home:
        return Finding("dask", "warning", " ".join(words))
    # pip removes the copy that it finds first: a second run would remove the image's.
    words.append("Run this command once: it removes the copy in your home folder.")
    return Finding("dask", "warning", " ".join(words), pip_command("uninstall", "--yes", *in_home))


def _copies(package: str) -> dict[Path, str]:
    """Return the version in each folder of Python's path that contains a package. Python uses the first."""
    copies: dict[Path, str] = {}
    for found in metadata.distributions(name=package):
        copies.setdefault(Path(str(found.locate_file(""))).resolve(), found.version)
    return copies


def _user_site() -> Path:
    return Path(site.getusersitepackages()).resolve()


def image() -> Finding:
    """Check that the home folder has no copies of packages that the image's kernels and JupyterLab use."""
    if not in_session():
        return Finding("image", "ok", "Only CML sessions have a runtime image.")
    there = {
        name: copies[_user_site()] for name in _OF_THE_IMAGE if _user_site() in (copies := _copies(name))
    }
    if not there:
        return Finding("image", "ok", "Kernels and JupyterLab use the image's own packages.")
    listed = ", ".join(f"{name} {found}" for name, found in there.items())
    words = (
        f"{_user_site()} contains {listed}. With these, sessions of the project may not start. "
        "Run this command once: it removes the copies in your home folder."
    )
    return Finding("image", "warning", words, pip_command("uninstall", "--yes", *there))


def dashboard() -> Finding:
    """Check that the packages for the scheduler's dashboard are installed."""
    return optional("dashboard", "warning", "dashboard", "Without it, schedulers have no dashboard.")


def optional(name: str, state: Literal["warning", "wrong"], extra: str, without: str) -> Finding:
    """Check that the packages of an extra are installed."""
    needed = _requirements("dask-cml", extra)
    missing = {f"{each.name}{each.specifier}": _found(each) for each in needed if not _fits(each)}
    if not missing:
        there = ", ".join(f"{each.name} {version(each.name)}" for each in needed)
        return Finding(name, "ok", f"{there}.")
    return Finding(name, state, f"{'; '.join(missing.values())}. {without}", pip_command("install", *missing))
