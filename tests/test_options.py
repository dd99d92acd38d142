"""Options: where each comes from, and what is refused before anything is launched."""

from __future__ import annotations

import copy
import enum
import inspect
import json
import os
import subprocess
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import dask.config
import pytest
import yaml
from distributed import Security
from simulated.platform import SimulatedPlatform

import dask_cml
from dask_cml import CMLCluster
from dask_cml.core import at_exit
from dask_cml.options import Options, state_directory

PACKAGE = Path(dask_cml.__file__).parent
DEFAULTS = yaml.safe_load((PACKAGE / "cml.yaml").read_text())["cml"]
NOT_OPTIONS = {"self", "asynchronous", "loop", "silence_logs", "quiet", "kwargs"}  # they are Dask's
ARGUMENTS = [
    name
    for name in inspect.signature(CMLCluster.__init__).parameters
    if name not in NOT_OPTIONS and not name.startswith("_")
]

#: Of each option: a value, the environment variable's text for it, where it is in Options, and what is there.
EXAMPLES = {
    "n_workers": (3, "3", "n_workers", 3),
    "cpu": (2.5, "2.5", "worker.cpu", 2.5),
    "memory": ("16 GiB", "16 GiB", "worker.memory", 16),
    "nvidia_gpu": (1, "1", "worker.nvidia_gpu", 1),
    "memory_reserve": ("512 MiB", "512 MiB", "memory_reserve", 0.5),
    "scratch": ("50 GiB", "50 GiB", "scratch", 50),
    "nthreads": (8, "8", "nthreads", 8),
    "processes": (2, "2", "processes", 2),
    "scheduler_cpu": (0.5, "0.5", "scheduler.cpu", 0.5),
    "scheduler_memory": (4, "4", "scheduler.memory", 4),
    "env": ({"A": "1"}, '{"A": "1"}', "env", {"A": "1"}),
    "scheduler_nvidia_gpu": (1, "1", "scheduler.nvidia_gpu", 1),
    "worker_args": (["--lifetime", "1h"], '["--lifetime", "1h"]', "worker_args", ("--lifetime", "1h")),
    "scheduler_args": (["--no-show"], '["--no-show"]', "scheduler_args", ("--no-show",)),
    "worker_class": ("my.Worker", "my.Worker", "worker_class", "my.Worker"),
    "resources": ({"FPGA": 1}, '{"FPGA": 1}', "resources", {"FPGA": 1}),
    "worker_groups": (
        {"gpu": {"nvidia_gpu": 1}},
        '{"gpu": {"nvidia_gpu": 1}}',
        "worker_groups",
        {"gpu": {"nvidia_gpu": 1}},
    ),
    "worker_command": (["my-worker"], '["my-worker"]', "worker_command", ("my-worker",)),
    "launch_options": ({"kernel": "r"}, '{"kernel": "r"}', "launch_options", {"kernel": "r"}),
    "scheduler_launch_options": (
        {"kernel": "r"},
        '{"kernel": "r"}',
        "scheduler_launch_options",
        {"kernel": "r"},
    ),
    "name": ("mine", "mine", "name", "mine"),
    "create_mode": ("create-or-connect", "create-or-connect", "create_mode", "create-or-connect"),
    "security": (False, "False", "security", False),
    "pending_timeout": ("3 minutes", "3 minutes", "pending_timeout", 180),
    "scheduler_timeout": ("2 minutes", "2 minutes", "scheduler_timeout", 120),
    "worker_timeout": (30, "30", "worker_timeout", 30),
    "idle_timeout": ("1 hour", "1 hour", "idle_timeout", 3600),
    "orphan_timeout": ("2 hours", "2 hours", "orphan_timeout", 7200),
    "log_directory": ("/logs", "/logs", "log_directory", "/logs"),
    "shutdown_on_close": (False, "False", "shutdown_on_close", False),
    "forward_dashboard": (True, "True", "forward_dashboard", True),
    "platform": ("local", "local", "platform", "local"),
}
#: What else must be set for that.
NEEDED = {"create_mode": {"cml.name": "mine"}}


