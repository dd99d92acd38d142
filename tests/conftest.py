import asyncio
import contextlib
import gc
import http.server
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import dask
import psutil
import pytest
import testbed
from testbed import cgroups, networks
from tornado.httpclient import AsyncHTTPClient

from dask_cml import output


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where everything is installed that can be, a skip is a failure. Root rights cannot be."""
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and os.environ.get("DASK_CML_NO_SKIPS") and os.geteuid() == 0:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} is skipped: {report.longrepr}"
    return report


#: Modules whose tests share a server or a cluster. One process of pytest-xdist runs each: it starts once.
TOGETHER = (
    "test_address.py",
    "test_browser.py",
    "test_cluster.py",
    "test_jupyter.py",
    "test_panes.py",
    "test_serve_browser.py",
    "test_sidebar.py",
    "test_workloads.py",
    "promises/test_dask_habits.py",
    "promises/test_said.py",
    "promises/test_start.py",
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """What runs with the packages of images although it is slow, is slow."""
    if item.get_closest_marker("images"):
        item.add_marker("slow")


#: Tests between two collections of garbage, which take as long as some tests.
_TESTS_PER_COLLECTION = 10
_n_tests = itertools.count(1)


def pytest_collection_finish() -> None:
    """Collect garbage only between tests, without what stays for all tests.

    What killed processes leave behind runs code when it is collected. Python 3.11 does not survive this while
    a test compiles code.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


def pytest_runtest_logfinish() -> None:
    if next(_n_tests) % _TESTS_PER_COLLECTION == 0:
        gc.collect()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute each test by itself, but for those. With pytest 9.2 xdist does not see its groups."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return path if path.endswith(TOGETHER) else nodeid

    return Scheduling(config, log)


# With it jsonschema compiles 38 grammars, to check IRIs, which takes each process a second.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

# Shells let what they start in the background ignore Ctrl-C, and nohup lets it ignore the end of the
# terminal, which what the tests start would inherit.
for _signum, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _handler)

# It does not import beside the newest distributed, so it is installed where an older one is tested.
_CTL = ["promises/test_dask_ctl.py"]
collect_ignore = [] if importlib.util.find_spec("dask_ctl") else _CTL

ENDED = ("succeeded", "failed", "stopped", "timedout")
#: Seconds to wait for what takes a few on a quiet machine: how loaded a machine is, no test can know.
PATIENCE = 120.0
AsyncHTTPClient.configure(None, defaults={"connect_timeout": PATIENCE, "request_timeout": PATIENCE})


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state directory of its own, which does not exist yet."""
    with dask.config.set({"cml.state-directory": str(tmp_path / "state")}):
        yield tmp_path / "state"


@pytest.fixture
def platform() -> Iterator[ModuleType]:
    """The local platform with a state of its own. It fails the test that leaves a session live."""
    with local_platform():
        yield testbed


@pytest.fixture(scope="module")
def shared_platform() -> Iterator[ModuleType]:
    with local_platform():
        yield testbed


@pytest.fixture
def namespaces(platform: ModuleType) -> ModuleType:
    """The local platform whose sessions have networks of their own, where this machine can give them such."""
    try:
        networks.check()
        for action in ("add", "delete"):
            probe = ["ip", "netns", action, f"cml-probe-{os.getpid()}"]  # other tests run at the same time
            subprocess.run(probe, check=True, capture_output=True)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        pytest.skip(str(error))
    platform.configure(networks=True)
    return platform


@contextlib.contextmanager
def local_platform() -> Iterator[None]:
    from dask_cml.core import ending  # imports distributed

    before = ending.unclosed()  # of fixtures that several tests share
    # Not tmp_path, whose length with that of a socket's name may be more than sockets can have. Dask reads
    # its environment variables as Python, which would warn of "cml-8in", but not of "cml_8in".
    directory = Path(tempfile.mkdtemp(prefix="cml_"))
    state_directory = str(directory / "state")
    testbed.set_up(directory / "local")
    # On a loaded machine, a worker that a nanny starts again takes long.
    settings = {"cml.state-directory": state_directory, "distributed.deploy.lost-worker-timeout": "5 minutes"}
    with pytest.MonkeyPatch.context() as patch, dask.config.set(settings):
        patch.setenv("DASK_CML_LOCAL_DIRECTORY", str(directory / "local"))
        patch.setenv("DASK_CML__STATE_DIRECTORY", state_directory)
        # A refused launch is tried again if this process has stopped sessions, here those of other tests.
        patch.setattr("dask_cml.sessions.workers_api._stopping", WeakKeyDictionary())
        testbed.configure(
            stop_grace=0.3,
            variables={"DASK_CML__STATE_DIRECTORY": state_directory},
            memory_limit=cgroups.place("0" * 16) is not None,
            port_range=own_ports(),
        )
        yield
        testbed.configure(latency=0.0)
        testbed.clear_faults()
        for thread in threading.enumerate():
            if thread.name == "cml-api":  # a call that hung until now may still write
                thread.join(PATIENCE)
        unclosed = [cluster.options.name for cluster in ending.unclosed() if cluster not in before]
        leaked = [session for session in testbed.sessions() if session["status"] not in ENDED]
        leaked = [session for session in leaked if not session["stop_requested"]]
        processes = end_all(directory / "local")
        places = [cgroups.place(session["id"]) for session in testbed.sessions()]
        groups = [place for place in places if place and place.exists()]
        remove(directory)
    assert not unclosed, "the test left clusters open"
    assert not leaked, "the test left sessions live"
    assert not processes, "stopped sessions left processes"
    assert not groups, "sessions left cgroups"


def own_ports() -> tuple[int, int]:
    """Ports for sessions of this process's tests alone: a session listens some seconds after it got one."""
    begin = 20000 + 1500 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8)
    return begin, begin + 1500


