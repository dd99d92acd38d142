"""``dask cml doctor``: its findings in good and broken environments, and the effect of its commands."""

from __future__ import annotations

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
from dask_cml.records.record import Maker, Record, SchedulerState
from dask_cml.sessions import mesh, tls

#: The folder of packages that a workbench adds to its images.
ADDON = "/runtime-addons/cmladdon-2.0.49-b279/lib"
UNAUTHORIZED = {"message": "Unauthorized"}
CHECKS = [
    "platform", "network", "configuration", "state directory", "scratch", "versions", "image", "dashboard",
    "pyarrow", "sidebar", "time-outs", "clusters",
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


def command(*arguments):
    return [sys.executable, "-m", "dask", "cml", "doctor", *map(str, arguments)]


def mend(finding, **more):
    assert finding.command
    subprocess.run(finding.command, shell=True, check=True, timeout=240, env={**os.environ, **more})


# -- the command


@pytest.mark.slow
def test_doctor_finds_nothing_wrong_in_a_good_environment_with_a_running_cluster(platform, no_nannies):
    variables = {**os.environ, "DASK_CML__PLATFORM": "local"}
    with CMLCluster(n_workers=1, name="lab", platform="local", quiet=True) as cluster:
        cluster.wait_for_workers(1, timeout=120)
        result = subprocess.run(command("--json"), capture_output=True, text=True, timeout=300, env=variables)
    assert result.returncode == 0, result.stdout + result.stderr
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert [*findings] == [*CHECKS[:-1], "cluster lab"]
    for name in [*CHECKS[: CHECKS.index("versions") + 1], "dashboard", "pyarrow"]:
        assert findings[name]["state"] == "ok"
        assert findings[name]["command"] is None
    assert findings["cluster lab"]["state"] == "ok"
    words = "The scheduler and all workers (1) run this process's versions."
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
        **os.environ,
        "CDSW_ENGINE_ID": "kbmjhsx8uobd5ks9",
        "DASK_CML__PLATFORM": "auto",
        "DASK_CML__STATE_DIRECTORY": str(state),
        "DASK_CML__CPU": "0",
        "PYTHONPATH": f"{tmp_path}:{install('dask', '2020.1.0')}",
    }
    variables.pop("CDSW_API_KEY", None)
    result = subprocess.run(command(), capture_output=True, text=True, timeout=300, env=variables)
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
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), "DASK_CML__PLATFORM": "auto"}
    result = subprocess.run(
        command("--timeout", 2, "--json"), capture_output=True, text=True, timeout=240, env=variables
    )
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


# -- the session


def test_a_python_without_the_platform_is_wrong_with_the_next_command(laptop, monkeypatch):
    finding = environment.platform()
    assert (finding.state, finding.command) == ("wrong", "export DASK_CML__PLATFORM=local")
    monkeypatch.setenv("CDSW_ENGINE_ID", "kbmjhsx8uobd5ks9")
    finding = environment.platform()
    assert (finding.state, finding.command) == ("wrong", f"{sys._base_executable} -m dask cml doctor")
    assert sys.executable in finding.words


def test_doctor_counts_the_sessions_that_the_platform_lists(cml):
    cml.answer = lambda: [{"id": "aaaa", "status": "running"}, {"id": "bbbb", "status": "stopped"}]
    words = "cml.workers_v1 lists 2 worker sessions; 1 of them are live."
    file = f"cml.workers_v1 is {ADDON}/cml/workers_v1.py (workbench 2.0.49-b279)."
    assert environment.platform() == Finding("ok", f"{words} {file}")


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
    for status, state, command in (200, "warning", mesh.PERMIT), (503, "ok", None):
        sidecar[0] = status
        finding = environment.network()
        assert (finding.state, finding.command) == (state, command)
    sidecar[0] = 200
    with dask.config.set({"cml.platform": "local"}):
        assert environment.network().state == "ok"