def of(options, where):
    for name in where.split("."):
        options = getattr(options, name)
    return options


def key(argument):
    return f"cml.{argument.replace('_', '-')}"


@pytest.fixture(autouse=True)
def defaults():
    """The defaults, whatever the machine is configured to."""
    with dask.config.set({"cml": copy.deepcopy(DEFAULTS)}):
        yield


# -- where options come from


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_every_argument_has_a_config_key_and_an_example_here(argument):
    assert argument.replace("_", "-") in DEFAULTS
    assert argument in EXAMPLES


def test_without_arguments_and_configuration_the_defaults_stand():
    options = Options.read()
    assert (options.n_workers, options.nthreads, options.processes) == (0, 1, 1)
    assert (options.worker.cpu, options.worker.memory, options.worker.nvidia_gpu) == (1, 2, 0)
    assert (options.scheduler.cpu, options.scheduler.memory, options.scheduler.nvidia_gpu) == (1, 2, 0)
    assert (options.scheduler_timeout, options.worker_timeout, options.idle_timeout) == (90, 600, None)
    assert options.pending_timeout == 900
    assert (options.orphan_timeout, options.forward_dashboard) == (300, False)
    assert (options.env, options.launch_options, options.worker_args, options.scheduler_args) == (
        {},
        {},
        (),
        (),
    )
    assert (options.worker_class, options.log_directory) == (None, None)
    assert (options.security, options.shutdown_on_close, options.platform) == (True, True, "auto")


@pytest.mark.parametrize("argument", EXAMPLES)
def test_an_option_is_read_from_the_configuration(argument):
    value, _, where, expected = EXAMPLES[argument]
    assert of(Options.read(), where) != expected
    with dask.config.set({key(argument): value, **NEEDED.get(argument, {})}):
        assert of(Options.read(), where) == expected


@pytest.mark.parametrize("argument", EXAMPLES)
def test_an_argument_takes_precedence_over_the_configuration(argument):
    value, _, where, expected = EXAMPLES[argument]
    with dask.config.set({key(argument): "of the configuration", **NEEDED.get(argument, {})}):
        assert of(Options.read(**{argument: value}), where) == expected


def test_environment_variables_set_options():
    variables = {f"DASK_CML__{name.upper()}": text for name, (_, text, _, _) in EXAMPLES.items()}
    program = "import dataclasses, json; from dask_cml.options import Options; "
    program += "print(json.dumps(dataclasses.asdict(Options.read())))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = Options.read(**{name: value for name, (value, _, _, _) in EXAMPLES.items()})
    assert json.loads(done.stdout) == json.loads(json.dumps(asdict(expected)))


def test_the_state_directory_is_absolute_and_knows_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert state_directory() == Path("/home/someone/.dask-cml")
    with dask.config.set({"cml.state-directory": "here"}):
        assert state_directory() == Path.cwd() / "here"
    with dask.config.set({"cml.state-directory": "$HOME/clusters"}):
        assert state_directory() == Path("/home/someone/clusters")


# -- the schema


@pytest.mark.parametrize("argument", EXAMPLES)
def test_the_schema_allows_the_same_values_as_the_code(argument):
    import jsonschema

    schema = yaml.safe_load((PACKAGE / "cml-schema.yaml").read_text())
    value = EXAMPLES[argument][0]
    jsonschema.Draft202012Validator(schema).validate({"cml": {argument.replace("_", "-"): value}})


# -- what values mean


@pytest.mark.parametrize(
    ("memory", "gib"),
    [
        (16, 16),
        (0.5, 0.5),
        ("16", 16),
        (" 16 ", 16),
        ("16 GiB", 16),
        ("1.5GiB", 1.5),
        ("512 MiB", 0.5),
        ("2 TiB", 2048),
        ("16 GB", 16e9 / 2**30),
        ("16.5", 16.5),
        ("1e3", 1000),
        ("1e3 MiB", 1000 / 1024),
        ("200 TiB", 200 * 1024),
    ],
)
def test_memory_is_in_gib_unless_it_says_another_unit(memory, gib):
    options = Options.read(memory=memory, scheduler_memory=memory)
    assert options.worker.memory == pytest.approx(gib)
    assert options.scheduler.memory == pytest.approx(gib)


