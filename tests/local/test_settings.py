import fcntl
import importlib
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from distributed import Client
from ports import free_port

from dask_cml import local
from dask_cml.local import processes, state, workers

from .conftest import FOREVER, alive, supervisor_of


def test_an_invalid_quota_is_refused_and_changes_nothing(platform, launch):
    local.configure({"sessions": 0})
    for quota, over_quota, error, words in [
        (3, "refuse", TypeError, "quota"),
        ({"gpus": 1}, "refuse", ValueError, "gpus"),
        ({"cpu": None}, "refuse", TypeError, "cpu"),
        ({"cpu": -1}, "refuse", ValueError, "cpu"),
        ({"memory": float("nan")}, "refuse", ValueError, r"quota\[.memory.\]=nan: expected a number above 0"),
        ({"sessions": 2}, "queue", ValueError, "'refuse', 'wait'"),
    ]:
        with pytest.raises(error, match=words):
            local.configure(quota, over_quota)
    assert "id" not in launch(code=FOREVER)[0]
    local.configure()
    assert "id" in launch(code=FOREVER)[0]


def test_launch_workers_refuses_invalid_arguments(platform):
    for options, error, words in [
        ({"n": -1}, ValueError, "n=-1"),
        ({"cpu": 0}, ValueError, "cpu=0"),
        ({"memory": float("nan")}, ValueError, "memory=nan"),
        ({"nvidia_gpu": "1"}, TypeError, "nvidia_gpu='1'"),
        ({"code": ""}, ValueError, "code=''"),
        ({"env": {"A": 1}}, TypeError, "A"),
    ]:
        with pytest.raises(error, match=words):
            platform.launch_workers(**{"n": 1, "cpu": 1, "memory": 1, "code": "pass", **options})
    assert platform.sessions() == []


def test_over_quota_sessions_wait_their_turn_until_others_end_or_the_quota_grows(
    platform, launch, reaches, find
):
    platform.configure(quota={"sessions": 1}, over_quota="wait")
    first, second, third, fourth = [launch(code=FOREVER)[0] for _ in range(4)]
    reaches(first, "running")
    platform.stop_workers(first["id"])
    reaches(second, "running")
    platform.stop_workers(third["id"])
    assert reaches(third, "stopped")["running_at"] is None
    assert find(fourth["id"])["status"] == "scheduling"
    platform.configure(quota={"sessions": 2})
    reaches(fourth, "running")


def test_a_user_id_without_a_name_launches_sessions(platform, launch, reaches, monkeypatch, tmp_path):
    """As containers may have. The home folder is known by its variable alone."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # raises KeyError, as for an unknown id
    code = f"import os; assert os.environ['CDSW_CREATOR'] == '{os.getuid()}'"
    [session] = launch(code=code, env={"SECRET": "1"})
    reaches(session, "succeeded")
    assert (state.folder_of(session["id"]) / "session.json").stat().st_mode & 0o077 == 0


SOCKETS = """
import multiprocessing, os, tempfile

if __name__ == "__main__":
    folder = tempfile.mkdtemp(prefix="dask-")  # as that of a Dask worker
    assert len(folder) <= 40, folder
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    with multiprocessing.get_context("forkserver").Manager() as manager:
        assert manager.list([1, 2])[1] == 2
