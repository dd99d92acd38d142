"""The table of the options: all that it says is valid, is known, and is what users read elsewhere."""

from __future__ import annotations

import inspect
import re
import runpy
from dataclasses import fields
from pathlib import Path

import click
import jsonschema
import pytest
import yaml
from distributed.cli.dask_scheduler import main as scheduler
from distributed.cli.dask_worker import main as worker

import dask_cml
from dask_cml import CMLCluster, checks
from dask_cml.options import Options
from dask_cml.options.configuration import DEFAULTS, setting
from dask_cml.options.table import ARGUMENTS, GROUP_OPTIONS, OPTIONS, SECTIONS

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
    values = dict.fromkeys(ARGUMENTS, 1) | {"worker_command": ("dask", "worker"), "create_mode": "create"}
    setting(key, values)


@pytest.mark.parametrize(("file", "write"), [("cml.yaml", "defaults"), ("cml-schema.yaml", "schema")])
def test_the_shipped_files_are_those_of_the_table(file, write):
    """After a change of the table, `python docs/write_options.py` writes the files."""
    assert (PACKAGE / file).read_text() == runpy.run_path(str(ROOT / "docs" / "write_options.py"))[write]()


def test_the_defaults_that_users_read_are_the_defaults():
    assert yaml.safe_load((PACKAGE / "cml.yaml").read_text())["cml"] == DEFAULTS["cml"]


#: What CMLCluster says about the type of an argument by its check: the annotation, and the docstring.
TYPES = {
    checks.boolean: ("bool", "bool"),
    checks.choice: ("str", None),
    checks.cluster_name: ("str", "str"),
    checks.environment: ("Mapping[str, str]", "mapping of str to str"),
    checks.folder: ("str", "path"),
    checks.gibibytes: ("float | str", "float or str"),
    checks.gibibytes_or_none: ("float | str", "float or str"),
    checks.integer: ("int", "int"),
    checks.launch_parameters: ("Mapping[str, Any]", "mapping"),
    checks.memory_reserve: ("float | str", "float or str"),
    checks.positive: ("float", "float"),
    checks.processes: ("int", "int"),
    checks.resources: ("Mapping[str, float]", "mapping of str to float"),
    checks.scheduler_args: ("Sequence[str]", "sequence of str"),
    checks.seconds: ("float | str", "float or str"),
    checks.seconds_or_none: ("float | str", "float or str"),
    checks.security: ("bool | Security", "bool or distributed.Security"),
    checks.text: ("str", "str"),
    checks.threads: ("int", "int"),
    checks.worker_args: ("Sequence[str]", "sequence of str"),
    checks.worker_command: ("Sequence[str]", "sequence of str"),
    checks.worker_groups: ("Mapping[str, Mapping[str, Any]]", "mapping of str to mapping"),
}


def parameters(docstring):
    """The parameters of a docstring: their types and descriptions by name, in order."""
    section = inspect.cleandoc(docstring).split("Parameters\n----------\n")[1].split("\n\n")[0]
    found = re.findall(r"^(\w+) : (.*)\n((?:    .*\n?)+)", section, re.MULTILINE)
    return {name: (kind, " ".join(text.split())) for name, kind, text in found}


def types_of(argument):
    annotation, documented = TYPES[argument.check]
    if argument.choices:
        documented = "{" + ", ".join(f'"{choice}"' for choice in argument.choices) + "}"
    return annotation, documented


@pytest.mark.parametrize(
    ("function", "docstring", "names", "own"),
    [
        (
            CMLCluster.__init__,
            CMLCluster.__doc__,
            [*ARGUMENTS],
            ["asynchronous", "loop", "silence_logs", "quiet"],
        ),
        (CMLCluster.add_worker_group, CMLCluster.add_worker_group.__doc__, GROUP_OPTIONS, ["name"]),
    ],
    ids=["CMLCluster", "add_worker_group"],
)
def test_a_signature_and_its_docstring_are_those_of_the_table(function, docstring, names, own):
    signature = {**inspect.signature(function).parameters}
    documented = parameters(docstring)
    assert [*documented] == [name for name in signature if name not in ("self", "kwargs")]
    assert [name for name in documented if name not in own] == [*names]
    for name in names:
        annotation, kind = types_of(ARGUMENTS[name])
        if signature[name].default is None:
            annotation, kind = f"{annotation} | None", f"{kind}, optional"
        assert (signature[name].annotation, documented[name][0]) == (annotation, kind), name


@pytest.mark.parametrize("argument", ARGUMENTS.values(), ids=[*ARGUMENTS])
def test_the_docstring_says_the_default_of_the_table(argument):
    _, text = parameters(CMLCluster.__doc__)[argument.name]
    if argument.default in (None, [], {}) and not isinstance(argument.default, (bool, int)):
        assert "Default: " in text
    else:
        compact = re.sub('[ "`]', "", text)
        assert f"Default{argument.default}".replace(" ", "") in compact


def test_the_attributes_of_options_are_those_of_the_table():
    assert [field.name for field in fields(Options)] == [*ARGUMENTS]


def test_the_options_of_a_worker_group_are_those_that_its_option_names():
    named = re.findall(r"`([\w-]+)`", OPTIONS["worker-groups"].description)
    assert sorted(named) == sorted(ARGUMENTS[name].key for name in GROUP_OPTIONS)


def test_the_keys_below_a_section_have_a_section_with_a_description():
    assert [*SECTIONS] == [*dict.fromkeys(key.split(".")[0] for key in OPTIONS if "." in key)]


@pytest.mark.parametrize("option", [option for option in OPTIONS.values() if option.refused])
def test_a_refused_argument_has_an_argument_in_its_place(option):
    for reason in option.refused:
        if name := re.fullmatch(r"use the argument (\w+)", reason):
            assert name[1] in ARGUMENTS


@pytest.mark.parametrize(("key", "program"), [("worker-args", worker), ("scheduler-args", scheduler)])
def test_refused_arguments_are_those_of_the_program(key, program):
    known = {"--help", "-h"} | {
        name for parameter in program.params for name in (*parameter.opts, *parameter.secondary_opts)
    }
    assert isinstance(program, click.Command)
    assert {word for words in OPTIONS[key].refused.values() for word in words} <= known
