"""The table of the options: what it says is valid, and what is written by hand beside it says the same."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest
import yaml
from distributed.cli.dask_scheduler import main as scheduler
from distributed.cli.dask_worker import main as worker

import dask_cml
from dask_cml import CMLCluster
from dask_cml.options import Options
from dask_cml.options.configuration import DEFAULTS, setting
from dask_cml.options.table import ARGUMENTS, GROUP_OPTIONS, OPTIONS, SCHEMA

#: Arguments of methods that are Dask's or their own.
OWN = ["self", "asynchronous", "loop", "silence_logs", "quiet", "kwargs"]


def test_the_schema_is_one_and_its_defaults_are_valid():
    schema = yaml.safe_load(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(DEFAULTS)


def test_a_default_passes_the_check_of_its_option():
    values = dict.fromkeys(ARGUMENTS, 1) | {"worker_command": ("dask", "worker"), "create_mode": "create"}
    for key in OPTIONS:
        setting(key, values)


def documented(function):
    """The descriptions of the parameters in a docstring by name, in order."""
    section = inspect.cleandoc(function.__doc__).split("Parameters\n----------\n")[1].split("\n\n")[0]
    found = re.findall(r"^(\w+) : .*\n((?:    .*\n?)+)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def test_names_and_defaults_are_those_of_the_table():
    """In the signatures and docstrings, in the attributes of Options, and in the file that users read."""
    of_cluster = [name for name in inspect.signature(CMLCluster.__init__).parameters if name not in OWN]
    of_group = [name for name in inspect.signature(CMLCluster.add_worker_group).parameters if name not in OWN]
    texts = documented(CMLCluster)
    assert of_cluster == [name for name in texts if name not in OWN] == [*ARGUMENTS]
    assert of_group == [*documented(CMLCluster.add_worker_group)] == ["name", *GROUP_OPTIONS]
    assert [field.name for field in fields(Options)] == [*ARGUMENTS]
    for name, argument in ARGUMENTS.items():
        shown = ":" if argument.default in (None, [], {}) else f"{argument.default}."
        assert f"Default{shown}".replace(" ", "") in re.sub('[ "`]', "", texts[name]), name
    shipped = yaml.safe_load(Path(dask_cml.__file__).with_name("cml.yaml").read_text())
    assert yaml.safe_dump(shipped, sort_keys=False) == yaml.safe_dump(DEFAULTS, sort_keys=False)


def test_the_options_of_a_worker_group_are_those_that_its_option_names():
    named = re.findall(r"`([\w-]+)`", OPTIONS["worker-groups"].description)
    assert sorted(named) == sorted(ARGUMENTS[name].key for name in GROUP_OPTIONS)


@pytest.mark.parametrize(("key", "program"), [("worker-args", worker), ("scheduler-args", scheduler)])
def test_refused_arguments_are_those_of_the_program(key, program):
    parameters = program.params
    known = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
    refused = OPTIONS[key].bounds["refused"]
    assert {word for words in refused.values() for word in words} <= {*known, "--help", "-h"}
    for reason in refused:
        argument = reason.removeprefix("use the argument ")
        assert argument == reason or argument in ARGUMENTS