"""


def test_paths_of_sockets_fit_whatever_the_length_of_the_home_folder(
    platform, launch, reaches, monkeypatch, tmp_path
):
    program = tmp_path / "sockets.py"
    program.write_text(SOCKETS)
    directory = tmp_path / ("long" * 20)
    monkeypatch.setenv("DASK_CML_LOCAL_DIRECTORY", str(directory))
    [session] = launch(script=str(program))
    reaches(session, "succeeded")
    assert not state.temporary_of(session["id"]).is_symlink()


def test_nobody_takes_the_state_directory_of_another_user(platform, tmp_path, monkeypatch):
    """In the folder for temporary files, every user can create a folder of any name."""
    taken = tmp_path / f"dask-cml-local-{os.getuid()}"
    taken.mkdir()
    taken.chmod(0o777)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        patch.setenv("HOME", str(tmp_path))
        patch.delenv("DASK_CML_LOCAL_DIRECTORY")
        patch.delenv("CDSW_ENGINE_ID", raising=False)
        for cache, expected in {str(tmp_path / "cache"): "cache", "relative": ".cache"}.items():
            patch.setenv("XDG_CACHE_HOME", cache)
            assert platform.sessions() == []
            assert state.directory() == tmp_path / expected / "dask-cml"
            assert state.directory().stat().st_mode & 0o777 == 0o700
        taken.parent.chmod(0o777)
        patch.setenv("DASK_CML_LOCAL_DIRECTORY", str(tmp_path))
        with pytest.raises(PermissionError, match="run `chmod 700"):
            platform.sessions()


def test_a_file_system_whose_locks_belong_to_a_process_is_refused(platform, launch, monkeypatch):
    """By such locks, each session would seem to have lost its supervisor."""
    lock = fcntl.flock
    shared = fcntl.LOCK_SH | fcntl.LOCK_NB
    monkeypatch.setattr(fcntl, "flock", lambda file, how: None if how == shared else lock(file, how))
    with pytest.raises(OSError, match="set DASK_CML_LOCAL_DIRECTORY to a folder on a local disk"):
        launch(code="pass")
    assert platform.sessions() == []


_NAMES = ("cml", "cml.workers_v1", "cdsw")


@pytest.fixture
def no_cml():
    """What other tests have imported as cml is unknown here. What this test imports is forgotten after it."""
    # Not another sys.modules: the import statement would still find modules in the first one.
    before = {name: sys.modules.pop(name) for name in _NAMES if name in sys.modules}
    yield
    for name in _NAMES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.fixture(params=["cml/workers_v1.py", "cdsw.py"])
def real(no_cml, monkeypatch, tmp_path, request):
    """The name of a real module that can be imported."""
    path = tmp_path / request.param
    path.parent.mkdir(exist_ok=True)
    path.touch()
    monkeypatch.syspath_prepend(tmp_path)
    return request.param.removesuffix(".py").replace("/", ".")


def test_installed_platform_is_imported_as_cml_and_as_cdsw(platform, no_cml, monkeypatch, tmp_path):
    (tmp_path / "cml").mkdir()  # a folder without modules is no real one
    monkeypatch.syspath_prepend(tmp_path)
    platform.install()
    platform.install()
    assert importlib.import_module("cml.workers_v1") is local
    assert importlib.import_module("cdsw") is local
    namespace: dict = {}
    exec("from cml import workers_v1", namespace)
    assert namespace["workers_v1"] is local


def test_a_real_module_is_not_hidden_unless_forced(platform, real):
    with pytest.raises(RuntimeError, match=f"{real.split('.')[0]} is installed.*force"):
        platform.install()
    assert importlib.import_module(real) is not local
    platform.install(force=True)
    assert importlib.import_module(real) is local


class HandmadeCluster:
    """A cluster as helpers before dask-cml made it: by the older module, with no more than it offers."""

    def __init__(self, workers: int, port: int) -> None:
        self.api = importlib.import_module("cdsw")
        self.workers, self.port = workers, port

    def init(self) -> None:
        where = f"--host 0.0.0.0 --port {self.port} --dashboard-address 127.0.0.1:0"
        [scheduler] = self.start(1, f"!dask scheduler {where}")
        self.url = f"tcp://{scheduler['ip_address']}:{self.port}"
        self.start(self.workers, f"!dask worker {self.url}")

    def start(self, n: int, code: str) -> list[dict]:
        launched = self.api.launch_workers(n=n, cpu=1, memory=1, nvidia_gpu=0, code=code)
        return self.api.await_workers(launched, wait_for_completion=False, timeout_seconds=300)["workers"]

    def terminate(self) -> None:
        self.api.stop_workers()


@pytest.mark.slow
def test_a_cluster_that_is_written_for_cdsw_runs_unchanged(platform, no_cml, monkeypatch, until):
    monkeypatch.setattr(workers, "_POLL_INTERVAL", 0.1)
    platform.install()
    cluster = HandmadeCluster(2, free_port())
    cluster.init()
    with Client(cluster.url, timeout=120) as client:
        client.wait_for_workers(2, timeout=120)
        assert client.submit(sum, [1, 2]).result(timeout=120) == 3
    cluster.terminate()
    until(lambda: {session["status"] for session in platform.sessions()} == {"stopped"})


LAUNCH = (
    f"from dask_cml import local; print(local.launch_workers(1, 1, 1, code={FOREVER!r})[0]['id'], flush=True)"
)
# A daemon: in a session of its own, not a descendant of the session's first process, deaf to SIGTERM.
DAEMON = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open({path!r} + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename({path!r} + ".new", {path!r})
        time.sleep(600)
    os._exit(0)
while not os.path.exists({path!r}):
    time.sleep(0.01)
"""


