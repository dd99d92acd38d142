"""The package as a whole: what importing it costs, what it offers, and that all of it is documented."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

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
    assert {path for path in files - packed if path.suffix not in (".py", ".pyc")} == set()


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
