"""The table of supported releases agrees with the package's metadata and with the images' constraints."""

from __future__ import annotations

import csv
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


def required(extra=""):
    """What the package, or an extra of it, requires of distributed."""
    for text in metadata.requires("dask-cml"):
        requirement = Requirement(text)
        wanted = requirement.marker is None if not extra else requirement.marker is not None
        if requirement.name == "distributed" and wanted and (not extra or extra in str(requirement.marker)):
            return requirement.specifier
    raise AssertionError(f"nothing is required of distributed by {extra or 'the package'}")


def test_the_oldest_releases_in_the_table_are_the_oldest_allowed():
    oldest = min(Version(row["distributed"]) for row in TABLE if row["distributed"] != "newest")
    assert required() == SpecifierSet(f">={oldest}")
    oldest_python = min(Version(row["Python"]) for row in TABLE)
    assert metadata.metadata("dask-cml")["Requires-Python"] == f">={oldest_python}"


def test_the_newest_release_that_dask_ctl_allows_is_in_the_table():
    [row] = [row for row in TABLE if row["Tests"] == "ctl"]
    assert required("ctl") == SpecifierSet(f"<={row['distributed']}")


@pytest.mark.skipif(not WORKFLOW.exists(), reason="needs the repository, not a source distribution")
def test_each_python_of_the_metadata_is_tested():
    matrix = yaml.safe_load(WORKFLOW.read_text())["jobs"]["tests"]["strategy"]["matrix"]
    classifiers = metadata.metadata("dask-cml").get_all("Classifier")
    named = [each.rpartition(" ")[2] for each in classifiers if " :: Python :: 3." in each]
    assert matrix["python"] == named
    assert {row["Python"] for row in TABLE} <= {*named}


def test_the_page_names_the_oldest_releases():
    page = (ROOT / "docs/compatibility.md").read_text()
    assert f"distributed {str(required()).removeprefix('>=')} and newer" in page


@pytest.mark.skipif(not IMAGES.exists(), reason="needs the repository, not a source distribution")
@pytest.mark.parametrize(
    "row", [row for row in TABLE if row["Constraints"]], ids=lambda row: row["Constraints"]
)
def test_the_images_constraints_hold_the_release_in_the_table(row):
    pins = dict(
        line.split("==") for line in (IMAGES / row["Constraints"]).read_text().split("\n") if "==" in line
    )
    assert pins["distributed"] == pins["dask"] == row["distributed"]
