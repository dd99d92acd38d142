"""``dask cml doctor``: its findings in good and broken environments, and the effect of its commands."""

import functools
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from types import ModuleType
from unittest.mock import Mock

import dask
import psutil
import pytest
from click.testing import CliRunner
from clusters import sign_of, write_record
from distributed import Client
from distributed.versions import get_versions
from packaging.requirements import Requirement

from dask_cml import CMLCluster, cli
from dask_cml.doctor import clusters, environment, examine
from dask_cml.doctor.environment import Finding
from dask_cml.options import state_directory
from dask_cml.records.store import Maker, Record, SchedulerState
from dask_cml.sessions import here, tls

#: The folder of packages that a workbench adds to its images.
ADDON = "/runtime-addons/cmladdon-2.0.49-b279/lib"
UNAUTHORIZED = {"message": "Unauthorized"}
CHECKS = [
    "platform", "network", "configuration", "state directory", "scratch", "versions", "image", "dashboard",
    "pyarrow", "sidebar", "clusters",
]  # fmt: skip


@pytest.fixture
def cml(monkeypatch):
    """The environment of a CML session. A test sets the answers of the platform module."""
    module = ModuleType("cml.workers_v1")
    module.__file__ = f"{ADDON}/cml/workers_v1.py"
    module.launch_workers = None
    module.answer = list
    module.list_workers = lambda: module.answer()
    monkeypatch.setitem(sys.modules, "cml", ModuleType("cml"))
    monkeypatch.setitem(sys.modules, "cml.workers_v1", module)
    monkeypatch.setenv("CDSW_ENGINE_ID", "kbmjhsx8uobd5ks9")
    monkeypatch.setenv("CDSW_API_KEY", "k" * 64)
    with dask.config.set({"cml.platform": "auto"}):
        yield module


@pytest.fixture
def laptop(monkeypatch):
    monkeypatch.delenv("CDSW_ENGINE_ID", raising=False)
    monkeypatch.delenv("CDSW_API_KEY", raising=False)
    for name in ("cml", "cml.workers_v1", "cdsw"):
        monkeypatch.setitem(sys.modules, name, None)
    with dask.config.set({"cml.platform": "auto"}):
        yield


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with dask.config.set({"cml.state-directory": "~/.dask-cml"}):
        yield tmp_path


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Install packages without code into a folder that comes first on Python's path; return the folder."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def install(name, version):
        about = folder / f"{name}-{version}.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        return folder

    return install


def run(*arguments, **variables):
    command = [sys.executable, "-m", "dask", "cml", "doctor", *map(str, arguments)]
    env = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def mend(finding, **more):
    assert finding.command
    subprocess.run(finding.command, shell=True, check=True, timeout=240, env={**os.environ, **more})


@pytest.mark.slow
def test_doctor_finds_nothing_wrong_in_a_good_environment_with_a_running_cluster(platform, no_nannies):
    with CMLCluster(n_workers=1, name="lab", platform="local", quiet=True) as cluster:
        cluster.wait_for_workers(1, timeout=120)
        result = run("--timeout", 90, "--json", DASK_CML__PLATFORM="local")
    assert result.returncode == 0, result.stdout + result.stderr
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert [*findings] == [*CHECKS[:-1], "cluster lab"]
    for name in [*CHECKS[: CHECKS.index("versions") + 1], "dashboard", "pyarrow"]:
        assert findings[name]["state"] == "ok"
        assert findings[name]["command"] is None
    assert findings["cluster lab"]["state"] == "ok"
    words = "Every process of the cluster (2) runs this process's versions."
    assert findings["cluster lab"]["words"] == words


