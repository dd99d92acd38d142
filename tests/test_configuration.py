"""Dask's configuration: unknown keys are refused, errors name a value's origin, and sessions inherit it."""

from __future__ import annotations

import dask.config
import pytest
from clusters import make, rebuild

from dask_cml import CMLCluster
from dask_cml.options import Options, state_directory
from dask_cml.options.configuration import inherited, setting


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


# -- nested configuration


def test_a_nested_configuration_leaves_the_other_options_at_their_defaults(platform):
    folder = str(state_directory())
    nested = {"cpu": 2, "api": {"retries": 1}, "platform": "local", "state-directory": folder}
    with dask.config.set({"cml": nested}):
        options = Options.read()
        assert (options.cpu, options.n_workers, options.memory) == (2, 0, 2)
        assert setting("api.retries") == 1
        assert setting("api.timeout") == 30
        with CMLCluster(n_workers=1, quiet=True) as cluster:
            assert len(cluster.worker_spec) == 1


@pytest.mark.parametrize(
    ("configured", "words"),
    [
        ({"cpus": 2}, "invalid key cml.cpus from Dask's configuration: expected cml.cpu"),
        ({"cpu": -1}, "invalid cml.cpu=-1: expected .*, in Dask's configuration"),
        ({"api": 3}, "invalid cml.api of type int: expected a mapping, in Dask's configuration"),
        (3, "invalid cml of type int: expected a mapping, in Dask's configuration"),
    ],
)
def test_a_nested_configuration_is_checked(configured, words):
    with dask.config.set({"cml": configured}), pytest.raises((TypeError, ValueError), match=words):
        Options.read()


# -- unknown keys


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("cml.cpus", "cml.cpu"),
        ("cml.n_worker", "cml.n-workers"),
        ("cml.poll-interval", "cml.api.poll-interval"),
        ("cml.api.timeouts", "cml.api.timeout"),
        ("cml.xyz", "one of cml.n-workers, cml.cpu, "),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key, nearest):
    with dask.config.set({key: 3}), pytest.raises(ValueError, match="invalid key") as caught:
        Options.read()
    message = f"invalid key {key.replace('_', '-')} from Dask's configuration: expected {nearest}"
    assert str(caught.value).startswith(message)


def test_an_unknown_key_in_a_file_raises_an_error_with_the_file(configured, folder):
    configured("cml:\n  cpus: 3\n")
    with pytest.raises(ValueError, match="invalid key") as caught:
        CMLCluster(platform="local")
    assert f"from the file {folder / 'mine.yaml'}: expected cml.cpu" in str(caught.value)


def test_an_unknown_variable_raises_an_error_with_its_name(configured, monkeypatch):
    monkeypatch.setenv("DASK_CML__N_WORKER", "2")
    configured("", DASK_CML__N_WORKER="2")
    with pytest.raises(
        ValueError, match=r"from the environment variable DASK_CML__N_WORKER: expected cml.n-w"
    ):
        Options.read()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("DASK_CML__ENV__MY_VAR", """my_var: expected DASK_CML__ENV='{"MY_VAR": …}'"""),
        ("DASK_CML__RESOURCES__GPU", """gpu: expected DASK_CML__RESOURCES='{"GPU": …}'"""),
        (
            "DASK_CML__WORKER_GROUPS__BIG__ENV__MY_VAR",
            """my_var: expected DASK_CML__WORKER_GROUPS__BIG__ENV='{"MY_VAR": …}'""",
        ),
    ],
)
def test_a_variable_whose_name_dask_reads_in_lower_case_is_refused(configured, monkeypatch, name, words):
    monkeypatch.setenv(name, "secret")
    configured("", **{name: "secret"})
    with pytest.raises(
        ValueError, match=f"^invalid environment variable {name}, of which Dask makes "
    ) as caught:
        Options.read()
    assert str(caught.value).endswith(words)
    right, value = words.partition("expected ")[2].replace("…", "1").split("=", 1)
    monkeypatch.delenv(name)
    configured("", **{right: value.strip("'").replace(": 1", ': "1"' if "ENV" in right else ": 1")})
    options = Options.read()
    options = options.groups().get("big", options)
    assert options.env == {"MY_VAR": "1"} or options.resources == {"GPU": 1}


def test_a_variable_whose_name_has_lower_case_letters_sets_an_entry(configured, monkeypatch):
    monkeypatch.setenv("DASK_CML__ENV__http_proxy", "proxy")
    configured("", DASK_CML__ENV__http_proxy="proxy")
    assert Options.read().env == {"http_proxy": "proxy"}


