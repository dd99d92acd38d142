"""Options: where each comes from, and what is refused before anything is launched."""

from __future__ import annotations

import copy
from datetime import timedelta
from operator import attrgetter
from pathlib import Path

import dask.config
import jsonschema
import pytest
import yaml
from distributed import Security
from simulated.platform import SimulatedPlatform

import dask_cml
from dask_cml import CMLCluster
from dask_cml.options import Options, state_directory
from dask_cml.options.table import ARGUMENTS

PACKAGE = Path(dask_cml.__file__).parent
DEFAULTS = yaml.safe_load((PACKAGE / "cml.yaml").read_text())["cml"]

#: Of each option: a value as the configuration and JSON have it, where it is in Options, and what is there.
EXAMPLES = {
    "n_workers": (3, "n_workers", 3),
    "cpu": (2.5, "worker.cpu", 2.5),
    "memory": ("16 GiB", "worker.memory", 16),
    "nvidia_gpu": (1, "worker.nvidia_gpu", 1),
    "memory_reserve": ("512 MiB", "memory_reserve", 0.5),
    "scratch": ("50 GiB", "scratch", 50),
    "nthreads": (8, "nthreads", 8),
    "processes": (2, "processes", 2),
    "scheduler_cpu": (0.5, "scheduler.cpu", 0.5),
    "scheduler_memory": (4, "scheduler.memory", 4),
    "env": ({"A": "1"}, "env", {"A": "1"}),
    "scheduler_nvidia_gpu": (1, "scheduler.nvidia_gpu", 1),
    "worker_args": (["--lifetime", "1h"], "worker_args", ("--lifetime", "1h")),
    "scheduler_args": (["--no-show"], "scheduler_args", ("--no-show",)),
    "worker_class": ("my.Worker", "worker_class", "my.Worker"),
    "resources": ({"FPGA": 1}, "resources", {"FPGA": 1}),
    "worker_groups": ({"gpu": {"nvidia_gpu": 1}}, "worker_groups", {"gpu": {"nvidia_gpu": 1}}),
    "worker_command": (["my-worker"], "worker_command", ("my-worker",)),
    "launch_options": ({"kernel": "r"}, "launch_options", {"kernel": "r"}),
    "scheduler_launch_options": ({"kernel": "r"}, "scheduler_launch_options", {"kernel": "r"}),
    "name": ("mine", "name", "mine"),
    "create_mode": ("create-or-connect", "create_mode", "create-or-connect"),
    "security": (False, "security", False),
    "pending_timeout": ("3 minutes", "pending_timeout", 180),
    "scheduler_timeout": ("2 minutes", "scheduler_timeout", 120),
    "worker_timeout": (30, "worker_timeout", 30),
    "idle_timeout": ("1 hour", "idle_timeout", 3600),
    "orphan_timeout": ("2 hours", "orphan_timeout", 7200),
    "log_directory": ("/logs", "log_directory", "/logs"),
    "shutdown_on_close": (False, "shutdown_on_close", False),
    "forward_dashboard": (True, "forward_dashboard", True),
    "platform": ("local", "platform", "local"),
}
#: What else must be set for that.
NEEDED = {"create_mode": {"cml.name": "mine"}}


def key(argument):
    return f"cml.{argument.replace('_', '-')}"


@pytest.fixture(autouse=True)
def defaults():
    """The defaults, whatever the machine is configured to."""
    with dask.config.set({"cml": copy.deepcopy(DEFAULTS)}):
        yield


# -- where options come from


def test_every_option_is_read_from_the_configuration_and_an_argument_takes_precedence():
    assert {*EXAMPLES} == {*ARGUMENTS}
    schema = jsonschema.Draft202012Validator(yaml.safe_load((PACKAGE / "cml-schema.yaml").read_text()))
    for argument, (value, where, expected) in EXAMPLES.items():
        of, needed = attrgetter(where), NEEDED.get(argument, {})
        assert of(Options.read()) != expected
        with dask.config.set({key(argument): value, **needed}):
            assert of(Options.read()) == expected
        with dask.config.set({key(argument): "of the configuration", **needed}):
            assert of(Options.read(**{argument: value})) == expected
        schema.validate({"cml": {argument.replace("_", "-"): value}})


def test_the_state_directory_is_absolute_and_knows_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert state_directory() == Path("/home/someone/.dask-cml")
    with dask.config.set({"cml.state-directory": "here"}):
        assert state_directory() == Path.cwd() / "here"
    with dask.config.set({"cml.state-directory": "$HOME/clusters"}):
        assert state_directory() == Path("/home/someone/clusters")