@pytest.mark.parametrize(
    ("scratch", "gib"),
    [(10, 10), (0.5, 0.5), ("10", 10), ("10 GB", 10e9 / 2**30), ("none", 0), (0, 0)],
)
def test_the_scratch_space_is_in_gib_unless_it_says_another_unit(scratch, gib):
    options = Options.read(scratch=scratch)
    assert options.scratch == gib
    assert Options.read(**options.arguments()).scratch == gib


@pytest.mark.parametrize(
    ("options", "nthreads"),
    [
        ({"cpu": 4}, 4),
        ({"cpu": 0.5}, 1),
        ({"cpu": 3.9}, 3),
        ({"cpu": 4, "processes": 2}, 4),
        ({"cpu": 7, "processes": 2}, 6),
        ({"cpu": 2, "processes": 4}, 4),
        ({"cpu": 4, "nthreads": 8}, 8),
    ],
)
def test_threads_are_as_many_as_whole_cpus_and_shared_evenly(options, nthreads):
    assert Options.read(**options).nthreads == nthreads


@pytest.mark.parametrize("seconds", [3, "3", "3s", "3000 ms", timedelta(seconds=3)])
def test_times_are_seconds_unless_they_say_another_unit(seconds):
    assert Options.read(worker_timeout=seconds).worker_timeout == 3


def test_a_given_security_is_used_unchanged():
    security = Security(require_encryption=True)
    assert Options.read(security=security).security is security


def test_options_do_not_change_with_the_given_objects():
    env, arguments = {"A": "1"}, ["--no-show"]
    options = Options.read(env=env, scheduler_args=arguments)
    env["B"] = "2"
    arguments.append("--show")
    assert options.env == {"A": "1"}
    assert options.scheduler_args == ("--no-show",)


# -- what is refused

NUMBER = "a number above 0"
COUNT = "a whole number of at least 0"
WORKERS = "a whole number from 0 to 100000"
POSITIVE_COUNT = "a whole number of at least 1"
GIB = "GiB as a number above 0"
SECONDS = "seconds as a number above 0"
NAME = "1 to 100 printable characters"
AMOUNTS = "a mapping of names to numbers above 0"
STRINGS = "a list of strings"
CONTAINERS = {
    "env",
    "resources",
    "worker_args",
    "worker_command",
    "scheduler_args",
    "launch_options",
    "scheduler_launch_options",
}
NAN, INFINITE = float("nan"), float("inf")