@pytest.mark.parametrize("key", ["cml", "cml.api"])
def test_a_section_must_be_a_mapping(key):
    with (
        dask.config.set({key: 3}),
        pytest.raises(TypeError, match=f"invalid {key} of type int: expected a map"),
    ):
        Options.read()


def test_values_below_an_option_are_not_keys():
    with dask.config.set({"cml.env": {"cpus": "1"}, "cml.launch-options": {"a": {"b": 1}}}):
        assert Options.read().env == {"cpus": "1"}


# -- where values are from


def test_an_error_says_which_file_a_value_is_from(configured, folder):
    configured("cml:\n  n_workers: many\n")
    with pytest.raises(TypeError, match=r"invalid cml.n-workers='many': expected a whole number") as caught:
        Options.read()
    assert str(caught.value).endswith(f", in the file {folder / 'mine.yaml'}")


def test_an_error_says_which_variable_a_value_is_from(configured, monkeypatch):
    monkeypatch.setenv("DASK_CML__API__RETRIES", "-1")
    configured("cml:\n  api:\n    retries: 3\n", DASK_CML__API__RETRIES="-1")
    with pytest.raises(ValueError, match=r"invalid cml.api.retries=-1: .*variable DASK_CML__API__RETRIES$"):
        CMLCluster(platform="local")


def test_an_error_about_an_empty_value_names_no_place_that_does_not_have_it(configured):
    configured("distributed: {}\n")
    with (
        dask.config.set({"cml.api.retries": None}),
        pytest.raises(TypeError, match=r"^invalid cml.api.retries=None: .*, in Dask's configuration$"),
    ):
        CMLCluster(platform="local")


def test_a_refusal_names_the_limit_and_its_file(configured, folder):
    configured("cml:\n  limits:\n    memory: 16 GiB\n")
    with pytest.raises(ValueError, match="invalid n_workers=4: expected at most 3") as caught:
        CMLCluster(n_workers=4, memory=4, platform="local")
    assert str(caught.value).endswith(
        f", because cml.limits.memory is 16, in the file {folder / 'mine.yaml'}"
    )


def test_a_refusal_names_the_limit_and_its_variable(configured, monkeypatch):
    monkeypatch.setenv("DASK_CML__LIMITS__SESSIONS", "3")
    configured("cml:\n  limits:\n    sessions: 30\n", DASK_CML__LIMITS__SESSIONS="3")
    with pytest.raises(
        ValueError, match=r"sessions is 3, in the environment variable DASK_CML__LIMITS__SESSIONS$"
    ):
        CMLCluster(n_workers=3, platform="local")


def test_an_error_about_an_argument_names_no_origin(monkeypatch):
    with pytest.raises(ValueError, match=r"^invalid n_workers=-1: expected a whole number from 0 to 100000$"):
        Options.read(n_workers=-1)


# -- what sessions inherit


def inherited_configuration():
    variables = inherited(state_directory())
    return dask.config.deserialize(variables.get("DASK_INTERNAL_INHERIT_CONFIG", "e30="))


def test_sessions_inherit_only_values_that_differ_from_the_defaults():
    before = inherited_configuration()
    with dask.config.set(
        {
            "distributed.scheduler.allowed_failures": 10,
            "distributed.worker.memory.target": 0.6,  # the default
            "distributed.worker.resources": {"GPU": 1},
            "array.chunk_size": "64 MiB",
        }
    ):
        after = inherited_configuration()
    assert before == {}
    assert after == {
        "distributed": {"scheduler": {"allowed-failures": 10}, "worker": {"resources": {"GPU": 1}}},
        "array": {"chunk-size": "64 MiB"},
    }


@pytest.mark.parametrize("section", [*dask.config.defaults[0], "distributed", "logging"])
def test_sessions_inherit_each_section_of_dask(section):
    with dask.config.set({f"{section}.own": 1} if section != "temporary-directory" else {section: "/tmp"}):
        assert [*inherited_configuration()] == [section]


