"""The plan of a cluster's sessions: their code, environment and size."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

import dask
from distributed.security import Security

from dask_cml.checks import runs_one_per_gpu
from dask_cml.layout import (
    CLIENT_NAME,
    CLUSTER,
    DASHBOARD_PORT,
    EXPANDED,
    FOLDER,
    GPUS,
    HOSTS,
    NANNY_PRELOAD,
    NUMBER,
    PROGRAM_FOLDER,
    SCHEDULER,
    STARTED_FOLDER,
    WORKER,
    WORKER_GROUP,
    board_file,
    inside_name,
    log_path,
    scheduler_file,
)
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.options import Options, SessionSize, exact, setting
from dask_cml.sessions.entry import form

PRELOAD = "dask_cml.scheduler.plugin"
#: The share of the scratch space that Dask workers may fill, and the variable that tells them.
_SPILLED, _MAX_SPILL = 0.8, "DASK_DISTRIBUTED__WORKER__MEMORY__MAX_SPILL"
#: The variable that tells Dask workers where to spill.
_SPILL_FOLDER = "DASK_TEMPORARY_DIRECTORY"
#: Characters of a record's id in the name of a session on the platform.
_ID_LENGTH = 6
#: A project variable for Spark, by which the platform holds a session back until several can start,
#: and the variable with which a session starts alone.
_GANG, _NO_GANG = "ENV_GANG_MIN_MEMBER", "ENV_DISABLE_GANG_SCHEDULER"
#: The program of a session, which the session's kernel runs by its path.
_WRAPPER = Path(__file__).parent.parent / "wrapper.py"


@dataclass(frozen=True)
class SessionPlan:
    """All that a launch needs.

    Parameters
    ----------
    key : str
        The name of its worker, or ``"scheduler"``.
    name : str
        The name of the session. A Dask worker in it has the same name.
    title : str
        Its name on the platform, which no session of another cluster has.
    size : SessionSize
        Its virtual CPUs, memory in GiB, and GPUs.
    code : str
        The Python code that it runs.
    env : mapping of str to str
        Its environment variables.
    log : Path
        The file for its output, on the project file system.
    launch_options : mapping
        Additional parameters of ``launch_workers``.
    started : Path
        The file in which a session says that it has taken the name. No other session takes it then.
    """

    key: str
    name: str
    title: str
    size: SessionSize
    code: str
    env: Mapping[str, str] = field(repr=False)
    log: Path
    launch_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    started: Path = Path()

    def __str__(self) -> str:
        size = self.size
        cpu, memory = exact(size.cpu), exact(size.memory)
        head = f"# {self.name}: cpu={cpu} memory={memory} nvidia_gpu={size.nvidia_gpu}"
        return "\n".join([head, *(f"# env {name}=(hidden)" for name in self.env), self.code])


@dataclass(frozen=True)
class Place:
    """Where a session of a cluster belongs, and how it connects.

    Parameters
    ----------
    folder : Path
        The cluster's folder on the project file system.
    number : int
        The number of the cluster's scheduler.
    record : str or None
        The id of the cluster's record. None for sessions without a record, which no other process finds.
    security : Security or None
        The cluster's keys, in files. None: it has no keys.
    """

    folder: Path
    number: int = 0
    record: str | None = None
    security: Security | None = None


def plan_scheduler(
    options: Options, place: Place, host: str, port: int, dashboard_port: int | None = None
) -> SessionPlan:
    """Plan the scheduler's session.

    Parameters
    ----------
    options : Options
        The cluster's options.
    place : Place
        The cluster's folder, for the scheduler's file, and its keys.
    host : str
        The interface on which the scheduler listens.
    port : int
        The port on which the scheduler listens. 0: any free port.
    dashboard_port : int, optional
        Port of the dashboard on the session's loopback. Default: the port that the platform forwards.
    """
    arguments = ["--host", host, "--port", str(port)]
    if options.idle_timeout is not None:
        arguments += ["--idle-timeout", f"{options.idle_timeout} seconds"]
    session: dict[str, Any] = {}
    if dashboard_port is None:
        session["dashboard_variable"] = DASHBOARD_PORT
    else:
        arguments += ["--dashboard-address", f"127.0.0.1:{dashboard_port}"]
    arguments += [*_keys(place.security, "scheduler"), *_preloads("scheduler", "--preload", PRELOAD)]
    env = {HOSTS: ",".join(setting("forward-hosts")), **options.env}
    if place.record is None:
        arguments += ["--scheduler-file", str(place.folder / scheduler_file(place.number))]
    else:
        env |= {FOLDER: str(place.folder), NUMBER: str(place.number)}
        session["gives_signs"] = True
    words = options.scheduler_args
    return _plan(options, place, SCHEDULER, ("dask", "scheduler"), arguments, words, env, session)


def plan_worker(
    options: Options, place: Place, name: str, address: str | None, group: str = DEFAULT_GROUP
) -> SessionPlan:
    """Plan a worker session.

    Parameters
    ----------
    options : Options
        The cluster's options.
    place : Place
        The cluster's folder and keys.
    name : str
        The Dask worker's name. With more than one process, the suffixes are ``-0``, ``-1`` and so on.
    address : str or None
        The scheduler's address. None: it is unknown yet, and the worker reads it from the scheduler's file.
    group : str
        The worker group.
    """
    session: dict[str, Any] = {
        "passes_notice": True,
        "memory": int(options.memory * 2**30),
        "scratch": int(options.scratch * 2**30),
    }
    timeout = options.worker_timeout
    arguments: list[str] = []
    if address is None:
        file, patience = scheduler_file(place.number), options.pending_timeout + options.scheduler_timeout
        timeout += patience  # the program's timeout includes the time until the file exists
        arguments += ["--scheduler-file", str(place.folder / file)]
        session |= {"timeout": patience, "connect_timeout": options.worker_timeout}
    else:
        arguments.append(address)
    share = int(options.worker_memory * 2**30) // options.processes
    arguments += ["--name", name, *_preloads("worker", "--preload", "dask_cml.worker.process")]
    command, env = _worker_command(options), _spill_limit(options) | _gpus(options)
    if runs_one_per_gpu(command):  # dask-cuda lacks the arguments
        env[NANNY_PRELOAD] = repr(_preloaded("nanny", "dask_cml.worker.process"))
    else:
        arguments += _preloads("nanny", "--preload-nanny", "dask_cml.worker.process")
        arguments += ["--nworkers", str(options.processes)]
    arguments += ["--nthreads", str(options.nthreads // options.processes)]
    arguments += ["--memory-limit", str(share), "--death-timeout", str(timeout)]
    # Without a dashboard, a worker still serves health and metrics by plain HTTP, on all interfaces by
    # default.
    arguments += ["--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
    if options.resources:
        shares = {name: amount / options.processes for name, amount in options.resources.items()}
        arguments += ["--resources", " ".join(f"{name}={exact(share)}" for name, share in shares.items())]
    if options.worker_class is not None:
        arguments += ["--worker-class", options.worker_class]
    arguments += _keys(place.security, "worker")
    env |= {WORKER: name, WORKER_GROUP: group, **options.env}
    return _plan(options, place, name, command, arguments, options.worker_args, env, session, group)


def _worker_command(options: Options) -> Sequence[str]:
    """Return the command that starts the Dask workers of a session."""
    if options.worker_command:
        return options.worker_command
    # The arguments of a user are those of `dask worker`. All sessions have the launcher's packages.
    one_per_gpu = options.nvidia_gpu and options.processes == options.nvidia_gpu and not options.worker_args
    return ("dask", "cuda", "worker") if one_per_gpu and find_spec("dask_cuda") else ("dask", "worker")


def _gpus(options: Options) -> dict[str, str]:
    """Return the environment variable with the GPUs of each Dask worker of a session.

    They are dealt out in turn. With fewer workers than GPUs, some have several; with more, some share one.
    """
    n, gpus = options.processes, range(options.nvidia_gpu)
    if not gpus:
        return {}
    shares = [gpus[i::n] or [i % len(gpus)] for i in range(n)]
    return {GPUS: " ".join(",".join(map(str, share)) for share in shares)}


def _keys(security: Security | None, role: str) -> list[str]:
    """Return the arguments with a cluster's keys of ``dask scheduler`` or ``dask worker``."""
    if security is None:
        return []
    tls = security.get_tls_config_for_role(role)
    arguments = ["--protocol", "tls"]
    for name in ("ca_file", "cert", "key"):
        arguments += [f"--tls-{name.replace('_', '-')}", tls[name]]
    return arguments


