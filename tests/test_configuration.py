"""Dask's configuration: unknown keys are refused, errors name a value's origin, and sessions inherit it."""

from __future__ import annotations

import dask.config
import pytest

from dask_cml import CMLCluster
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


# -- what is an option


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


# -- where values are from


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


# -- what sessions inherit


def inherited_configuration():
    variables = inherited(state_directory())
    return dask.config.deserialize(variables.get("DASK_INTERNAL_INHERIT_CONFIG", "e30="))


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
        assert inherited_configuration() == {"mine": {"stores": [{"name": "a"}]}, "my_own": 1}


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