def test_doctor_finds_every_fault_of_a_broken_environment_and_exits_with_1(tmp_path, install):
    (tmp_path / "cml").mkdir()
    (tmp_path / "cml" / "__init__.py").touch()
    (tmp_path / "cml" / "workers_v1.py").write_text(
        f"def launch_workers(): ...\ndef list_workers(): return {UNAUTHORIZED}\n"
    )
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    variables = {
        "CDSW_API_KEY": None,
        "CDSW_ENGINE_ID": "kbmjhsx8uobd5ks9",
        "DASK_CML__PLATFORM": "auto",
        "DASK_CML__STATE_DIRECTORY": str(state),
        "DASK_CML__CPU": "0",
        "PYTHONPATH": f"{tmp_path}:{install('dask', '2020.1.0')}",
    }
    result = run("--timeout", 90, **variables)
    assert result.returncode == 1, result.stderr
    lines = result.stdout.splitlines()
    wrong = [line.split()[1] for line in lines if line.startswith("wrong ")]
    assert wrong == ["platform", "configuration", "state", "versions"]
    assert f"  chmod 700 {state}" in result.stdout
    assert "Unauthorized" in result.stdout
    assert "cpu=0" in result.stdout
    assert "dask 2020.1.0 is installed" in result.stdout
    warnings = [line.split()[1] for line in lines if line.startswith("warning ")]
    # The state directory of this test is where workers spill, too.
    assert warnings[:2] == ["scratch", "image"]
    assert "\x1b" not in result.stdout


@pytest.mark.slow
def test_doctor_finishes_all_other_checks_if_the_platform_hangs(tmp_path):
    (tmp_path / "cdsw.py").write_text(
        "import time\ndef launch_workers(): ...\ndef list_workers(): time.sleep(3600)\n"
    )
    result = run("--timeout", 2, "--json", PYTHONPATH=str(tmp_path), DASK_CML__PLATFORM="auto")
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert result.returncode == 1
    assert [*findings][: len(CHECKS) - 1] == CHECKS[:-1]
    assert findings["platform"]["words"] == "The check did not finish within 2 s."


@pytest.mark.slow
def test_a_check_that_raises_an_error_becomes_one_wrong_finding(home, laptop, monkeypatch):
    errors = {"image": ImportError("libssl.so.3"), "pyarrow": SystemExit(3), "sidebar": RecursionError()}

    def fail(error, *_):
        raise error

    for name, error in errors.items():
        monkeypatch.setattr(environment, name, functools.partial(fail, error))
    findings = {finding.name: finding for finding in examine()}
    assert [*findings] == CHECKS
    for name, error in errors.items():
        assert findings[name].state == "wrong"
        assert type(error).__name__ in findings[name].words


def test_warnings_exit_with_0_and_wrong_findings_with_1(monkeypatch):
    for state, code in (("ok", 0), ("warning", 0), ("wrong", 1)):
        found = [Finding(state, "Words."), Finding("ok", "Words.")]
        monkeypatch.setattr("dask_cml.doctor.examine", lambda *_, found=found: iter(found))
        assert CliRunner().invoke(cli.cml, ["doctor"]).exit_code == code


def test_a_python_without_the_platform_is_wrong_with_the_next_command(laptop, monkeypatch):
    finding = environment.platform()
    assert (finding.state, finding.command) == ("wrong", "export DASK_CML__PLATFORM=local")
    monkeypatch.setenv("CDSW_ENGINE_ID", "kbmjhsx8uobd5ks9")
    finding = environment.platform()
    assert (finding.state, finding.command) == ("wrong", f"{sys._base_executable} -m dask cml doctor")
    assert sys.executable in finding.words


def test_doctor_counts_the_sessions_that_the_platform_lists(cml):
    sessions = [{"id": "aaaa", "status": "running"}, {"id": "bbbb", "status": "stopped"}]
    file = f"cml.workers_v1 is {ADDON}/cml/workers_v1.py (workbench 2.0.49-b279)."
    for listed, words in (sessions, "2 worker sessions, 1 live"), (sessions[:1], "1 worker session, 1 live"):
        cml.answer = listed.copy
        assert environment.platform() == Finding("ok", f"cml.workers_v1 lists {words}. {file}")


def test_an_addon_that_cannot_be_imported_is_named_with_the_release_of_the_workbench(
    laptop, monkeypatch, tmp_path
):
    module = "cml/workers_v1.py"
    addon = tmp_path / "cmladdon-2.0.49-b279" / "python"
    for name in ("cml/__init__.py", module):
        (addon / name).parent.mkdir(parents=True, exist_ok=True)
        (addon / name).write_text("")
    (addon / module).write_text("from typing import of_another_release")
    monkeypatch.delitem(sys.modules, "cml")
    monkeypatch.delitem(sys.modules, "cml.workers_v1")
    monkeypatch.syspath_prepend(addon)
    finding = environment.platform()
    assert (finding.state, finding.command) == ("wrong", None)
    path = f"{addon}/cml/__init__.py (workbench 2.0.49-b279)"
    assert f"cannot import the Workers API from {path}: ImportError(" in finding.words
    assert "of_another_release" in finding.words