REFUSED = [
    ("n_workers", -1, ValueError, WORKERS),
    ("n_workers", 1.5, ValueError, WORKERS),
    ("n_workers", NAN, ValueError, WORKERS),
    ("n_workers", 100_001, ValueError, WORKERS),
    ("n_workers", True, TypeError, WORKERS),
    ("n_workers", "2", TypeError, WORKERS),
    ("cpu", 0, ValueError, NUMBER),
    ("cpu", -1, ValueError, NUMBER),
    ("cpu", INFINITE, ValueError, NUMBER),
    ("cpu", "many", TypeError, NUMBER),
    ("cpu", True, TypeError, NUMBER),
    ("memory", 0, ValueError, GIB),
    ("memory", NAN, ValueError, GIB),
    ("memory", "lots", ValueError, GIB),
    ("memory", "nan", ValueError, GIB),
    ("memory", b"16 GiB", TypeError, GIB),
    ("nvidia_gpu", -1, ValueError, COUNT),
    ("nvidia_gpu", 0.5, ValueError, COUNT),
    ("nvidia_gpu", "A100", TypeError, COUNT),
    ("nthreads", 0, ValueError, POSITIVE_COUNT),
    ("processes", 0, ValueError, POSITIVE_COUNT),
    ("processes", False, TypeError, POSITIVE_COUNT),
    ("resources", ["GPU"], TypeError, AMOUNTS),
    ("resources", {1: 1}, TypeError, AMOUNTS),
    ("resources", {"A B": 1}, ValueError, "names without spaces"),
    ("resources", {"GPU": 0}, ValueError, f"resources['GPU']=0: expected {NUMBER}"),
    ("resources", {"GPU": "1"}, TypeError, f"resources['GPU']='1': expected {NUMBER}"),
    ("worker_command", "dask worker", TypeError, STRINGS),
    ("worker_command", ["dask", ""], ValueError, "expected a command"),
    ("worker_args", ["--resources", "GPU=1"], ValueError, "use the argument resources"),
    ("scheduler_cpu", 0, ValueError, NUMBER),
    ("scheduler_memory", -1, ValueError, GIB),
    ("env", ["A=1"], TypeError, "a mapping of names to strings"),
    ("env", {"A": 1}, TypeError, "env['A']=1: expected a string"),
    ("env", {1: "A"}, TypeError, "env: expected names that are strings, got one of type int"),
    ("env", {"": "1"}, ValueError, "env: expected names of environment variables, got ''"),
    ("env", {"A=B": "1"}, ValueError, "env: expected names of environment variables, got 'A=…'"),
    ("env", {"A": "\0"}, ValueError, "env['A']: expected a string without null characters"),
    ("worker_args", "--lifetime 1h", TypeError, STRINGS),
    ("worker_args", ["--lifetime", 3600], TypeError, "worker_args[1] of type int: expected a string"),
    ("worker_args", ["--nthreads", "3"], ValueError, "use the argument nthreads"),
    ("worker_args", ["--nthreads=3"], ValueError, "use the argument nthreads"),
    ("worker_args", ["--memory-limit", "auto"], ValueError, "use the argument memory"),
    ("worker_args", ["--nworkers", "3"], ValueError, "use the argument processes"),
    ("worker_args", ["--name", "mine"], ValueError, "use the argument name"),
    ("worker_args", ["--worker-class", "my.Worker"], ValueError, "use the argument worker_class"),
    ("worker_args", ["--scheduler-file", "/file"], ValueError, "the cluster sets it"),
    ("worker_args", ["--host", "10.0.0.7"], ValueError, "each session has its own address"),
    ("worker_args", ["--version"], ValueError, "the program would end"),
    ("worker_args", ["--nonsense"], ValueError, "expected options of `dask worker`. No such option"),
    ("worker_args", ["--lifetme", "1h"], ValueError, "--lifetime"),
    ("worker_args", ["--lifetime"], ValueError, "requires an argument"),
    ("worker_args", ["tcp://10.0.0.1:8786"], ValueError, "options of `dask worker`, and no other words"),
    ("worker_args", ["--no-nanny", "a", "b"], ValueError, "options of `dask worker`, and no other words"),
    ("scheduler_args", ["--shw"], ValueError, "`dask scheduler`. No such option"),
    (
        "worker_args",
        ["--lifetime 1h"],
        ValueError,
        "worker_args[0]: expected an option and its value as two strings",
    ),
    ("worker_args", ["-p 2"], ValueError, "worker_args[0]: expected an option and its value as two strings"),
    ("worker_args", ["--no-nanny "], ValueError, "worker_args[0]: expected an option"),
    (
        "worker_args",
        ["--resources TEST=1"],
        ValueError,
        "worker_args[0]: expected an option and its value as two strings",
    ),
    ("scheduler_args", ["lab"], ValueError, "options of `dask scheduler`, and no other words"),
    ("scheduler_args", "--no-show", TypeError, STRINGS),
    ("scheduler_args", ["--interface", "eth0"], ValueError, "the cluster sets --host"),
    ("scheduler_args", ["--help"], ValueError, "the program would end"),
    ("scheduler_args", ["--idle-timeout=1h"], ValueError, "use the argument idle_timeout"),
    ("scheduler_args", ["--dashboard-address", ":1"], ValueError, "the cluster sets it"),
    ("worker_class", "", TypeError, "a string, or None"),
    ("launch_options", [("kernel", "r")], TypeError, "of type list: expected a mapping of parameters"),
    ("launch_options", {3: "cpu"}, TypeError, "expected names of parameters of launch_workers, got 3"),
    ("launch_options", {"cpu": 3}, ValueError, "use the argument cpu"),
    ("launch_options", {"code": "pass"}, ValueError, "the cluster sets it"),
    ("launch_options", {"kernel": object}, TypeError, "launch_options['kernel'] of type"),
    ("launch_options", {"kernel": NAN}, ValueError, "launch_options['kernel'] of type"),
    ("create_mode", "attach", ValueError, "one of 'create', 'connect', 'create-or-connect'"),
    ("name", "", ValueError, NAME),
    ("name", "a/b", ValueError, NAME),
    ("name", "-x", ValueError, NAME),
    ("name", "two\nlines", ValueError, NAME),
    ("name", "x" * 101, ValueError, NAME),
    ("name", 3, TypeError, NAME),
    ("worker_args", ["--tls-key", "/file"], ValueError, "use the argument security"),
    ("scheduler_args", ["--protocol=tls"], ValueError, "use the argument security"),
    ("security", "yes", TypeError, "True, False or a distributed.Security"),
    ("pending_timeout", 0, ValueError, SECONDS),
    ("scheduler_timeout", 0, ValueError, SECONDS),
    ("scheduler_timeout", "-5s", ValueError, SECONDS),
    ("worker_timeout", "5 parsecs", ValueError, SECONDS),
    ("worker_timeout", INFINITE, ValueError, SECONDS),
    ("idle_timeout", 0, ValueError, SECONDS),
    ("orphan_timeout", "", ValueError, SECONDS),
    ("orphan_timeout", [60], TypeError, SECONDS),
    ("log_directory", 3, TypeError, "the path of a folder"),
    ("log_directory", "", ValueError, "the path of a folder"),
    ("log_directory", "${NO_SUCH}/logs", ValueError, "a folder, with variables and a home that this"),
    ("log_directory", "~no-such-user/logs", ValueError, "a folder, with variables and a home that this"),
    ("shutdown_on_close", 1, TypeError, "True or False"),
    ("forward_dashboard", "yes", TypeError, "True or False"),
    ("scheduler_nvidia_gpu", -1, ValueError, COUNT),
    ("scheduler_launch_options", {"nvidia_gpu": 1}, ValueError, "use the argument scheduler_nvidia_gpu"),
    ("memory", 4e9, ValueError, 'did you mean "3.73 GiB"?'),
    ("scheduler_memory", 16_000_000_000, ValueError, 'did you mean "14.90 GiB"?'),
    ("memory", 8192, ValueError, 'did you mean "8192 MiB" or "8192 GiB"?'),
    ("memory", "1024", ValueError, 'did you mean "1024 MiB" or "1024 GiB"?'),
    ("scheduler_memory", 4096, ValueError, 'did you mean "4096 MiB" or "4096 GiB"?'),
    ("scratch", 10_000, ValueError, 'did you mean "10000 MiB" or "10000 GiB"?'),
    ("platform", "kubernetes", ValueError, "one of 'auto', 'local'"),
]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("env", {"TOKEN": "s3cr3t", "N": 4}),
        ("env", {"TOKEN": "s3cr3t", "": "x"}),
        ("env", {"TOKEN": "s3cr3t\0"}),
        ("env", ["TOKEN=s3cr3t"]),
        ("env", {"TOKEN=s3cr3t": "x"}),
        ("launch_options", {"key": "s3cr3t", "cpu": 1}),
        ("launch_options", ["s3cr3t"]),
        ("worker_args", ["--preload-token=s3cr3t", 1]),
        ("worker_args", "--token=s3cr3t"),
    ],
)
def test_an_error_shows_no_value_that_may_be_secret(argument, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        Options.read(**{argument: value})
    assert str(caught.value).startswith(f"invalid {argument}")
    assert "s3cr3t" not in str(caught.value)


def test_an_error_about_a_variable_names_it_and_shows_a_number():
    with pytest.raises(TypeError, match=r"^invalid env\['N'\]=4: expected a string, such as \"4\"$"):
        Options.read(env={"TOKEN": "s3cr3t", "N": 4})


def test_an_amount_with_a_unit_is_restored_from_a_record():
    options = Options.read(memory="2 TiB", scratch="4 TiB", worker_groups={"big": {"memory": "3 TiB"}})
    restored = Options.of_running("mine", options.arguments())
    assert (restored.memory, restored.scratch) == (2048, 4096)
    assert restored.of_group(options.groups()["big"].group_arguments()).memory == 3072


@pytest.fixture
def stub(monkeypatch):
    """What a cluster would launch its sessions with."""
    stub = SimulatedPlatform()
    monkeypatch.setattr("dask_cml.cluster.load_platform", lambda platform: stub)
    yield stub
    assert stub.calls == []


def test_a_name_in_the_place_of_n_workers_is_refused_with_the_argument(stub):
    words = r"invalid n_workers='lab': expected a whole number; to name the cluster, pass name='lab'"
    with pytest.raises(TypeError, match=words):
        CMLCluster("lab")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no.such.Class", "No module named 'no'"),
        ("distributed.NoSuch", "has no attribute 'NoSuch'"),
        ("distributed.Scheduler", "it is no class of Dask workers"),
        ("os", "it is no class of Dask workers"),
    ],
)
@pytest.mark.parametrize("group", [False, True])
def test_a_worker_class_that_cannot_be_imported_is_refused(stub, name, why, group):
    options = {"worker_class": name}
    if group:
        options = {"worker_groups": {"other": options}}
    with pytest.raises(
        ValueError, match=f"^invalid worker_class={name!r}: expected the name of a class"
    ) as caught:
        CMLCluster(**options)
    assert why in str(caught.value)


