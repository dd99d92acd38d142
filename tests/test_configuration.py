"""Dask's configuration: unknown keys are refused, errors name a value's origin, and sessions inherit it."""

import importlib
import os
import subprocess
import sys

import dask.config
import pytest
from clusters import make
from distributed import Client

from dask_cml import CMLCluster
from dask_cml.layout import PROGRAM_FOLDER, find_modules
from dask_cml.options import Options, state_directory
from dask_cml.options.configuration import inherited


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of configuration files; read them with `dask.config.refresh`."""
    monkeypatch.setattr(dask.config, "paths", [str(tmp_path)])
    return tmp_path


@pytest.fixture
def configured(folder):
    """Write a file and read it, as a program that starts does."""
    before = dask.config.config.copy()

    def configured(text, **variables):
        (folder / "mine.yaml").write_text(text)
        dask.config.refresh(paths=[str(folder)], env=variables)

    yield configured
    dask.config.config.clear()
    dask.config.config.update(before)


def test_what_is_no_option_is_refused_with_its_origin_and_the_nearest_one():
    for config, words in [
        ({"cml": {"cpus": 2}}, "invalid key cml.cpus from Dask's configuration: expected cml.cpu"),
        ({"cml": {"cpu": -1}}, "invalid cml.cpu=-1: expected a number above 0, in Dask's configuration"),
        ({"cml": 3}, "invalid cml of type int: expected a mapping, in Dask's configuration"),
        ({"cml.api": 3}, "invalid cml.api of type int: expected a mapping, in Dask's configuration"),
        ({"cml.n_worker": 3}, "invalid key cml.n-worker from Dask's configuration: expected cml.n-workers"),
        ({"cml.poll-interval": 3}, "from Dask's configuration: expected cml.api.poll-interval"),
        ({"cml.inherit": "mine"}, "invalid cml.inherit='mine': expected a list of names"),
        ({"cml.inherit": [""]}, "invalid cml.inherit=['']: expected a list of names"),
        ({"cml.inherit": ["a", "b.c"]}, "cml.inherit[1]='b.c': expected the name of a top-level section"),
        ({"cml.xyz": 3}, "invalid key cml.xyz from Dask's configuration: expected one of cml.n-workers, cml"),
    ]:
        with dask.config.set(config), pytest.raises((TypeError, ValueError)) as caught:
            Options.read()
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("DASK_CML__ENV__MY_VAR", """my_var: expected DASK_CML__ENV='{"MY_VAR": …}'"""),
        (
            "DASK_CML__WORKER_GROUPS__BIG__RESOURCES__GPU",
            """gpu: expected DASK_CML__WORKER_GROUPS__BIG__RESOURCES='{"GPU": …}'""",
        ),
    ],
)
def test_a_variable_whose_name_dask_reads_in_lower_case_is_refused(configured, monkeypatch, name, words):
    monkeypatch.setenv(name, "secret")
    configured("", **{name: "secret"})
    with pytest.raises(ValueError, match=f"^invalid environment variable {name}, of which Dask ma") as caught:
        Options.read()
    assert str(caught.value).endswith(words)


def test_an_error_says_which_file_a_value_is_from(configured, folder):
    for text, words in [
        ("cpus: 3", "invalid key cml.cpus from {}: expected cml.cpu"),
        ("cpu: many", "invalid cml.cpu='many': expected a number above 0, in {}"),
        ("limits: {sessions: 3}", "n_workers=4: expected at most 2, because cml.limits.sessions is 3, in {}"),
    ]:
        configured(f"cml:\n  {text}\n")
        with pytest.raises((TypeError, ValueError)) as caught:
            CMLCluster(n_workers=4, platform="local")
        assert words.format(f"the file {folder / 'mine.yaml'}") in str(caught.value)


def test_an_error_says_which_variable_a_value_is_from(configured, monkeypatch):
    for name, value, words in [
        ("N_WORKER", "2", "invalid key cml.n-worker from {}: expected cml.n-workers"),
        ("API__RETRIES", "-1", "invalid cml.api.retries=-1: expected a whole number of at least 0, in {}"),
        ("LIMITS__SESSIONS", "2", "n_workers=4: expected at most 1, because cml.limits.sessions is 2, in {}"),
    ]:
        variable = f"DASK_CML__{name}"
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            configured("cml: {api: {retries: 3}, limits: {sessions: 30}}", **{variable: value})
            with pytest.raises(ValueError, match="invalid ") as caught:
                CMLCluster(n_workers=4, platform="local")
        assert words.format(f"the environment variable {variable}") in str(caught.value)


def test_sessions_do_not_inherit_other_sections_and_values_of_this_process():
    for key in [
        "cml.name",
        "scheduler-address",
        "gateway.address",
        "distributed.client.security-loader",
        "distributed.comm.tls.client.key",
        "distributed.comm.require-encryption",
        "distributed.dashboard.link",
        "mine.connection-string",  # what holds a secret has any name
        "mine",
    ]:
        with dask.config.set({key: "https://host/?sig=s3cr3t"}):
            assert inherited(state_directory()) == {}, key


def test_sessions_inherit_the_sections_that_the_user_names():
    ours = {"mine.stores": [{"name": "a"}], "my_own": 1, "others.sas": "s3cr3t"}
    with dask.config.set({**ours, "cml.inherit": ["mine", "my-own"]}):
        configuration = dask.config.deserialize(inherited(state_directory())["DASK_INTERNAL_INHERIT_CONFIG"])
    assert configuration == {"mine": {"stores": [{"name": "a"}]}, "my_own": 1}


def test_a_variable_with_a_whole_section_contains_no_values_of_this_process(monkeypatch):
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM", "{}")
    with dask.config.set({"distributed.comm": {"tls": {"client": {"key": "k"}}, "retry": {"count": 3}}}):
        variables = inherited(state_directory())
    assert variables["DASK_DISTRIBUTED__COMM"] == "{'retry': {'count': 3}}"


def test_what_no_variable_can_hold_is_not_inherited_and_a_warning_says_so(caplog):
    with dask.config.set({"array.backend": object()}):
        assert inherited(state_directory()) == {}
    with dask.config.set({"array.own": "x" * 40_000}):
        assert inherited(state_directory()) == {}
    assert "not passed to the sessions" in caplog.text


def test_a_value_of_this_process_overrides_a_variable_of_the_project(monkeypatch):
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING", "False")
    monkeypatch.setenv("DASK_MINE__OWN", "s3cr3t")  # which dask.config has not read
    assert inherited(state_directory()) == {"DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING": "True"}


MODULE = """
from distributed import Worker