def remove(directory: Path) -> None:
    """Remove a folder. A thread whose answer nobody awaits any more may still create a folder in it."""
    deadline = time.monotonic() + PATIENCE
    while directory.exists() and time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)


def end_all(directory: Path) -> list[str]:
    """Stop all sessions, and return the processes that are left nevertheless."""
    live = [session["id"] for session in testbed.sessions() if session["status"] not in ENDED]
    if live:
        testbed.stop_workers(*live)
    deadline = time.monotonic() + PATIENCE
    while left := [*processes_of(directory)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    described = [str(process.as_dict(["pid", "cmdline", "status"])) for process in left]
    for process in left:
        process.kill()
    testbed.sessions()  # frees what killed supervisors leave
    return described


def processes_of(owner: Path | str, variable: str = "DASK_CML_LOCAL_DIRECTORY") -> Iterator[psutil.Process]:
    """Sessions and their supervisors have the state directory in their environment, and sessions their id."""
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        if environment.get(variable) == str(owner):
            yield process


@pytest.fixture
def sidecar(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An Istio sidecar of this session. The one element is the HTTP status of its answers."""
    status = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0] if self.path == "/healthz/ready" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr("dask_cml.sessions.here.MESH_PORT", server.server_port)
        yield status
        server.shutdown()
        thread.join()


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Stands in for the driver of a session, which has so many GPUs."""

    def nvidia_smi(n: int) -> None:
        program = tmp_path / "bin" / "nvidia-smi"
        program.parent.mkdir()
        lines = [f"GPU {i}: NVIDIA A100-SXM4-80GB (UUID: GPU-0000000{i})" for i in range(n)]
        program.write_text(
            "\n".join(["#!/bin/sh", '[ "$*" = -L ] || exit 2', "cat <<END", *lines, "END", ""])
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "void")

    return nvidia_smi


@pytest.fixture
def until() -> Callable[..., None]:
    def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            time.sleep(0.01)

    return until


@pytest.fixture
def holds() -> Callable[..., Awaitable[None]]:
    async def holds(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.01)

        await asyncio.wait_for(wait(), seconds)

    return holds


class _WrittenLogs(pytest.LogCaptureFixture):
    """The captured logs, with what another thread is about to write; see ``dask_cml/output.py``."""

    @property
    def handler(self) -> Any:
        output.flush(PATIENCE)
        return super().handler


@pytest.fixture
def caplog(request: pytest.FixtureRequest) -> Iterator[pytest.LogCaptureFixture]:
    """Capture logs, as pytest does. Who reads them finds all that was logged before."""
    logs = _WrittenLogs(request.node, _ispytest=True)
    yield logs
    logs._finalize()


@pytest.fixture
def no_nannies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let workers start without a nanny. Sessions of several processes need one: ``worker_args=[]``."""
    with configured(monkeypatch, "worker-args", ["--no-nanny"]):
        yield


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch, no_nannies: None) -> Iterator[None]:
    """Let clusters start without nannies and without the dashboard, which is half of a scheduler's start."""
    with configured(monkeypatch, "scheduler-args", ["--no-dashboard"]):
        yield


@pytest.fixture
def locally(platform: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The local platform, also for commands and the web UI."""
    with configured(monkeypatch, "platform", "local"):
        yield platform


@contextlib.contextmanager
def configured(monkeypatch: pytest.MonkeyPatch, option: str, value: object) -> Iterator[None]:
    monkeypatch.setenv(f"DASK_CML__{option.replace('-', '_').upper()}", str(value))
    with dask.config.set({f"cml.{option}": value}):
        yield


@pytest.fixture(params=["tcp", "tls"])
def security(request: pytest.FixtureRequest) -> Any:
    """Keys for connections by TLS, or None for connections without."""
    if request.param == "tcp":
        return None
    pytest.importorskip("cryptography")
    from distributed.security import Security

    return Security.temporary()
