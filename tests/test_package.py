"""The package as a whole: what importing it costs, what it offers, and which releases it supports."""

import ast
import configparser
import csv
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import dask_cml

ROOT = Path(__file__).parents[1]


OFFERED = [getattr(dask_cml, name) for name in dask_cml.__all__]


def loaded(program):
    """Return the modules that a program loads, which warns of nothing."""
    command = [sys.executable, "-W", "error", "-c", f"{program}\nimport sys; print(*sys.modules)"]
    return {*subprocess.check_output(command, text=True, stderr=subprocess.STDOUT).split()}


def test_importing_it_loads_little():
    assert loaded("import dask_cml") - loaded("import dask.config") == {"dask_cml"}
    of_the_platform = loaded("import dask_cml.local, dask_cml.errors, dask_cml.wrapper")
    assert {"distributed", "msgspec"} & of_the_platform == set()
    assert "msgspec" not in loaded("import dask_cml.worker.process")


def test_commands_import_slow_modules_only_when_they_run():
    added = loaded("import dask_cml.cli") - loaded("import dask.cli")
    ours = {name for name in added if name.startswith("dask_cml")}
    assert {name for name in ours if not name.startswith("dask_cml.cli")} == {
        "dask_cml",
        "dask_cml.errors",
        "dask_cml.naming",
        "dask_cml.output",
        "dask_cml.words",
    }
    assert {name.partition(".")[0] for name in added - ours} <= {*sys.stdlib_module_names}


def test_importing_a_cluster_loads_no_package_that_dask_does_not():
    added = loaded("from dask_cml import CMLCluster") - loaded("from distributed import LocalCluster")
    assert {name.partition(".")[0] for name in added} - {*sys.stdlib_module_names} == {"dask_cml"}


def test_every_name_that_is_offered_can_be_imported_and_is_listed():
    assert [cls.__name__ for cls in OFFERED] == dask_cml.__all__
    assert {*dask_cml.__all__} < {*dir(dask_cml)}
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = dask_cml.no_such_name
    with pytest.raises(ImportError):
        exec("from dask_cml import no_such_name")


def test_the_wheel_has_every_file_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["dask_cml"].split()
    packed = {path for pattern in patterns for path in (ROOT / "dask_cml").glob(pattern)}
    files = {path for path in (ROOT / "dask_cml").rglob("*") if path.is_file()}
    # Another process may be writing what Python has compiled, under any name.
    sources = {path for path in files - packed if path.parent.name != "__pycache__"}
    assert {path for path in sources if path.suffix != ".py"} == set()


def required(*lists):
    """Return what lists of requirements in pyproject.toml contain, by name."""
    text = (ROOT / "pyproject.toml").read_text()
    found = [re.search(rf"^{name} = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1] for name in lists]
    lines = re.findall(r'^ *"([^"]+)"', "".join(found), re.MULTILINE)
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def imported():
    """Yield the packages that the modules of dask-cml import when they are imported."""
    for path in (ROOT / "dask_cml").rglob("*.py"):
        if path.name != "jupyter.py":  # which the extra is for
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Import):
                    yield from (alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom):
                    yield node.module


def test_what_the_package_imports_is_what_it_requires():
    packages = {name.partition(".")[0] for name in imported()} - {*sys.stdlib_module_names, "dask_cml"}
    packages = {"pyyaml" if name == "yaml" else name for name in packages}
    packages |= {"cryptography", "packaging"}  # the first is distributed's
    assert packages == {*required("dependencies")}


def test_the_requirements_admit_the_packages_of_the_images_and_no_release_with_known_holes():
    requirements = required("dependencies", "jupyter")
    for path in (ROOT / ".ci/images").glob("*.txt"):
        pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", path.read_text(), re.MULTILINE))
        ours = pins.keys() & requirements.keys()
        assert ours
        assert [name for name in ours if pins[name] not in requirements[name].specifier] == []
    holes = {"cryptography": "42.0.3", "jupyter-server-proxy": "4.1.2"}
    assert [name for name, version in holes.items() if version in requirements[name].specifier] == []


def test_the_tests_that_ci_runs_on_other_releases_exist():
    missing = []
    for path, test in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / ".ci/run").read_text()):
        file = ROOT / path
        if not file.exists() or (test and f"def {test}(" not in file.read_text()):
            missing.append(f"{path}::{test}")
    assert missing == []


IMAGES = ROOT / ".ci/images"
WORKFLOW = ROOT / ".github/workflows/ci.yml"
with (ROOT / "docs/releases.csv").open() as file:
    TABLE = [*csv.DictReader(file)]
#: The first bokeh with which parts of the dashboard fail, and the first distributed with which they work.
BREAKS = ("3.7", "2025.3.0"), ("3.9", "2026.3.0")


def range_of(package="distributed", extra="", python="3.11"):
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
    assert range_of() == SpecifierSet(f">={oldest}")
    oldest_python = min(Version(row["Python"]) for row in TABLE)
    assert metadata.metadata("dask-cml")["Requires-Python"] == f">={oldest_python}"


def test_the_newest_release_that_dask_ctl_allows_is_in_the_table():
    [row] = [row for row in TABLE if row["Tests"] == "ctl"]
    assert range_of(extra="ctl") == SpecifierSet(f"<={row['distributed']}")


@pytest.mark.skipif(not WORKFLOW.exists(), reason="needs the repository, not a source distribution")
def test_each_python_of_the_metadata_is_tested():
    matrix = yaml.safe_load(WORKFLOW.read_text())["jobs"]["tests"]["strategy"]["matrix"]
    classifiers = metadata.metadata("dask-cml").get_all("Classifier")
    named = [classifier.rpartition(" ")[2] for classifier in classifiers if " :: Python :: 3." in classifier]
    assert matrix["python"] == named
    assert {row["Python"] for row in TABLE} <= {*named}


def test_the_page_names_the_oldest_releases_and_those_of_the_images():
    page = (ROOT / "docs/compatibility.md").read_text()
    assert f"distributed {str(range_of()).removeprefix('>=')} and newer" in page
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
        assert {*pins["pyarrow"]} <= {*range_of("pyarrow", "notebooks", python)}
        if "distributed" in pins:
            assert {*pins["bokeh"]} <= {*range_of("bokeh", "dashboard", python)}


def test_the_extra_dashboard_excludes_a_bokeh_that_breaks_the_dashboard_of_a_release_in_the_table():
    for row in TABLE:
        allowed = range_of("bokeh", "dashboard", row["Python"])
        assert "3.1" in allowed
        if row["distributed"] != "newest":
            broken = [since for since, until in BREAKS if Version(row["distributed"]) < Version(until)]
            assert [*allowed.filter(broken)] == []