class Mine(Worker):
    pass

def add_one(x):
    return x + 1
"""
TELL = "from dask_cml import layout; print(layout.program_folder())"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The project of the program, with a module."""
    project = tmp_path / "my project"
    project.mkdir()
    (project / "beside.py").write_text(MODULE)
    monkeypatch.syspath_prepend(project)
    monkeypatch.setattr("dask_cml.options.program_folder", lambda: str(project))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    return project


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["{folder}/script.py"], "{folder}"),
        (["{folder}/program"], "None"),  # as pip installs programs
        (["-m", "script"], "{here}"),
        (["-c", TELL], "{here}"),
        (["-c", f"import os; os.rmdir(os.getcwd()); {TELL}"], "None"),
    ],
)
def test_the_folder_of_a_program_is_where_it_finds_its_modules(tmp_path, words, expected):
    here = tmp_path / "here"
    here.mkdir()
    for name in "script.py", "program":
        (tmp_path / name).write_text(TELL)
    done = subprocess.run(
        [sys.executable, *(word.format(folder=tmp_path) for word in words)],
        cwd=here,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), str(tmp_path)])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected.format(folder=tmp_path, here=here)


@pytest.mark.slow
@pytest.mark.usefixtures("light")
async def test_sessions_find_the_modules_of_the_program(platform, project):
    beside = importlib.import_module("beside")
    groups = {"own": {"n_workers": 1, "worker_class": "beside.Mine"}}
    async with (
        make(n_workers=1, worker_groups=groups) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(2)
        assert {*(await client.run(beside.add_one, 1)).values()} == {2}
        kinds = await client.run(lambda dask_worker: type(dask_worker).__name__)
        assert {*kinds.values()} == {"Worker", "Mine"}


def test_a_module_of_the_program_comes_before_others_unless_the_user_keeps_it_off(project, monkeypatch):
    monkeypatch.setattr(sys, "path", ["elsewhere", *sys.path])
    kept_off = Options.read(env={PROGRAM_FOLDER: ""}).inheriting().env[PROGRAM_FOLDER]
    monkeypatch.setenv(PROGRAM_FOLDER, kept_off)
    find_modules()
    assert sys.path[0] == "elsewhere"
    monkeypatch.setenv(PROGRAM_FOLDER, Options.read().inheriting().env[PROGRAM_FOLDER])
    find_modules()
    find_modules()
    assert sys.path[:2] == [str(project), "elsewhere"]
