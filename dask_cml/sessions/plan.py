"""The plan of a cluster's sessions: their code, environment and size."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import dask
from distributed.security import Security

from dask_cml.checks import names, runs_one_per_gpu
from dask_cml.options import Options, SessionSize, exact, setting
from dask_cml.sessions import tls
from dask_cml.sessions.session_logs import log_path

SCHEDULER_FILE = "scheduler.json"
PRELOAD = "dask_cml.scheduler.plugin"
#: The environment variable with the time that the preload module waits for the first manager, in seconds.
PATIENCE = "DASK_CML__ORPHAN_TIMEOUT"

# Python code and not a line that begins with "!": in such a line, IPython would expand $name and {expr}, and
# lose the exit status. The code runs in the session's kernel, so it is plain, and fails if the program fails.
#
# CML shows a session's output in the console of the session that launched it, so the output goes to a log.
# NFS shows the log to other sessions when it is closed, and only then reports a full disk. So each part is
# written separately. If that fails, the code keeps reading the pipe: otherwise, tasks that print would fail.
_CODE = """\
# {title}
import os, subprocess, sys, threading, time

command = {command}
{more}program = {program!r}
log = {log!r}
end, missing = b'', 0
def keep(output):
    global end, missing
    end = (end + output)[-8192:]
    try:
        with open(log, 'ab') as file:
            if missing:
                file.write(b'\\n[%d bytes of output lost: the log could not be written]\\n' % missing)
            file.write(output)
        missing = 0
    except OSError:
        missing += len(output)
try:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
except OSError as error:
    keep(b'%r\\n' % error)
    raise
with process:
{meanwhile}    while output := process.stdout.read1(65536):
        keep(output)
if process.returncode:
    print(*end.decode(errors='replace').splitlines()[-15:], sep='\\n', flush=True)
    raise RuntimeError(f'{{program}} failed with exit status {{process.returncode}}; its log is {{log}}')
"""

# The platform forwards its https entry to this port of the session's loopback. The code reads the port in the
# session, because it may differ from the port of the session that launches it.
_DASHBOARD = """\
port = os.environ.get('CDSW_APP_PORT') or os.environ.get('CDSW_READONLY_PORT') or '8787'
command += ['--dashboard-address', '127.0.0.1:' + port]
"""

# The scheduler's session may wait for room. If the cluster closes meanwhile, its folder disappears, and no
# scheduler starts. NFS may cache for long that a file does not exist. Listing the folder refreshes the cache.
_MEETING = """\
    def meet():
        deadline, seen = time.monotonic() + {timeout}, False
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if {file!r} in os.listdir({folder!r}):
                    return
                seen = True
            except FileNotFoundError:
                if seen:
                    break
            except OSError:
                pass
            time.sleep(0.2)
        process.terminate()
    threading.Thread(target=meet, daemon=True).start()