# -- what values mean


def test_memory_is_in_gib_and_times_are_in_seconds_unless_they_say_another_unit():
    amounts = {0.5: 0.5, " 16 ": 16, "1.5GiB": 1.5, "512 MiB": 0.5, "16 GB": 16e9 / 2**30, "16.5": 16.5}
    amounts |= {"1e3": 1000, "1e3 MiB": 1000 / 1024, "200 TiB": 200 * 1024}
    for memory, gib in amounts.items():
        options = Options.read(memory=memory, scheduler_memory=memory, scratch=memory)
        amounts = (options.worker.memory, options.scheduler.memory, options.scratch)
        assert amounts == pytest.approx((gib, gib, gib)), memory
    assert Options.read(scratch="none").scratch == Options.read(scratch=0).scratch == 0
    for seconds in (3, "3", "3000 ms", timedelta(seconds=3)):
        assert Options.read(worker_timeout=seconds).worker_timeout == 3


def test_options_do_not_change_with_the_given_objects():
    security = Security(require_encryption=True)
    assert Options.read(security=security).security is security
    env, arguments = {"A": "1"}, ["--no-show"]
    options = Options.read(env=env, scheduler_args=arguments)
    env["B"] = "2"
    arguments.append("--show")
    assert options.env == {"A": "1"}
    assert options.scheduler_args == ("--no-show",)
    given = {"zones": ("a", "b"), "label": {"id": 7}}
    options = Options.read(launch_options=given)
    given["label"]["id"] = 8
    assert options.launch_options == {"zones": ["a", "b"], "label": {"id": 7}}  # as JSON represents them
    assert Options.read(**options.arguments()).launch_options == options.launch_options


# -- what is refused

NUMBER = "a number above 0"
COUNT = "a whole number of at least 0"
WORKERS = "a whole number from 0 to 100000"
POSITIVE_COUNT = "a whole number of at least 1"
GIB = "GiB as a number above 0"
WITH_UNIT = "; above 1000, with a unit"
SECONDS = "seconds as a number above 0"
NAME = "1 to 100 printable characters"
AMOUNTS = "a mapping of names to numbers above 0"
STRINGS = "a list of strings"
TEXT = "a string that is not empty, without null characters"
FOLDER = "the path of a folder"
NAMES = "env: expected names of environment variables, got "
TWO = "worker_args[0]: expected an option and its value as two strings"
NO_OTHERS = "options of `dask worker`, and no other words"
CONTAINERS = {name for name, argument in ARGUMENTS.items() if argument.kind in ("array", "object")}
NAN = float("nan")