async def test_a_worker_class_may_be_where_only_sessions_look(stub):
    cluster = CMLCluster(worker_class="theirs.Worker", env={"PYTHONPATH": "$HOME/theirs"}, asynchronous=True)
    await cluster.close()


@pytest.mark.parametrize("option", ["log-directory", "state-directory"])
async def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_launched(
    platform, tmp_path, option
):
    taken = tmp_path / "taken"
    taken.touch()
    name = {"log-directory": "log_directory", "state-directory": "cml.state-directory"}[option]
    with (
        dask.config.set({f"cml.{option}": str(taken / "below")}),
        pytest.raises(
            ValueError, match=f"invalid {name}='{taken}/below': expected a folder that can be made .*"
        ),
    ):
        await CMLCluster(platform="local", asynchronous=True)
    assert platform.list_workers() == []


def refused_as(argument, value, name=None):
    """How a message names what it refuses. What may hold secrets it does not show."""
    name = name or argument
    return name if argument in CONTAINERS else f"{name}={value!r}: expected"


@pytest.mark.parametrize(("argument", "value", "error", "allowed"), REFUSED)
def test_an_invalid_value_is_refused_before_a_launch(stub, argument, value, error, allowed):
    with pytest.raises(error) as caught:
        CMLCluster(**{argument: value})
    assert str(caught.value).startswith(f"invalid {refused_as(argument, value)}")
    assert allowed in str(caught.value)