def _preloads(kind: str, argument: str, module: str) -> list[str]:
    """Return the arguments that preload a module and the modules in Dask's configuration."""
    arguments = []
    for name in _preloaded(kind, module):
        arguments += [argument, name]
    return arguments


def _preloaded(kind: str, module: str) -> list[str]:
    """Return a module and the modules in Dask's configuration, whose place the module would take."""
    configured = dask.config.get(f"distributed.{kind}.preload")
    return [module, *([configured] if isinstance(configured, str) else configured)]


def _spill_limit(options: Options) -> dict[str, str]:
    """Return the environment variable by which Dask workers keep to the session's disk."""
    if not options.scratch or dask.config.get("distributed.worker.memory.max-spill"):
        return {}
    return {_MAX_SPILL: str(int(_SPILLED * options.scratch * 2**30) // options.processes)}


def _plan(
    options: Options,
    place: Place,
    key: str,
    program: Sequence[str],
    arguments: list[str],
    words: Sequence[str],
    env: Mapping[str, str],
    session: dict[str, Any],
    group: str | None = None,
) -> SessionPlan:
    """Plan a session by its key, see :class:`SessionPlan`.

    `words` are the arguments of the user, which the session expands. `session` contains more arguments of
    :func:`dask_cml.wrapper.run`. `group` is the group of a worker.
    """
    name, started, role = key, key, "A worker"
    size, launch_options = options.worker, options.launch_options
    if key == SCHEDULER:
        # Workers of a cluster with the name "scheduler" have names such as "scheduler-0".
        name, started, role = f"{options.name}-{key}", f"/{key}-{place.number}", "The scheduler"
        size, launch_options = options.scheduler, options.scheduler_launch_options
    title = name
    if place.record is not None:  # the session enters itself into the record
        title += f" {place.record[:_ID_LENGTH]}"
        if key == SCHEDULER and place.number:  # the platform may still list the scheduler before
            title += f"-{place.number}"
        session |= {"entry": form(key, options.name, size, group), "record": place.record}
        session["next_board"] = board_file(place.number + 1)
        env = {**env, CLIENT_NAME: inside_name(place.record), CLUSTER: options.name}
    log = log_path(name, place.folder, options.log_directory)
    # Not `dask`, which may not be on PATH. All sessions have the launcher's interpreter.
    command = [sys.executable, "-m", *program] if program[0] == "dask" else [*program]
    session |= {"log": str(log), "program": " ".join(program), "folder": str(place.folder)}
    session["name"] = quoted = quote(started, safe="")
    session["scheduler_file"] = scheduler_file(place.number)
    session["command"] = [*command, *arguments]
    session["words"] = [*words] or None
    # Not as they are: the session could no longer know the value that a `$PATH` in PATH means.
    texts = {_SPILL_FOLDER: str(dask.config.get("temporary-directory", "")), **options.env}
    expanded = {variable: text for variable, text in texts.items() if "$" in text or "~" in text}
    if options.worker_class is not None and (folder := options.env.get(PROGRAM_FOLDER)):
        # `dask worker` imports the class before our module finds modules there.
        expanded["PYTHONPATH"] = f"{options.env.get('PYTHONPATH', '$PYTHONPATH')}:{folder}"
    session["expanded_variables"] = EXPANDED
    code = session_code(f"{role} of the Dask cluster {options.name!r}", session)
    own = {"PYTHONUNBUFFERED": "1"}
    if os.environ.get(_GANG):
        own[_NO_GANG] = "true"
    env = {**own, **{variable: text for variable, text in env.items() if variable not in expanded}}
    if expanded:
        env[EXPANDED] = json.dumps(expanded)
    file = place.folder / STARTED_FOLDER / quoted
    return SessionPlan(key, name, title, size, code, env, log, launch_options, file)


def session_code(title: str, arguments: Mapping[str, Any]) -> str:
    """Return the code of a session. It is Python and no line begins with ``!``.

    In such a line, IPython would expand $name and {expr}, and lose the exit status.

    Parameters
    ----------
    title : str
        What the session is, for readers.
    arguments : mapping
        The arguments of :func:`dask_cml.wrapper.run`.
    """
    lines = [f"    {name!r}: {value!r}," for name, value in arguments.items() if value is not None]
    run = f"runpy.run_path({str(_WRAPPER)!r})['run'](**session)"
    return "\n".join([f"# {title}", "import runpy", "", "session = {", *lines, "}", run, ""])