ANSWERS = [
    (UNAUTHORIZED, "Unauthorized"),
    ({"message": "Internal Server Error"}, "Internal Server Error"),
    ({}, "list_workers() fails: CML answered with a dict instead of a session"),
    (["id", "status"], "with a list"),
    (None, "list_workers() fails: "),
    (RuntimeError("no CDSW_API_KEY in the environment"), "CDSW_API_KEY is not set: restart the kernel"),
    (OSError("connection\nreset"), "OSError: connection"),
    (ConnectionError("x" * 1000), "list_workers() fails"),
]


def test_a_failed_listing_shows_the_platforms_reason(cml):
    def give(answer):
        if isinstance(answer, Exception):
            raise answer
        return answer

    for answer, words in ANSWERS:
        cml.answer = functools.partial(give, answer)
        finding = environment.platform()
        assert finding.state == "wrong"
        assert words in finding.words
        assert len(finding.words) < 500


def test_an_invalid_setting_that_no_argument_sets_is_wrong(cml):
    for key in "cml.api.timeout", "cml.limits.cpu", "cml.prices.gpu", "cml.history.keep":
        with dask.config.set({key: "lots"}):
            finding = environment.configuration()
        assert finding.state == "wrong"
        assert f"{key}='lots'" in finding.words


def test_a_sidecar_of_a_mesh_is_a_warning_with_the_administrators_command(cml, sidecar):
    for status, state, command in (200, "warning", here.PERMIT_MESH), (503, "ok", None):
        sidecar[0] = status
        finding = environment.network()
        assert (finding.state, finding.command) == (state, command)
    sidecar[0] = 200
    with dask.config.set({"cml.platform": "local"}):
        assert environment.network().state == "ok"