REFUSED = [
    ("n_workers", -1, ValueError, WORKERS),
    ("n_workers", 100_001, ValueError, WORKERS),
    ("cpu", 0, ValueError, NUMBER),
    ("memory", 0, ValueError, GIB),
    ("memory", "lots", ValueError, GIB),
    ("memory", b"16 GiB", TypeError, GIB),
    ("memory", 8192, ValueError, WITH_UNIT),
    ("scratch", 10_000, ValueError, WITH_UNIT),
    ("nvidia_gpu", -1, ValueError, COUNT),
    ("processes", False, TypeError, POSITIVE_COUNT),
    ("resources", {1: 1}, TypeError, AMOUNTS),
    ("resources", {"A B": 1}, ValueError, "names without spaces"),
    ("resources", {"GPU": 0}, ValueError, f"resources['GPU']=0: expected {NUMBER}"),
    ("worker_command", "dask worker", TypeError, STRINGS),
    ("worker_command", ["dask", ""], ValueError, "expected a command"),
    ("scheduler_memory", 4096, ValueError, WITH_UNIT),
    ("env", ["A=1"], TypeError, "a mapping of names to strings"),
    ("env", {"A": 1}, TypeError, "env['A']=1: expected a string, such as \"1\""),
    ("env", {1: "A"}, ValueError, f"{NAMES}'1'"),
    ("env", {"A=B": "1"}, ValueError, f"{NAMES}'A=…'"),
    ("env", {"A": "\0"}, ValueError, "env['A']: expected a string without null characters"),
    ("worker_args", "--lifetime 1h", TypeError, STRINGS),
    ("worker_args", ["--lifetime", 3600], TypeError, "worker_args[1] of type int: expected a string"),
    ("worker_args", ["a\0b"], ValueError, "worker_args[0]: expected a string without null characters"),
    ("worker_args", ["--nthreads=3"], ValueError, "use the argument nthreads"),
    ("worker_args", ["--scheduler-file", "/file"], ValueError, "the cluster sets it"),
    ("worker_args", ["--nonsense"], ValueError, "expected options of `dask worker`. No such option"),
    ("worker_args", ["--no-nanny", "a", "b"], ValueError, NO_OTHERS),
    ("worker_args", ["--lifetime 1h"], ValueError, TWO),
    ("scheduler_args", ["--shw"], ValueError, "`dask scheduler`. No such option"),
    ("worker_class", "a\0b", ValueError, TEXT),
    ("launch_options", {3: "cpu"}, TypeError, "of type int: expected names of parameters of launch_workers"),
    ("launch_options", {"cpu": 3}, ValueError, "use the argument cpu"),
    ("launch_options", {"code": "pass"}, ValueError, "the cluster sets it"),
    ("launch_options", {"kernel": NAN}, ValueError, "launch_options['kernel'] of type"),
    ("scheduler_launch_options", {"nvidia_gpu": 1}, ValueError, "use the argument scheduler_nvidia_gpu"),
    ("create_mode", "attach", ValueError, "one of 'create', 'connect', 'create-or-connect'"),
    ("name", "", ValueError, NAME),
    ("name", "a/b", ValueError, NAME),
    ("name", "x" * 101, ValueError, NAME),
    ("name", "字" * 100, ValueError, "at most 200 bytes"),
    ("security", "yes", TypeError, "True, False or a distributed.Security"),
    ("pending_timeout", 0, ValueError, SECONDS),
    ("worker_timeout", "5 parsecs", ValueError, SECONDS),
    ("idle_timeout", 0, ValueError, SECONDS),
    ("log_directory", "", ValueError, FOLDER),
    ("log_directory", "${NO_SUCH}/logs", ValueError, "a folder, with variables and a home that this"),
    ("shutdown_on_close", 1, TypeError, "True or False"),
    ("platform", "kubernetes", ValueError, "one of 'auto', 'local'"),
]
BAD_SETTINGS = [
    ("api.threads", 0, ValueError, POSITIVE_COUNT),
    ("api.poll-interval", "often", ValueError, SECONDS),
    ("api.retries", None, TypeError, COUNT),
    ("api.timeout", None, TypeError, SECONDS),
    ("failure-limit", 0, ValueError, POSITIVE_COUNT),  # the keeper's
    ("state-directory", "", ValueError, FOLDER),
    ("state-directory", None, TypeError, FOLDER),
]


@pytest.fixture
def stub(monkeypatch):
    """What a cluster would launch its sessions with."""
    stub = SimulatedPlatform()
    monkeypatch.setattr("dask_cml.cluster.load_platform", lambda platform: stub)
    yield stub
    assert stub.calls == []


def refused_as(argument, value, name=None):
    """How a message names what it refuses. What may hold secrets it does not show."""
    name = name or argument
    return name if argument in CONTAINERS else f"{name}={value!r}: expected"


def test_an_invalid_value_is_refused_before_a_launch(stub):
    for argument, value, error, allowed in REFUSED:
        with pytest.raises(error) as caught:
            CMLCluster(**{argument: value})
        assert str(caught.value).startswith(f"invalid {refused_as(argument, value)}")
        assert allowed in str(caught.value)


def test_an_invalid_value_in_the_configuration_is_refused_alike(stub):
    first = {key(argument): (argument, *row) for argument, *row in reversed(REFUSED)}
    for name, (argument, value, error, allowed) in first.items():
        with dask.config.set({name: value, **NEEDED.get(argument, {})}), pytest.raises(error) as caught:
            CMLCluster()
        assert str(caught.value).startswith(f"invalid {refused_as(argument, value, name)}")
        assert str(caught.value).endswith(", in Dask's configuration")
        assert allowed in str(caught.value)
    for name, value, error, allowed in BAD_SETTINGS:
        with dask.config.set({f"cml.{name}": value}), pytest.raises(error) as caught:
            CMLCluster()
        assert f"invalid cml.{name}={value!r}: expected {allowed}" in str(caught.value)