@pytest.mark.parametrize(("argument", "value"), [("loop", 5), ("silence_logs", "quietly")])
def test_an_invalid_argument_of_dasks_launches_nothing(stub, argument, value):
    with pytest.raises(AttributeError):
        CMLCluster(**{argument: value})
    assert at_exit.unclosed() == []


#: The first of each argument.
REFUSED_IN_THE_CONFIGURATION = {row[0]: row[1:3] for row in reversed(REFUSED)}


@pytest.mark.parametrize("argument", REFUSED_IN_THE_CONFIGURATION)
def test_an_invalid_value_in_the_configuration_is_refused_alike(stub, argument):
    value, error = REFUSED_IN_THE_CONFIGURATION[argument]
    with dask.config.set({key(argument): value}), pytest.raises(error) as caught:
        CMLCluster()
    assert str(caught.value).startswith(f"invalid {refused_as(argument, value, key(argument))}")
    assert str(caught.value).endswith(", in Dask's configuration")


@pytest.mark.parametrize("mode", ["connect", "create-or-connect"])
def test_create_or_connect_requires_a_name(stub, mode):
    with pytest.raises(ValueError, match=r"name=None: expected the name of a cluster, .*the defaults"):
        CMLCluster(create_mode=mode)


def test_a_name_too_long_for_a_file_name_is_refused():
    with pytest.raises(ValueError, match=r"name=.*200 bytes at most"):
        Options.read(name="字" * 100)


