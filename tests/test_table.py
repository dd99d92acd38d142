"""The table of the options: all that it says is valid, is known, and is what users read elsewhere."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import click
import jsonschema
import pytest
import yaml
from distributed.cli.dask_scheduler import main as scheduler
from distributed.cli.dask_worker import main as worker

import dask_cml
from dask_cml import CMLCluster
from dask_cml.options import GROUP_OPTIONS, OPTION_NAMES
from dask_cml.options.configuration import DEFAULTS, setting
from dask_cml.options.table import OPTIONS

ROOT = Path(__file__).parents[1]
PACKAGE = Path(dask_cml.__file__).parent
SCHEMA = yaml.safe_load((PACKAGE / "cml-schema.yaml").read_text())


def entries(properties=SCHEMA["properties"]["cml"]["properties"], section=""):
    for name, entry in properties.items():
        if "properties" in entry:
            yield from entries(entry["properties"], f"{name}.")
        else:
            yield f"{section}{name}", entry


def test_the_schema_is_one_and_its_defaults_are_valid():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(DEFAULTS)


def test_every_entry_of_the_schema_is_an_option():
    assert [key for key, _ in entries()] == [*OPTIONS]


@pytest.mark.parametrize("key", OPTIONS)
def test_a_default_passes_the_check_of_its_option(key):
    values = dict.fromkeys(OPTION_NAMES, 1) | {"worker_command": ("dask", "worker"), "create_mode": "create"}
    setting(key, values)


def test_the_file_of_defaults_is_that_of_the_table():
    """After a change of the table, `python docs/write_defaults.py` writes the file."""
    written = (PACKAGE / "cml.yaml").read_text()
    assert written == runpy.run_path(str(ROOT / "docs" / "write_defaults.py"))["text"]()
    assert yaml.safe_load(written) == DEFAULTS


def test_the_arguments_of_a_cluster_are_in_the_table_after_those_that_their_checks_need():
    arguments = {*inspect.signature(CMLCluster).parameters}
    assert {*OPTION_NAMES} == arguments - {"asynchronous", "loop", "silence_logs", "quiet", "kwargs"}
    for i, name in enumerate(OPTION_NAMES):
        assert {*OPTIONS[name.replace("_", "-")].needs} <= {*OPTION_NAMES[:i]}


def test_the_arguments_of_a_worker_group_are_the_grouped_options():
    arguments = {*inspect.signature(CMLCluster.add_worker_group).parameters}
    assert {*GROUP_OPTIONS} == arguments - {"self", "name", "kwargs"}
    named = re.findall(r"`([\w-]+)`", OPTIONS["worker-groups"].description)
    assert sorted(named) == sorted(name.replace("_", "-") for name in GROUP_OPTIONS)


@pytest.mark.parametrize("option", [option for option in OPTIONS.values() if "refused" in option.bounds])
def test_a_refused_argument_has_an_argument_in_its_place(option):
    for reason in option.bounds["refused"]:
        if name := re.fullmatch(r"use the argument (\w+)", reason):
            assert name[1] in OPTION_NAMES


@pytest.mark.parametrize(("key", "program"), [("worker-args", worker), ("scheduler-args", scheduler)])
def test_refused_arguments_are_those_of_the_program(key, program):
    known = {"--help", "-h"} | {
        name for parameter in program.params for name in (*parameter.opts, *parameter.secondary_opts)
    }
    assert isinstance(program, click.Command)
    assert {word for words in OPTIONS[key].bounds["refused"].values() for word in words} <= known
