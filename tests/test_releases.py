"""The table of supported releases agrees with the package's metadata and with the images' constraints."""

from __future__ import annotations

import csv
import re
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / ".ci/images"
WORKFLOW = ROOT / ".github/workflows/ci.yml"
with (ROOT / "docs/releases.csv").open() as file:
    TABLE = [*csv.DictReader(file)]
#: The first bokeh with which parts of the dashboard fail, and the first distributed with which they work.
BREAKS = ("3.7", "2025.3.0"), ("3.9", "2026.3.0")


def required(package="distributed", extra="", python="3.11"):
    """What dask-cml, or an extra of it, requires of a package in a release of Python."""
    requirements = [Requirement(text) for text in metadata.requires("dask-cml")]
    markers = {"extra": extra, "python_version": python}
    [found] = [
        requirement.specifier
        for requirement in requirements
        if requirement.name == package
        and bool(requirement.marker) is bool(extra)
        and (requirement.marker is None or requirement.marker.evaluate(markers))
    ]
    return found


def constraints(file):
    """The specifiers in a file of constraints, by the package's name."""
    lines = (IMAGES / file).read_text().splitlines()
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    return {requirement.name: requirement.specifier for requirement in requirements}


def test_the_oldest_releases_in_the_table_are_the_oldest_allowed():
    oldest = min(Version(row["distributed"]) for row in TABLE if row["distributed"] != "newest")
    assert required() == SpecifierSet(f">={oldest}")
    oldest_python = min(Version(row["Python"]) for row in TABLE)
    assert metadata.metadata("dask-cml")["Requires-Python"] == f">={oldest_python}"


def test_the_newest_release_that_dask_ctl_allows_is_in_the_table():
    [row] = [row for row in TABLE if row["Tests"] == "ctl"]
    assert required(extra="ctl") == SpecifierSet(f"<={row['distributed']}")


@pytest.mark.skipif(not WORKFLOW.exists(), reason="needs the repository, not a source distribution")
def test_each_python_of_the_metadata_is_tested():
    matrix = yaml.safe_load(WORKFLOW.read_text())["jobs"]["tests"]["strategy"]["matrix"]
    classifiers = metadata.metadata("dask-cml").get_all("Classifier")
    named = [classifier.rpartition(" ")[2] for classifier in classifiers if " :: Python :: 3." in classifier]
    assert matrix["python"] == named
    assert {row["Python"] for row in TABLE} <= {*named}


def test_the_page_names_the_oldest_releases_and_those_of_the_images():
    page = (ROOT / "docs/compatibility.md").read_text()
    assert f"distributed {str(required()).removeprefix('>=')} and newer" in page
    images = [row for row in TABLE if row["Packages of"] == "JupyterLab image"]
    assert images
    assert [row for row in images if f"| {row['Python']} | {row['distributed']} |" not in page] == []


def test_the_pages_name_the_wheel_of_this_release():
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    [version] = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    wheel = f"dask_cml-{version}-py3-none-any.whl"
    assert {*re.findall(r"dask_cml-\S+?\.whl", pages)} == {wheel}


@pytest.mark.skipif(not IMAGES.exists(), reason="needs the repository, not a source distribution")
def test_the_images_constraints_hold_the_releases_in_the_table_and_exclude_what_the_extras_exclude():
    for row in TABLE:
        if row["Constraints"]:
            pins = constraints(row["Constraints"])
            assert pins["distributed"] == pins["dask"] == SpecifierSet(f"=={row['distributed']}")
    for path in IMAGES.glob("*.txt"):
        python, pins = f"{path.name[2]}.{path.name[3:5]}", constraints(path.name)
        assert {*pins["pyarrow"]} <= {*required("pyarrow", "notebooks", python)}
        if "distributed" in pins:
            assert {*pins["bokeh"]} <= {*required("bokeh", "dashboard", python)}


def test_the_extra_dashboard_excludes_a_bokeh_that_breaks_the_dashboard_of_a_release_in_the_table():
    for row in TABLE:
        allowed = required("bokeh", "dashboard", row["Python"])
        assert "3.1" in allowed
        if row["distributed"] != "newest":
            broken = [since for since, until in BREAKS if Version(row["distributed"]) < Version(until)]
            assert [*allowed.filter(broken)] == []