@pytest.fixture
def daemon(launch, directory, until):
    """Launch a session whose code makes a daemon; return it, and the daemon's process id."""
    path = directory / "daemon"

    def daemon(more=""):
        [session] = launch(code=DAEMON.format(path=str(path)) + more)
        until(path.exists)
        return session, int(path.read_text())

    return daemon


def test_session_outlives_the_process_that_launched_it(platform, launch, reaches):
    """All processes of a user see and stop it."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"{LAUNCH}\n{FOREVER}"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    there = launcher.stdout.readline().strip()
    os.killpg(launcher.pid, signal.SIGKILL)
    launcher.communicate()
    reaches(there, "running")
    [here] = launch(code=FOREVER)
    assert {session["id"] for session in platform.list_workers()} == {here["id"], there}
    stop = f"from dask_cml import local; local.stop_workers({here['id']!r}, {there!r})"
    subprocess.check_call([sys.executable, "-c", stop])
    reaches(here, "stopped")
    reaches(there, "stopped")


def test_stop_leaves_no_process(platform, reaches, daemon):
    session, daemon_pid = daemon(FOREVER)
    reaches(session, "running")
    platform.stop_workers(session["id"])
    reaches(session, "stopped")
    assert not alive(daemon_pid)
    assert processes.find(session["id"]) == set()


def test_the_processes_of_a_session_end_with_its_code(reaches, daemon):
    session, daemon_pid = daemon()
    reaches(session, "succeeded")
    assert not alive(daemon_pid)


#: Two processes, of which each writes its name when it is asked to end.
ASKED = """
import os, signal, time
name = "main" if os.fork() else "child"
signal.signal(signal.SIGTERM, lambda *_: open(name, "w").close())
open(f"{name} ready", "w").close()
while True:
    time.sleep(600)
"""


def test_only_the_main_process_is_asked_to_end_and_all_are_killed_after_the_grace(
    platform, launch, until, reaches, directory
):
    def names():
        return {path.name for path in directory.iterdir()}

    platform.configure(stop_grace=2.0)
    [session] = launch(code=f"import os; os.chdir({str(directory)!r})\n{ASKED}")
    until(lambda: names() == {"main ready", "child ready"})
    begin = time.monotonic()
    platform.stop_workers(session["id"])
    reaches(session, "stopped")
    assert time.monotonic() - begin >= 2.0
    assert names() == {"main ready", "child ready", "main"}


def test_a_session_without_its_supervisor_fails_and_leaves_no_process(platform, reaches, daemon):
    platform.configure(memory_limit=False)
    session, daemon_pid = daemon(FOREVER)
    reaches(session, "running")
    os.kill(supervisor_of(session), signal.SIGKILL)
    reaches(session, "failed")
    assert not alive(daemon_pid)
    assert processes.find(session["id"]) == set()
    assert not (state.folder_of(session["id"]) / "tmp").exists()
    assert not state.temporary_of(session["id"]).is_symlink()


@pytest.mark.slow
def test_a_launch_removes_what_has_ended_long_ago(platform, launch, reaches, monkeypatch):
    [ended], [live] = launch(code="pass"), launch(code=FOREVER)
    reaches(ended, "succeeded")
    [newer] = launch(code=FOREVER)
    assert ended["id"] in {session["id"] for session in platform.sessions()}
    monkeypatch.setattr(state, "_KEPT", 0.0)
    [newest] = launch(code=FOREVER)
    left = {live["id"], newer["id"], newest["id"]}
    assert {session["id"] for session in platform.sessions()} == left


def test_commands_without_ipython_show_how_to_install_it(platform, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"dask-cml\[local\]"):
        platform.launch_workers(1, 1, 1, code="!true")
    assert platform.sessions() == []