@pytest.mark.slow
def test_a_silent_program_at_the_sidecars_port_delays_the_doctor_for_seconds_only(cml, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(mesh, "HEALTH_PORT", silent.getsockname()[1])
        assert environment.network() == Finding("ok", "No Istio sidecar runs in this session.")


# -- the state directory


def test_a_state_directory_is_missing_or_private_and_stays_empty(home, cml):
    assert environment.state_directory().words == f"The first cluster will create {home / '.dask-cml'}."
    assert [*home.iterdir()] == []
    (home / ".dask-cml").mkdir(mode=0o700)
    assert environment.state_directory().state == "ok"
    assert [*(home / ".dask-cml").iterdir()] == []


def test_the_command_fixes_the_mode_of_the_state_directory(home, cml):
    (home / ".dask-cml").mkdir()
    for mode, state in (0o755, "warning"), (0o770, "wrong"), (0o500, "wrong"):
        (home / ".dask-cml").chmod(mode)
        finding = environment.state_directory()
        assert finding.state == state
        assert f"{mode:04o}" in finding.words
        mend(finding)
        assert environment.state_directory().state == "ok"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to others")
def test_the_command_moves_the_state_directory_of_another_user_aside(home, cml):
    (home / ".dask-cml").mkdir(mode=0o700)
    os.chown(home / ".dask-cml", 12345, -1)
    finding = environment.state_directory()
    assert finding.state == "wrong"
    assert "user with the id 12345" in finding.words
    mend(finding)
    assert environment.state_directory().state == "ok"


def test_a_state_directory_outside_the_home_folder_is_wrong_on_cml_only(home, cml, tmp_path_factory):
    with dask.config.set({"cml.state-directory": str(tmp_path_factory.mktemp("elsewhere") / "state")}):
        assert "the only folder that all sessions share" in environment.state_directory().words
        with dask.config.set({"cml.platform": "local"}):
            assert environment.state_directory().state == "ok"


# -- packages


@pytest.mark.slow
def test_a_distributed_below_the_requirement_is_wrong(install):
    install("distributed", "2022.1.0")
    finding = environment.versions()
    assert finding.state == "wrong"
    assert "distributed 2022.1.0 is installed" in finding.words
    assert any(word.startswith("distributed>=") for word in shlex.split(finding.command))


def test_a_second_dask_is_a_warning(install):
    folder = install("dask", "2020.1.0")
    finding = environment.image()
    assert finding.state == "warning"
    assert f"dask 2020.1.0 in {folder} takes precedence over {dask.__version__} in " in finding.words


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


# -- JupyterLab


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


def test_a_workbench_needs_no_sidebar(cml, monkeypatch):
    monkeypatch.setattr(environment, "version", lambda name: None)
    assert environment.sidebar().state == "ok"
    assert environment.time_outs().state == "ok"


def test_doctor_shows_the_limits_of_the_session_and_of_jupyterlab_on_cml_only(cml, monkeypatch):
    assert "by default 3600" in environment.time_outs().words
    for name in ("CDSW_MASTER_ID", "CDSW_ENGINE_TYPE", "SESSION_MAXIMUM_MINUTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("IDLE_MAXIMUM_MINUTES", "90")
    monkeypatch.setenv("JUPYTER_KERNEL_TIMEOUT_SECONDS", "7200")
    ends = (
        "CML ends session kbmjhsx8uobd5ks9 after 90 min without use, in some editors even while it computes."
    )
    for jupyterlab in "4", None:
        monkeypatch.setattr(environment, "version", lambda name, version=jupyterlab: version)
        finding = environment.time_outs()
        assert finding.state == "warning"
        assert ends in finding.words
        for words in "JUPYTER_SERVER_TIMEOUT_SECONDS", "(7200)":
            assert (words in finding.words) is (jupyterlab is not None)
    with dask.config.set({"cml.platform": "local"}):
        assert environment.time_outs().state == "ok"


# -- clusters


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


def test_the_check_does_not_wait_longer_for_a_silent_scheduler(platform):
    keys, files = tls.as_files(True, state_directory() / "busy")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        scheduler = SchedulerState(address=f"tls://127.0.0.1:{silent.getsockname()[1]}")
        options = {"platform": "local"}
        write_record(Record("busy", options=options, scheduler=scheduler, security=tls.paths(keys)))
        tls.write(files)
        [finding] = clusters.versions(["busy"], 0.5)
    assert finding.state == "warning"
    assert "The cluster did not report all versions within 0 s: TimeoutError()" in finding.words


def test_nothing_is_sent_to_the_address_of_a_cluster_without_keys(platform):
    with socket.create_server(("127.0.0.1", 0)) as other:
        scheduler = SchedulerState(address=f"tcp://127.0.0.1:{other.getsockname()[1]}")
        write_record(Record("open", options={"platform": "local"}, scheduler=scheduler))
        clusters.versions(["open"], 0.5)
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()