@pytest.mark.parametrize(
    "key",
    [
        "cml.name",
        "scheduler",
        "scheduler-address",
        "labextension.factory.module",
        "gateway.address",
        "distributed.client.security-loader",
        "distributed.comm.tls.client.key",
        "distributed.comm.require-encryption",
        "distributed.dashboard.link",
        # What holds a secret has any name.
        "mine.pwd",
        "mine.passphrase",
        "mine.connection-string",
        "mine.account_key",
        "mine.sas",
        "mine.url",
        "mine",
    ],
)
def test_sessions_do_not_inherit_other_sections_and_values_of_this_process(key):
    with dask.config.set({key: "https://host/?sig=s3cr3t"}):
        assert inherited(state_directory()) == {}


def test_sessions_inherit_the_sections_that_the_user_names():
    ours = {"mine.stores": [{"name": "a"}], "my_own": 1, "others.sas": "s3cr3t"}
    with dask.config.set({**ours, "cml.inherit": ["mine", "my-own"]}):
        assert inherited_configuration() == {"mine": {"stores": [{"name": "a"}]}, "my_own": 1}


def test_sessions_do_not_get_back_what_a_file_sets(configured):
    configured("distributed:\n  scheduler:\n    allowed-failures: 9\n")
    default = dask.config.merge(*reversed(dask.config.defaults))["distributed"]["scheduler"][
        "allowed-failures"
    ]
    with dask.config.set({"distributed.scheduler.allowed-failures": default}):
        assert inherited_configuration()["distributed"] == {"scheduler": {"allowed-failures": default}}


@pytest.mark.parametrize(
    ("inherit", "error", "words"),
    [
        ("mine", TypeError, "invalid cml.inherit='mine': expected a list of names"),
        ([1], TypeError, r"invalid cml.inherit=\[1\]: expected a list of names"),
        ([""], TypeError, r"invalid cml.inherit=\[''\]: expected a list of names"),
        (["a", "mine.own"], ValueError, r"cml.inherit\[1\]='mine.own': .* such as 'mine', in Dask's conf"),
    ],
)
def test_sections_that_are_none_are_refused(inherit, error, words):
    with dask.config.set({"cml.inherit": inherit}), pytest.raises(error, match=words):
        Options.read()


@pytest.mark.parametrize(
    "around", [lambda value: [value], lambda value: {"a": value}], ids=["lists", "mappings"]
)
def test_a_value_too_deep_for_json_is_not_inherited_and_affects_no_other(around):
    deep = 1
    for _ in range(100_000):
        deep = around(deep)
    with dask.config.set({"array.deep": deep, "array.own": 1}):
        assert inherited_configuration() == {"array": {"own": 1}}


def test_a_value_that_json_cannot_represent_is_not_inherited():
    with dask.config.set({"array.backend": object()}):
        assert inherited(state_directory()) == {}


def test_a_variable_with_a_whole_section_contains_no_values_of_this_process(monkeypatch):
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM", "{}")
    with dask.config.set({"distributed.comm": {"tls": {"client": {"key": "k"}}, "retry": {"count": 3}}}):
        variables = inherited(state_directory())
    assert variables["DASK_DISTRIBUTED__COMM"] == "{'retry': {'count': 3}}"


def test_a_configuration_too_large_for_a_variable_is_not_inherited_and_a_warning_says_so(caplog):
    with dask.config.set({"array.own": "x" * 40_000}):
        assert inherited(state_directory()) == {}
    assert "not passed to the sessions" in caplog.text


def test_a_value_of_this_process_overrides_a_variable_of_the_project(monkeypatch):
    monkeypatch.setenv("DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING", "False")
    monkeypatch.setenv("DASK_MINE__OWN", "s3cr3t")  # which dask.config has not read
    assert inherited(state_directory()) == {"DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING": "True"}


def test_a_state_directory_that_is_set_here_is_that_of_the_sessions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with dask.config.set({"cml.state-directory": "here"}):
        assert inherited(state_directory()) == {"DASK_CML__STATE_DIRECTORY": str(tmp_path / "here")}


async def test_a_remote_uses_the_platform_of_its_cluster(platform, light):
    async with make() as cluster, rebuild(cluster.name) as remote:
        assert remote.options.platform == "local"


def test_a_variable_with_one_underscore_too_few_is_named(monkeypatch):
    monkeypatch.setenv("DASK_CML_N_WORKERS", "2")
    monkeypatch.setenv("DASK_CML_API_TIMEOUT", "2")  # not the name of an option
    words = "DASK_CML_N_WORKERS has no effect: expected DASK_CML__N_WORKERS"
    with pytest.warns(UserWarning, match=words) as caught:
        Options.read()
    assert len(caught) == 1