@pytest.mark.parametrize("name", ["x" * 100, "é" * 100, "字" * 66])
def test_a_name_leaves_room_for_the_names_of_logs(tmp_path, name):
    (tmp_path / f"{Options.read(name=name).name}-scheduler.log").touch()
    (tmp_path / f"{name}-1000000000-1000.log").touch()


@pytest.mark.parametrize("memory", ["", " ", "GiB", "-2 GiB", "0 GiB"])
def test_the_error_repeats_an_invalid_amount_of_memory_as_it_was_given(memory):
    with pytest.raises(ValueError, match=f"invalid memory={memory!r}: expected"):
        Options.read(memory=memory)


@pytest.mark.parametrize("argument", ["worker_args", "scheduler_args", "worker_class", "log_directory"])
def test_text_that_no_program_can_be_given_is_refused(argument):
    value = "a\0b"
    with pytest.raises(ValueError, match=argument):
        Options.read(**{argument: [value] if argument.endswith("args") else value})


@pytest.mark.parametrize("seconds", ["", " ", "0s", "0", "1e999 s"])
def test_the_error_repeats_an_invalid_time_as_it_was_given(seconds):
    with pytest.raises(ValueError, match=f"invalid worker_timeout='{seconds}': expected"):
        Options.read(worker_timeout=seconds)


def test_text_of_subclasses_of_str_becomes_plain():
    class Text(str, enum.Enum):
        PLATFORM = "local"
        OTHER = "mine"
        PRELOAD = "--preload"

    options = Options.read(
        name=Text.OTHER,
        worker_class=Text.OTHER,
        worker_args=[Text.PRELOAD, Text.OTHER],
        scheduler_args=(Text.PRELOAD, Text.OTHER),
        env={Text.OTHER: Text.OTHER},
        log_directory=Text.OTHER,
        platform=Text.PLATFORM,
        launch_options={Text.OTHER: Text.OTHER},
    )
    arguments = [*options.worker_args, *options.scheduler_args]
    assert arguments == ["--preload", "mine"] * 2
    texts = [options.name, options.worker_class, *arguments[1::2]]
    texts += [*options.env, *options.env.values()]
    texts += [*options.launch_options, *options.launch_options.values()]
    assert texts == ["mine"] * 8
    assert {type(text) for text in [*texts, *arguments, options.log_directory, options.platform]} == {str}


@pytest.mark.parametrize("command", [["dask", "cuda", "worker"], ["/opt/bin/dask-cuda-worker"]])
def test_dask_cuda_starts_a_worker_for_each_gpu(command):
    assert Options.read(nvidia_gpu=2, worker_command=command).processes == 2
    with pytest.raises(ValueError, match="invalid processes=1: expected 2, one for each GPU"):
        Options.read(nvidia_gpu=2, worker_command=command, processes=1)
    with pytest.raises(ValueError, match="invalid nvidia_gpu=0: expected at least 1 with"):
        Options.read(worker_command=command)


def test_a_session_offers_its_gpus_as_resources():
    assert Options.read().resources == {}
    assert Options.read(nvidia_gpu=2).resources == {"GPU": 2}
    assert Options.read(nvidia_gpu=2, resources={"FPGA": 1}).resources == {"FPGA": 1}


def test_launch_options_are_stored_as_json_represents_them():
    given = {"zones": ("a", "b"), "label": {"id": 7}}
    options = Options.read(launch_options=given)
    assert options.launch_options == {"zones": ["a", "b"], "label": {"id": 7}}
    given["label"]["id"] = 8
    assert options.launch_options["label"] == {"id": 7}
    assert Options.read(**options.arguments()).launch_options == options.launch_options