@pytest.mark.slow
def test_a_silent_program_at_the_sidecars_port_delays_the_doctor_for_seconds_only(cml, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(here, "MESH_PORT", silent.getsockname()[1])
        assert environment.network() == Finding("ok", "No Istio sidecar runs in this session.")


def test_a_state_directory_is_missing_or_private_or_below_the_home_folder(
    home, cml, tmp_path_factory, monkeypatch
):
    folder = home / ".dask-cml"
    assert environment.state_directory().words == f"The first cluster will create {folder}."
    assert [*home.iterdir()] == []
    folder.mkdir(mode=0o700)
    assert environment.state_directory().state == "ok"
    assert [*folder.iterdir()] == []
    for mode, state in (0o755, "warning"), (0o770, "wrong"), (0o500, "wrong"):
        folder.chmod(mode)
        finding = environment.state_directory()
        assert finding.state == state
        assert f"{mode:04o}" in finding.words
        mend(finding)
        assert environment.state_directory().state == "ok"
    with dask.config.set({"cml.state-directory": str(tmp_path_factory.mktemp("elsewhere") / "state")}):
        assert "the only folder that all sessions share" in environment.state_directory().words
        with dask.config.set({"cml.platform": "local"}):
            assert environment.state_directory().state == "ok"
    monkeypatch.setattr(environment.tempfile, "TemporaryFile", Mock(side_effect=OSError("the disk is full")))
    full = environment.state_directory()
    assert (full.state, full.words) == ("wrong", f"Cannot write to {folder}: the disk is full.")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to others")
def test_the_command_moves_the_state_directory_of_another_user_aside(home, cml):
    (home / ".dask-cml").mkdir(mode=0o700)
    os.chown(home / ".dask-cml", 12345, -1)
    finding = environment.state_directory()
    assert finding.state == "wrong"
    assert "user with the id 12345" in finding.words
    mend(finding)
    assert environment.state_directory().state == "ok"


def test_the_doctor_warns_of_scratch_space_on_the_project_file_system_or_nearly_full(monkeypatch, tmp_path):
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        for free, state in (9, "warning"), (11, "ok"):
            usage = 100 * 10**9, (100 - free) * 10**9, free * 10**9
            monkeypatch.setattr(environment.shutil, "disk_usage", lambda path, usage=usage: usage)
            found = environment.scratch()
            assert (found.state, found.words) == (state, f"{tmp_path} has {free}.0 of 100.0 GB free.")
    monkeypatch.setattr(environment, "launches_sessions", lambda: True)
    folders = {"cml.state-directory": str(tmp_path), "temporary-directory": str(tmp_path / "new")}
    with dask.config.set(folders):
        found = environment.scratch()
    assert (found.state, found.command) == ("warning", "export TMPDIR=/tmp")
    assert f"{tmp_path / 'new'} is on the project file system" in found.words


@pytest.mark.slow
def test_a_distributed_below_the_requirement_is_wrong_and_a_second_dask_a_warning(install):
    install("distributed", "2022.1.0")
    finding = environment.versions()
    assert finding.state == "wrong"
    assert "distributed 2022.1.0 is installed" in finding.words
    assert any(word.startswith("distributed>=") for word in shlex.split(finding.command))
    folder = install("dask", "2020.1.0")
    finding = environment.image()
    assert finding.state == "warning"
    assert f"dask 2020.1.0 in {folder} takes precedence over {dask.__version__} in " in finding.words


def test_what_is_missing_and_not_needed_is_no_warning_and_says_who_needs_it(monkeypatch):
    monkeypatch.setattr(environment, "version", lambda name: None)
    assert environment.pyarrow(0) == Finding("ok", "Not installed. Only dask.dataframe needs it.")
    assert environment.sidebar() == Finding(
        "ok", "Only JupyterLab shows it, and JupyterLab is not installed."
    )


@pytest.mark.slow
def test_copies_of_the_images_packages_are_a_warning_in_sessions(cml, install, monkeypatch):
    assert environment.image().state == "ok"
    install("jupyter_client", "99.0")
    install("tornado", "99.0")
    finding = environment.image()
    assert finding.state == "warning"
    assert "jupyter-client 99.0" in finding.words
    assert "tornado 99.0" in finding.words
    monkeypatch.delenv("CDSW_ENGINE_ID")
    assert environment.image().state == "ok"


@pytest.mark.slow
def test_a_bokeh_that_the_extra_excludes_or_none_is_a_warning(install, monkeypatch):
    assert environment.dashboard().state == "ok"
    for bokeh in "99.0", "2.4.3":
        folder = install("bokeh", bokeh)
        finding = environment.dashboard()
        assert finding.state == "warning"
        assert f"bokeh {bokeh} is installed." in finding.words
        assert not Requirement(shlex.split(finding.command)[-1]).specifier.contains(bokeh)
        shutil.rmtree(folder / f"bokeh-{bokeh}.dist-info")
    monkeypatch.setattr(environment, "version", lambda name: None)
    finding = environment.dashboard()
    assert finding.state == "warning"
    assert "bokeh is not installed." in finding.words
    assert Requirement(shlex.split(finding.command)[-1]).name == "bokeh"


FAILING_IMPORTS = [
    (
        "raise ImportError('it needs NumPy 2.0')",
        "pyarrow 99.0 fails to import: ImportError: it needs NumPy 2.0.",
    ),
    (
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "-c', 'import pyarrow']' died with <Signals.SIGSEGV: 11>.",
    ),
    ("import sys; sys.stderr.write('x' * 100_000); sys.exit(1)", "pyarrow 99.0 fails to import: "),
]


@pytest.mark.slow
def test_doctor_shows_why_pyarrow_fails_to_import(install, monkeypatch):
    folder = install("pyarrow", "99.0")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    for code, words in FAILING_IMPORTS:
        (folder / "pyarrow.py").write_text(code)
        finding = environment.pyarrow(120)
        assert finding.state == "warning"
        assert words in finding.words
        assert len(finding.words) < 500
        # Any release works with the NumPy of newer Pythons.
        expected = "pyarrow<26" if sys.version_info < (3, 13) else None
        assert (finding.command and shlex.split(finding.command)[-1]) == expected
    (folder / "pyarrow.py").write_text("import time; time.sleep(3600)")
    assert environment.pyarrow(0).words == "pyarrow 99.0 fails to import: the import timed out."
    assert [child for child in psutil.Process().children() if "pyarrow" in child.cmdline()[-1]] == []


@pytest.mark.slow
@pytest.mark.parametrize("file", ["jupyter_server_config.d/dask_cml.json", "jupyter_server_config.json"])
def test_the_command_enables_a_disabled_sidebar(monkeypatch, tmp_path, file):
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")  # as outside of virtual environments
    assert environment.sidebar().state == "ok"
    (tmp_path / file).parent.mkdir(exist_ok=True)
    disabled = {"ServerApp": {"token": "mine", "jpserver_extensions": {"dask_cml.jupyter": False}}}
    (tmp_path / file).write_text(json.dumps(disabled))
    finding = environment.sidebar()
    assert finding.state == "warning"
    assert "does not enable dask_cml.jupyter." in finding.words
    mend(finding)
    assert environment.sidebar().state == "ok"
    assert json.loads((tmp_path / file).read_text())["ServerApp"]["token"] == "mine"


@pytest.mark.slow
def test_doctor_names_different_versions_and_silent_workers_of_a_cluster(platform, light, monkeypatch):
    with CMLCluster(n_workers=1, name="lab", platform="local", quiet=True) as cluster:
        cluster.wait_for_workers(1, timeout=120)
        own = get_versions()["packages"]
        here = {"packages": {**own, "cloudpickle": "1.0", "numpy": "1.0"}}
        with monkeypatch.context() as patch:
            patch.setattr("distributed.versions.get_versions", lambda: here)
            [finding] = clusters.versions(["lab"], 60)
        assert finding.state == "warning"
        differences = [
            f"{package} is 1.0 here, and {own[package]} in 2 processes of the cluster."
            for package in ("cloudpickle", "numpy")
        ]
        assert finding.words == f"{' '.join(differences)} Delete the cluster, and create it again."
        assert finding.command.endswith("cml delete lab")

        with Client(cluster) as client:
            [pid] = client.run(os.getpid).values()
        os.kill(pid, signal.SIGSTOP)
        try:
            [finding] = clusters.versions(["lab"], 5)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert finding.state == "warning"
        assert "The cluster did not report all versions within 5 s: TimeoutError()" in finding.words


def test_an_unknown_cluster_is_wrong_and_one_that_does_not_answer_a_warning(platform):
    maker, keys = Maker("elsewhere", 1, 1.0, "ended"), {"tls_ca_file": "/no/such/file"}
    for name, closed in {"gone": None, "over": "orphaned"}.items():
        scheduler = SchedulerState(address="tls://127.0.0.1:1", closed=closed)
        write_record(Record(name, maker=maker, scheduler=scheduler, security=keys))
        os.utime(sign_of(name), (0, 0))
    [unknown, silent, dead] = clusters.versions(["lab", "gone", "over"], 5)
    assert (unknown.name, unknown.state) == ("cluster lab", "wrong")
    assert unknown.command.endswith("cml list")
    assert (silent.name, silent.state) == ("cluster gone", "warning")
    assert silent.words == "The cluster is not answering: its scheduler does not respond."
    assert silent.command.endswith("cml info gone")
    assert dead.words == "The cluster is stale: its scheduler does not respond."
    assert dead.command.endswith("cml prune")
    assert clusters.versions([], 5) == [silent, dead]


def test_the_check_does_not_wait_longer_for_a_silent_scheduler_and_sends_none_without_keys_anything(platform):
    keys, files = tls.as_files(True, state_directory() / "busy")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        location, options = f"127.0.0.1:{silent.getsockname()[1]}", {"platform": "local"}
        scheduler = SchedulerState(address=f"tcp://{location}")
        write_record(Record("open", options=options, scheduler=scheduler))
        clusters.versions(["open"], 0.5)
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):
            silent.accept()
        scheduler = SchedulerState(address=f"tls://{location}")
        write_record(Record("busy", options=options, scheduler=scheduler, security=tls.paths(keys)))
        tls.write(files)
        [finding] = clusters.versions(["busy"], 0.5)
    assert finding.state == "warning"
    assert "The cluster did not report all versions within 0 s: TimeoutError()" in finding.words