"""


@dataclass(frozen=True)
class SessionPlan:
    """All that a launch needs.

    Parameters
    ----------
    name : str
        The name of the session. A Dask worker in it has the same name.
    size : SessionSize
        Its virtual CPUs, memory in GiB, and GPUs.
    code : str
        The Python code that it runs.
    env : mapping of str to str
        Its environment variables.
    log : Path
        The file for its output, on the project file system.
    hidden : collection of str
        The variables whose values are not shown, because they may be secret.
    """

    name: str
    size: SessionSize
    code: str
    env: Mapping[str, str] = field(repr=False)
    log: Path
    hidden: Collection[str] = ()

    def __str__(self) -> str:
        size = self.size
        cpu, memory = exact(size.cpu), exact(size.memory)
        head = f"# {self.name}: cpu={cpu} memory={memory} nvidia_gpu={size.nvidia_gpu}"
        env = {name: "(hidden)" if name in self.hidden else repr(value) for name, value in self.env.items()}
        return "\n".join([head, *(f"# env {name}={shown}" for name, shown in env.items()), self.code])


def plan_scheduler(
    options: Options,
    folder: Path,
    host: str,
    port: int,
    security: Security | None = None,
    dashboard_port: int | None = None,
) -> SessionPlan:
    """Plan the scheduler's session.

    Parameters
    ----------
    options : Options
        The cluster's options.
    folder : Path
        The cluster's folder on the project file system, for the scheduler file.
    host : str
        The interface on which the scheduler listens.
    port : int
        The port on which the scheduler listens. 0: any free port.
    security : Security, optional
        The cluster's keys, in files.
    dashboard_port : int, optional
        Port of the dashboard on the session's loopback. Default: the port that the platform forwards.
    """
    arguments = ["--host", host, "--port", str(port)]
    arguments += ["--scheduler-file", str(folder / SCHEDULER_FILE)]
    if options.idle_timeout is not None:
        arguments += ["--idle-timeout", f"{options.idle_timeout} seconds"]
    if dashboard_port is not None:
        arguments += ["--dashboard-address", f"127.0.0.1:{dashboard_port}"]
    arguments += tls.arguments(security, "scheduler")
    env = {"BOKEH_ALLOW_WS_ORIGIN": ",".join(_dashboard_origins()), **options.env}
    if options.shutdown_on_close and options.orphan_timeout is not None:
        # Managers register the plugin, too, but the first one may be killed before that.
        configured = dask.config.get("distributed.scheduler.preload")  # --preload takes their place
        for module in PRELOAD, *([configured] if isinstance(configured, str) else configured):
            arguments += ["--preload", module]
        env[PATIENCE] = str(max(options.orphan_timeout, options.scheduler_timeout))
    arguments += options.scheduler_args
    title = f"The scheduler of the Dask cluster {options.name!r}"
    name = f"{options.name}-scheduler"
    more = _DASHBOARD if dashboard_port is None else ""
    return _plan(
        options, folder, name, options.scheduler, title, ("dask", "scheduler"), arguments, env, more=more
    )


def _dashboard_origins() -> list[str]:
    """Return the hosts, with any port, whose pages may open WebSockets of the dashboard. Dask allows all."""
    domain = os.environ.get("CDSW_DOMAIN")
    hosts = ["127.0.0.1", "localhost", *setting("forward-hosts", names), *([f"*.{domain}"] if domain else [])]
    return [f"{host}:*" for host in hosts]


def plan_worker(
    options: Options, folder: Path, name: str, address: str | None, security: Security | None = None
) -> SessionPlan:
    """Plan a worker session.

    Parameters
    ----------
    options : Options
        The cluster's options.
    folder : Path
        The cluster's folder on the project file system.
    name : str
        The Dask worker's name. With more than one process, the suffixes are ``-0``, ``-1`` and so on.
    address : str or None
        The scheduler's address. None: it is unknown yet, and the worker reads it from the scheduler file.
    security : Security, optional
        The cluster's keys, in files.
    """
    meanwhile = ""
    patience = options.scheduler_timeout
    arguments: list[str] = []
    if address is None:
        patience += options.pending_timeout  # the program's timeout includes the time until the file exists
        arguments += ["--scheduler-file", str(folder / SCHEDULER_FILE)]
        meanwhile = _MEETING.format(file=SCHEDULER_FILE, folder=str(folder), timeout=patience)
    else:
        arguments.append(address)
    memory = int(options.worker.memory * 2**30) // options.processes
    arguments += ["--name", name]
    if not runs_one_per_gpu(options.worker_command):
        arguments += ["--nworkers", str(options.processes)]
    arguments += ["--nthreads", str(options.nthreads // options.processes)]
    arguments += ["--memory-limit", str(memory), "--death-timeout", str(patience)]
    # Without a dashboard, a worker still serves health and metrics by plain HTTP, on all interfaces by
    # default.
    arguments += ["--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
    if options.resources:
        shares = {each: amount / options.processes for each, amount in options.resources.items()}
        arguments += ["--resources", " ".join(f"{each}={exact(share)}" for each, share in shares.items())]
    if options.worker_class is not None:
        arguments += ["--worker-class", options.worker_class]
    arguments += [*tls.arguments(security, "worker"), *options.worker_args]
    title = f"A worker of the Dask cluster {options.name!r}"
    return _plan(
        options,
        folder,
        name,
        options.worker,
        title,
        options.worker_command,
        arguments,
        options.env,
        meanwhile=meanwhile,
    )


def _plan(
    options: Options,
    folder: Path,
    name: str,
    size: SessionSize,
    title: str,
    program: Sequence[str],
    arguments: list[str],
    env: Mapping[str, str],
    more: str = "",
    meanwhile: str = "",
) -> SessionPlan:
    log = log_path(name, folder, options.log_directory)
    # Not `dask`, which may not be on PATH. All sessions have the launcher's interpreter.
    command = [sys.executable, "-m", *program] if program[0] == "dask" else [*program]
    command += arguments
    words = " ".join(program)
    code = _CODE.format(
        title=title, program=words, command=command, more=more, log=str(log), meanwhile=meanwhile
    )
    return SessionPlan(name, size, code, {"PYTHONUNBUFFERED": "1", **env}, log, {*options.env})