BAD_SETTINGS = [
    ("api.threads", 0, ValueError, POSITIVE_COUNT),
    ("api.threads", "many", TypeError, POSITIVE_COUNT),
    ("api.poll-interval", 0, ValueError, SECONDS),
    ("api.poll-interval", "often", ValueError, SECONDS),
    ("api.retries", -1, ValueError, COUNT),
    ("api.retries", None, TypeError, COUNT),
    ("api.timeout", "", ValueError, SECONDS),
    ("api.timeout", None, TypeError, SECONDS),
    ("retire-timeout", "soon", ValueError, SECONDS),
    ("state-directory", "", ValueError, "the path of a folder"),
    ("state-directory", "a\0b", ValueError, "the path of a folder"),
    ("state-directory", None, TypeError, "the path of a folder"),
]


@pytest.mark.parametrize(("name", "value", "error", "allowed"), BAD_SETTINGS)
def test_an_invalid_setting_is_refused_with_its_key_before_a_launch(stub, name, value, error, allowed):
    with dask.config.set({f"cml.{name}": value}), pytest.raises(error) as caught:
        CMLCluster()
    assert f"invalid cml.{name}={value!r}: expected" in str(caught.value)
    assert allowed in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("failure-limit", 0, ValueError),
        ("quota-retry", [60], TypeError),
    ],
)
def test_an_invalid_setting_of_the_keeper_is_refused_before_a_launch(monkeypatch, name, value, error):
    platform = SimulatedPlatform(advances=False)
    monkeypatch.setattr("dask_cml.cluster.load_platform", lambda _: platform)
    with dask.config.set({f"cml.{name}": value}), pytest.raises(error, match=f"invalid cml.{name}="):
        CMLCluster(pending_timeout=0.1, scheduler_timeout=0.1)
    assert platform.calls == []


def test_several_processes_in_a_session_need_nannies(stub):
    arguments = ["--no-nanny"]
    assert Options.read(worker_args=arguments).worker_args == ("--no-nanny",)
    with pytest.raises(ValueError, match=r"^invalid worker_args: expected no --no-nanny; several processes"):
        CMLCluster(processes=2, worker_args=arguments)
    with pytest.raises(ValueError, match=r"^in worker_groups\['wide'\]: invalid worker_args: expected no"):
        CMLCluster(worker_args=arguments, worker_groups={"wide": {"processes": 2}})


def test_never_overrides_a_time_limit_in_the_configuration():
    with dask.config.set({"cml.idle-timeout": "1 hour", "cml.orphan-timeout": "never"}):
        options = Options.read(idle_timeout="never")
    assert (options.idle_timeout, options.orphan_timeout) == (None, None)


def test_a_representation_shows_no_value_that_may_be_secret():
    secret = {
        "worker_command": ["run", "s3cr3t"],
        "env": {"TOKEN": "s3cr3t"},
        "launch_options": {"key": "s3cr3t"},
    }
    groups = {"gpu": {"env": {"TOKEN": "s3cr3t"}}}
    shown = repr(Options.read(name="mine", worker_args=["s3cr3t"], worker_groups=groups, **secret))
    assert shown.startswith("Options(n_workers=0, cpu=1.0, memory=2.0, nvidia_gpu=0, nthreads=")
    assert "name='mine'" in shown
    assert "s3cr3t" not in shown


@pytest.mark.parametrize("name", ["no_such_thing", "network_selections"])
@pytest.mark.parametrize("argument", ["launch_options", "scheduler_launch_options"])
def test_a_launch_option_that_the_platform_lacks_is_refused_by_name(stub, name, argument):
    words = rf"invalid {argument} '{name}': expected parameters of the installed launch_workers: n, cpu"
    with pytest.raises(ValueError, match=words):
        CMLCluster(**{argument: {name: [{"network_label_id": 10, "quantity": 2}]}})
    assert stub.calls == []
