"""Options and limits: where each comes from, and what is refused before anything is launched."""

import asyncio
import copy
import inspect
import math
import re
from datetime import timedelta
from operator import attrgetter
from pathlib import Path

import dask
import dask.config
import jsonschema
import pytest
import yaml
from clusters import create_and_kill, log_of, make, simulate
from distributed import Client, Security
from distributed.cli.dask_scheduler import main as scheduler
from distributed.cli.dask_worker import main as worker
from simulated.platform import SimulatedPlatform
from simulated.testing import eventually, simulated

import dask_cml
from dask_cml import CMLAdaptive, CMLCluster
from dask_cml.options import (
    Options,
    SessionSize,
    adaptive_bounds,
    check_room,
    limits,
    room,
    state_directory,
    unexpected_argument,
)
from dask_cml.options.configuration import DEFAULTS, setting
from dask_cml.options.table import ARGUMENTS, GROUP_OPTIONS, OPTIONS, SCHEMA
from dask_cml.records import store
from dask_cml.records.history import ended_clusters

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
    "orphan_timeout": ("120 min", "orphan_timeout", 7200),
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
    with dask.config.set({"cml": copy.deepcopy(DEFAULTS["cml"])}):
        yield


def test_every_option_is_read_from_the_configuration_and_an_argument_takes_precedence():
    assert {*EXAMPLES} == {*ARGUMENTS}
    schema = jsonschema.Draft202012Validator(yaml.safe_load(SCHEMA.read_text()))
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
TWO = 'worker_args[0]: expected an option and its value as two strings, "--lifetime", "…"'
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
    ("memory", "1 B", ValueError, "; at least 0.25 GiB"),
    ("scheduler_memory", "100 MiB", ValueError, "; at least 0.25 GiB"),
    ("memory_reserve", 1.9, ValueError, "at most 1.875 GiB, with memory=2 GiB"),
    ("nvidia_gpu", -1, ValueError, "a whole number from 0 to 1000"),
    ("cpu", 1e300, ValueError, "a number above 0; at most 1000000000"),
    ("nthreads", 10**40, ValueError, f"{POSITIVE_COUNT}; at most 1000000000"),
    ("worker_timeout", True, TypeError, SECONDS),
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
    ("idle_timeout", 0, ValueError, f'{SECONDS}, a string such as "90s", or "never"'),
    ("log_directory", "", ValueError, FOLDER),
    ("log_directory", "${NO_SUCH}/logs", ValueError, "a folder, with variables and a home that this"),
    ("shutdown_on_close", 1, TypeError, "True or False"),
    ("platform", "kubernetes", ValueError, "one of 'auto', 'local'"),
]
#: Arguments of a cluster that are no options.
BAD_ARGUMENTS = [
    ("asynchronous", "no", TypeError, "True or False"),
    ("loop", 3, TypeError, "a tornado.ioloop.IOLoop or None"),
    ("quiet", "no", TypeError, "True or False"),
    ("silence_logs", "loud", TypeError, "a level of logging"),
]
BAD_SETTINGS = [
    ("prices.cpu", 0, ValueError, NUMBER),
    ("limits.hours", 1e300, ValueError, "a number above 0; at most 1000000000"),
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
    for argument, value, error, allowed in REFUSED + BAD_ARGUMENTS:
        with pytest.raises(error) as caught:
            CMLCluster(**{argument: value})
        assert str(caught.value).startswith(f"invalid {refused_as(argument, value)}")
        assert allowed in str(caught.value)
    words = r"invalid n_workers='lab': expected a whole number; a cluster's name is its option `name`"
    with pytest.raises(TypeError, match=words):
        CMLCluster("lab")


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
    restored = Options.read(options.arguments(), name="mine", worker_groups={})
    assert (restored.memory, restored.scratch) == (2048, 4096)
    assert restored.of_group(options.groups()["big"].group_arguments()).memory == 3072


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
        words = f"invalid {name}: cannot use {taken}/below(/.*)?: Not a directory"
        with dask.config.set({f"cml.{key}": str(taken / "below")}), pytest.raises(ValueError, match=words):
            await CMLCluster(platform="local", asynchronous=True)
    assert platform.list_workers() == []
    assert ended_clusters() == []


@pytest.mark.parametrize("mode", ["connect", "create-or-connect"])
def test_create_or_connect_requires_a_name(stub, mode):
    words = f"^invalid name=None: expected the name of a cluster, which create_mode='{mode}' requires$"
    with pytest.raises(ValueError, match=words):
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
    with pytest.raises(ValueError, match=r"invalid processes=32: expected at most 13, with memory=2 GiB$"):
        Options.read(nvidia_gpu=32)


def test_several_processes_in_a_session_need_nannies(stub):
    arguments = ["--no-nanny"]
    assert Options.read(worker_args=arguments).worker_args == ("--no-nanny",)
    with pytest.raises(ValueError, match=r"^invalid worker_args: expected no --no-nanny; several processes"):
        CMLCluster(processes=2, worker_args=arguments)
    with pytest.raises(ValueError, match=r"^invalid worker_groups\['wide'\].worker_args: expected no"):
        CMLCluster(worker_args=arguments, worker_groups={"wide": {"processes": 2}})


def test_a_launch_option_that_the_platform_lacks_is_refused_by_name(stub):
    for argument in ("launch_options", "scheduler_launch_options"):
        words = rf"invalid {argument} 'no_such': expected parameters of the installed launch_workers: n, cpu"
        with pytest.raises(ValueError, match=words):
            CMLCluster(**{argument: {"no_such": [{"network_label_id": 10, "quantity": 2}]}})


NONE = (None, None, None)
#: More sessions than a cluster can have.
MANY = 10**8


def test_sessions_have_at_least_the_memory_and_the_threads_in_all():
    options = Options.read(cpu=2, memory=16)
    assert options.sessions_for(3) == 3
    assert options.sessions_for(1, cores=5) == 3
    assert options.sessions_for(0, memory="48 GiB") == 3
    assert options.sessions_for(0, memory=48.1, cores=2) == 4
    assert adaptive_bounds(options, NONE, NONE, ()) == (0, math.inf)
    assert adaptive_bounds(options, (1, None, 3), (9, None, 15), ()) == (2, 7)
    assert adaptive_bounds(options, (None, "32 GiB", None), (None, "48 GiB", None), ()) == (2, 3)


def test_more_sessions_than_a_cluster_can_have_are_refused():
    options = Options.read(cpu=2, memory=16)
    too_many = {"": (MANY, None, None), "_memory": (None, "900 PiB", None), "_cores": (None, None, MANY)}
    for suffix, many in too_many.items():
        for named, call, arguments in (
            (suffix[1:] or "n", options.sessions_for, many),
            (f"minimum{suffix}", adaptive_bounds, (options, many, NONE, ())),
            (f"maximum{suffix}", adaptive_bounds, (options, NONE, many, ())),
        ):
            with pytest.raises(ValueError, match=rf"^invalid {named}=.*expected .*\b100000\b"):
                call(*arguments)


#: Arguments of methods that are Dask's or their own.
OWN = ["self", "asynchronous", "loop", "silence_logs", "quiet", "kwargs"]


def test_the_schema_is_one_and_its_defaults_are_valid():
    schema = yaml.safe_load(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(DEFAULTS)
    values = dict.fromkeys(ARGUMENTS, 1) | {"worker_command": ("dask", "worker"), "create_mode": "create"}
    for key in OPTIONS:
        setting(key, values)


def documented(function):
    """The descriptions of the parameters in a docstring by name, in order."""
    section = inspect.cleandoc(function.__doc__).split("Parameters\n----------\n")[1].split("\n\n")[0]
    found = re.findall(r"^(\w+) : .*\n((?:    .*\n?)+)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def test_names_and_defaults_are_those_of_the_table():
    """In the signatures and docstrings, and in the file that users read."""
    of_cluster = [name for name in inspect.signature(CMLCluster.__init__).parameters if name not in OWN]
    of_group = [name for name in inspect.signature(CMLCluster.add_worker_group).parameters if name not in OWN]
    texts = documented(CMLCluster)
    assert of_cluster == [name for name in texts if name not in OWN] == [*ARGUMENTS]
    assert of_group == [*documented(CMLCluster.add_worker_group)] == ["name", *GROUP_OPTIONS]
    for name, argument in ARGUMENTS.items():
        shown = ":" if argument.default in (None, [], {}) else f"{argument.default}."
        assert f"Default{shown}".replace(" ", "") in re.sub('[ "`]', "", texts[name]), name
    shipped = yaml.safe_load(Path(dask_cml.__file__).with_name("cml.yaml").read_text())
    assert yaml.safe_dump(shipped, sort_keys=False) == yaml.safe_dump(DEFAULTS, sort_keys=False)
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


def test_an_argument_of_other_cluster_managers_leads_to_the_one_of_a_cluster():
    for name, expected in {
        "memory_limit": "memory",
        "threads_per_worker": "nthreads",
        "cores": "cpu or nthreads",
        "num_workers": "n_workers",
        "quux": "one of ",
        "image": "none, because a session runs on the runtime of the session that launches it",
        "walltime": "none, because a worker session has no time limit: for the cluster, set idle_timeout",
        "n_worker": "n_workers",
        "nworkers": "n_workers or processes",
        "timeout": "pending_timeout or scheduler_timeout or worker_timeout",
        "state_directory": "cml.state-directory in Dask's configuration",
        "inherit": "cml.inherit in Dask's configuration",
    }.items():
        start = f"CMLCluster() got an unexpected keyword argument {name!r}: expected {expected}"
        assert unexpected_argument("CMLCluster", name, [*ARGUMENTS]).startswith(start)


@simulated
async def test_a_subclass_may_have_attributes_of_the_names_of_options(it):
    class WithMemory(CMLCluster):
        memory = 1

        def __init__(self, **options):
            self.env = "mine"
            super().__init__(**options)

    async with simulate(WithMemory, name="lab") as cluster:
        cluster.memory, cluster.env = 2, "yours"
        assert (cluster.memory, cluster.env) == (2, "yours")


class Patient(CMLAdaptive):
    def __init__(self, cluster, *, patience, **kwargs):
        super().__init__(cluster, **kwargs)
        self.patience = patience


async def test_an_unknown_argument_or_an_invalid_number_of_a_method_changes_nothing(platform):
    unstarted = make()
    for call, expected in [
        (lambda: make(memory_limit=1), r"CMLCluster\(\) got an unexpected keyword argument 'memory_limit'"),
        (lambda: unstarted.scale(n_workers=2), r"scale\(\) .*'n_workers': expected n$"),
        (lambda: unstarted.scale(jobs=2), r"scale\(\) .* 'jobs': expected n$"),
        (lambda: unstarted.scale(worker_groups=2), r" 'worker_groups': expected worker_group$"),
        (lambda: unstarted.adapt(minimum_jobs=2), r" 'minimum_jobs': expected minimum$"),
        (lambda: unstarted.adapt(max_workers=2), r" 'max_workers': expected maximum$"),
        (lambda: unstarted.adapt(maximun=2), r"adapt\(\) .*'maximun': expected maximum$"),
        (lambda: unstarted.close(timeout=[3]), r"^invalid timeout=\[3\]: expected seconds"),
        (lambda: unstarted.adapt(n=3), r"adapt\(\) .*'n': expected minimum or maximum$"),
        (lambda: unstarted.adapt(key=len), r"adapt\(\) .*'key': "),
        (lambda: unstarted.add_worker_group("big", memory_limit=2), r"_group\(\) .*: expected memory$"),
        (lambda: unstarted.scale(MANY), "^invalid n=.* 100000"),
        (lambda: unstarted.scale(memory="900 PiB"), r"^invalid memory=.* 100000\b"),
        (lambda: unstarted.adapt(maximum=MANY), "^invalid maximum=.* 100000"),
        (lambda: unstarted.add_worker_group("big", n_workers=MANY), "^invalid n_workers=.* 100000"),
    ]:
        with pytest.raises(ValueError if "100000" in expected else TypeError, match=expected):
            call()
    assert platform.list_workers() == []
    assert [*unstarted.worker_groups] == ["default"]
    assert unstarted.worker_spec == {}
    assert not unstarted.groups.adapts("default")
    adaptive = unstarted.adapt(Adaptive=Patient, patience=3, interval="1 s", memory_ratio=4)
    assert (adaptive.patience, adaptive.interval) == (3, 1)
    await unstarted.close()


def limited(**values):
    return dask.config.set({f"cml.limits.{name.replace('_', '-')}": value for name, value in values.items()})


def test_the_tightest_limit_decides_how_many_sessions_fit_next_to_others():
    others = [(SessionSize(1, 2), 1), (SessionSize(1, 5, 2), 2)]
    for limit, fit in [
        ({}, (float("inf"), "")),
        ({"sessions": 10}, (7, "sessions")),
        ({"cpu": 16}, (3, "cpu")),
        ({"memory": "64 GiB"}, (6, "memory")),
        ({"gpu": 5}, (1, "gpu")),
        ({"gpu": 0}, (0, "gpu")),
        ({"sessions": 6, "cpu": 16, "memory": 64}, (3, "cpu")),
        ({"sessions": 2}, (0, "sessions")),
        ({"hours": 1}, (float("inf"), "")),
    ]:
        with limited(**limit):
            assert room(SessionSize(4, 8, 1), others) == fit
    with limited(gpu=0):
        check_room("n", 1000, SessionSize(1, 1), [])
    with limited(cpu=0.4):  # amounts with fractions fit exactly
        assert room(SessionSize(0.1, 1), [(SessionSize(0.1, 1), 1)])[0] == 3


def test_an_invalid_limit_raises_an_error_with_its_key():
    invalid = {"sessions": 1.5, "cpu": 0, "memory": "lots", "gpu": -1, "hours": "2 days"}
    for name, value in invalid.items():
        words = f"^invalid cml.limits.{name}={value!r}: expected .*, in "
        with limited(**{name: value}), pytest.raises((TypeError, ValueError), match=words):
            limits()


def test_a_new_cluster_with_more_is_refused_with_the_limit(state):
    big = {"n_workers": 1, "worker_groups": {"big": {"n_workers": 2, "memory": 8}}}
    for options, limit, words in [
        ({"n_workers": 4}, {"sessions": 4}, "n_workers=4: expected at most 3, because cml.limits"),
        (big, {"memory": 16}, "worker_groups['big'].n_workers=2: expected at most 1, because cml"),
        ({"scheduler_cpu": 8}, {"cpu": 4}, "scheduler_cpu=8.0: expected less, because cml.limits.cpu is 4"),
    ]:
        with limited(**limit), pytest.raises(ValueError, match="invalid ") as caught:
            make(**options)
        assert str(caught.value).startswith(f"invalid {words}")
    assert not state.exists()


@pytest.mark.slow
@simulated
async def test_groups_that_adapt_at_once_share_the_limit(it):
    with limited(sessions=5):
        async with simulate(worker_groups={"gpu": {"nvidia_gpu": 1}}) as mine:
            mine.adapt(0, 10)
            mine.adapt(0, 10, worker_group="gpu")
            async with Client(mine, asynchronous=True) as client:
                plain = client.map(lambda i: i, range(1000), pure=False)
                gpu = client.map(lambda i: i, range(1000), pure=False, resources={"GPU": 1})
                await eventually(lambda: len(it.platform.live) == 5)
                await asyncio.sleep(30)
                assert len(mine.workers) <= 4
                del plain, gpu
            assert "workers, because cml.limits.sessions is 5" in log_of(mine)


@pytest.mark.slow
@simulated
async def test_without_a_keeper_too_a_cluster_ends_at_its_limit(it):
    with limited(hours=0.2001):
        await create_and_kill(it, name="lab", orphan_timeout="1 hour")
    await eventually(lambda: store.read("lab").scheduler.closed == "reached its limit of 0.2 h", 1800)
    assert store.read("lab").scheduler.hours == 0.2001
    await eventually(lambda: not it.platform.running)