def test_no_text_shows_a_value_that_may_be_secret():
    for argument, value in [
        ("env", {"TOKEN": "s3cr3t", "N": 4}),
        ("env", {"TOKEN": "s3cr3t", "": "x"}),
        ("env", {"TOKEN": "s3cr3t\0"}),
        ("env", ["TOKEN=s3cr3t"]),
        ("env", {"TOKEN=s3cr3t": "x"}),
        ("launch_options", {"key": "s3cr3t", "cpu": 1}),
        ("launch_options", ["s3cr3t"]),
        ("worker_args", ["--preload-token=s3cr3t", 1]),
        ("worker_args", "--token=s3cr3t"),
    ]:
        with pytest.raises((TypeError, ValueError), match=f"^invalid {argument}") as caught:
            Options.read(**{argument: value})
        assert "s3cr3t" not in str(caught.value)
    secret = {"worker_command": ["run", "s3cr3t"], "launch_options": {"key": "s3cr3t"}}
    secret |= {"env": {"TOKEN": "s3cr3t"}, "worker_groups": {"gpu": {"env": {"TOKEN": "s3cr3t"}}}}
    shown = repr(Options.read(name="mine", worker_args=["s3cr3t"], **secret))
    assert shown.startswith("Options(n_workers=0, cpu=1.0, memory=2.0, nvidia_gpu=0, nthreads=")
    assert "name='mine'" in shown
    assert "s3cr3t" not in shown


def test_an_amount_with_a_unit_is_restored_from_a_record():
    options = Options.read(memory="2 TiB", scratch="4 TiB", worker_groups={"big": {"memory": "3 TiB"}})
    restored = Options.of_running("mine", options.arguments())
    assert (restored.memory, restored.scratch) == (2048, 4096)
    assert restored.of_group(options.groups()["big"].group_arguments()).memory == 3072


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
def test_a_worker_class_that_cannot_be_imported_is_refused(stub, name, why):
    words = f"^invalid worker_class={name!r}: expected the name of a class"
    for options in ({"worker_class": name}, {"worker_groups": {"other": {"worker_class": name}}}):
        with pytest.raises(ValueError, match=words) as caught:
            CMLCluster(**options)
        assert why in str(caught.value)


async def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_launched(platform, tmp_path):
    taken = tmp_path / "taken"
    taken.touch()
    for key, name in {"log-directory": "log_directory", "state-directory": "cml.state-directory"}.items():
        words = f"invalid {name}='{taken}/below(/.*)?': expected a folder that can be made .*"
        with dask.config.set({f"cml.{key}": str(taken / "below")}), pytest.raises(ValueError, match=words):
            await CMLCluster(platform="local", asynchronous=True)
    assert platform.list_workers() == []


@pytest.mark.parametrize("mode", ["connect", "create-or-connect"])
def test_create_or_connect_requires_a_name(stub, mode):
    with pytest.raises(ValueError, match=r"name=None: expected the name of a cluster, .*the defaults"):
        CMLCluster(create_mode=mode)


def test_a_session_has_a_worker_and_a_resource_for_each_gpu():
    assert Options.read(nvidia_gpu=2).resources == {"GPU": 2}
    assert Options.read(nvidia_gpu=2, resources={"FPGA": 1}).resources == {"FPGA": 1}
    for command in ["dask", "cuda", "worker"], ["/opt/bin/dask-cuda-worker"]:
        assert Options.read(nvidia_gpu=2, worker_command=command).processes == 2
        with pytest.raises(ValueError, match="invalid processes=1: expected 2, one for each GPU"):
            Options.read(nvidia_gpu=2, worker_command=command, processes=1)
        with pytest.raises(ValueError, match="invalid nvidia_gpu=0: expected at least 1 with"):
            Options.read(worker_command=command)


def test_several_processes_in_a_session_need_nannies(stub):
    arguments = ["--no-nanny"]
    assert Options.read(worker_args=arguments).worker_args == ("--no-nanny",)
    with pytest.raises(ValueError, match=r"^invalid worker_args: expected no --no-nanny; several processes"):
        CMLCluster(processes=2, worker_args=arguments)
    with pytest.raises(ValueError, match=r"^in worker_groups\['wide'\]: invalid worker_args: expected no"):
        CMLCluster(worker_args=arguments, worker_groups={"wide": {"processes": 2}})


def test_a_launch_option_that_the_platform_lacks_is_refused_by_name(stub):
    for argument in ("launch_options", "scheduler_launch_options"):
        words = rf"invalid {argument} 'no_such': expected parameters of the installed launch_workers: n, cpu"
        with pytest.raises(ValueError, match=words):
            CMLCluster(**{argument: {"no_such": [{"network_label_id": 10, "quantity": 2}]}})
