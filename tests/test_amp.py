"""The project as an AMP: its description is what CML reads, and its scripts do what that says."""

import datetime
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml
from conftest import PATIENCE
from ports import listens

from dask_cml.records import store

ROOT = Path(__file__).parents[1]
METADATA = ROOT / ".project-metadata.yaml"
SCRIPTS = ROOT / "cml"

pytestmark = pytest.mark.skipif(
    not METADATA.exists(), reason="needs the repository, not a source distribution"
)

PYTHON = f"py{sys.version_info.major}{sys.version_info.minor}"

# The fields of Cloudera's AMP project specification 1.0 that are used here: a type, or the length of a text.
PROJECT = {"name": 200, "description": 2048, "author": 64, "specification_version": 16}
PROJECT |= {
    "prototype_version": 16,
    "date": 10,
    "environment_variables": dict,
    "runtimes": list,
    "tasks": list,
}
TASK = {"type": 64, "name": 200, "entity_label": 200, "script": 4096, "short_summary": 200}
TASK |= {"long_summary": 2048, "kernel": 64, "cpu": float, "memory": float}
APPLICATION = {**TASK, "subdomain": 200, "bypass_authentication": bool}


@pytest.fixture(scope="module")
def amp():
    return yaml.safe_load(METADATA.read_text())


def tasks(amp, kind):
    return [task for task in amp["tasks"] if task["type"] == kind]


def has_type(value, expected):
    """Whether a value has a type of the specification. A whole number is a number, too, but no bool is."""
    if isinstance(expected, int):
        return isinstance(value, str) and 0 < len(value) <= expected
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    return isinstance(value, expected)


def test_each_field_is_one_of_the_specification_and_has_its_type(amp):
    assert PROJECT.keys() >= amp.keys() >= {"name", "description", "author", "prototype_version"}
    assert [key for key, value in amp.items() if not has_type(value, PROJECT[key])] == []
    assert amp["specification_version"] == "1.0"
    assert datetime.date.fromisoformat(amp["date"])
    assert amp["runtimes"] == [{"editor": "JupyterLab", "kernel": "Python 3.11", "edition": "Standard"}]
    assert [task["type"] for task in amp["tasks"]] == ["run_session", "run_session", "start_application"]
    for task in amp["tasks"]:
        fields = APPLICATION if task["type"] == "start_application" else TASK
        wrong = [key for key, value in task.items() if not (key in fields and has_type(value, fields[key]))]
        assert wrong == [], task["name"]
        assert {"name", "script", "kernel", "cpu", "memory"} <= task.keys()
        assert task["kernel"] == "python3"
    assert {task["script"] for task in amp["tasks"]} == {f"cml/{path.name}" for path in SCRIPTS.glob("*.py")}
    [application] = tasks(amp, "start_application")
    assert application["bypass_authentication"] is False  # it is for users that are logged in
    assert re.fullmatch(r"[a-z][a-z0-9-]*[a-z0-9]", application["subdomain"])


def test_the_variables_have_a_default_and_a_description_and_the_documentation_names_them(amp):
    page = (ROOT / "docs/jupyterlab.md").read_text()
    for name, variable in amp["environment_variables"].items():
        assert variable.keys() == {"default", "description"}
        assert int(variable["default"]) > 0
        assert f"`{name}`" in page


def write_packages(folder, packages):
    """Have a folder look as if these packages were installed there."""
    for name, version in packages.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").touch()
        (info / "INSTALLER").write_text("pip\n")


_PIP = """
import json, os, sys
arguments = sys.argv[1:]
with open(arguments[arguments.index("-c") + 1]) as file:
    constraints = file.read().splitlines()
with open(os.environ["CALL"], "w") as file:
    json.dump([arguments, constraints], file)
sys.exit(int(os.environ.get("STATUS", 0)))
"""


@pytest.fixture
def image(tmp_path, monkeypatch):
    """A folder with the packages of a runtime image, whose pip only notes how it is called."""
    folder = tmp_path / "image"
    (folder / "pip").mkdir(parents=True)
    (folder / "pip" / "__init__.py").touch()
    (folder / "pip" / "__main__.py").write_text(_PIP)
    home = tmp_path / "home"
    monkeypatch.setenv("PYTHONUSERBASE", str(home))
    monkeypatch.setenv("CALL", str(tmp_path / "call"))
    program, base = "import site; print(site.getusersitepackages())", {"PYTHONUSERBASE": str(home)}
    site = subprocess.check_output([sys.executable, "-c", program], env={**os.environ, **base}, text=True)
    user_site = Path(site.strip())
    write_packages(user_site, {"tornado": "7.0", "bokeh": "3.9"})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(user_site), str(folder)]))
    (tmp_path / "project" / ".ci" / "images").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    return folder


def install(tmp_path):
    """Run the script without the packages of this environment; return its result and pip's arguments."""
    command = [sys.executable, "-S", str(SCRIPTS / "install_dependencies.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    return done, *json.loads((tmp_path / "call").read_text())


def test_it_installs_with_the_constraints_of_the_running_image_and_the_exit_status_of_pip(
    image, tmp_path, monkeypatch
):
    write_packages(image, {"tornado": "6.5", "jupyter_client": "7.4"})
    Path(f".ci/images/{PYTHON}-workbench.txt").write_text("# about\ntornado==6.5\njupyter-client==7.4\n")
    monkeypatch.setenv("STATUS", "3")
    done, arguments, _ = install(tmp_path)
    # The image has no JupyterLab.
    assert arguments == ["install", "-c", f".ci/images/{PYTHON}-workbench.txt", "-e", ".[dashboard]"]
    assert done.stdout == f"The constraints are those of .ci/images/{PYTHON}-workbench.txt.\n"
    assert done.returncode == 3


def test_it_keeps_the_packages_of_an_image_that_no_file_of_constraints_describes(image, tmp_path):
    write_packages(image, {"jupyterlab": "4.5", "tornado": "6.5", "dask_cml": "0.0.1"})
    (image / "half-1.dist-info").mkdir()  # pip was interrupted
    file = Path(f".ci/images/{PYTHON}-jupyterlab.txt")
    for constraints in None, "tornado==6.4\n":
        if constraints:
            file.write_text(constraints)
        done, arguments, kept = install(tmp_path)
        assert kept == ["jupyterlab==4.5", "tornado==6.5"]  # not those of the home folder
        assert arguments[-1] == ".[dashboard,jupyter]"
        assert str(file) in done.stdout
        assert ("tornado 6.5 instead of 6.4" in done.stdout) is bool(constraints)


@pytest.fixture
def quota(platform):
    """The quota that CML has on premises by default."""
    variables = {**platform.settings().variables, "DASK_CML__PLATFORM": "local"}
    platform.configure(quota={"cpu": 2, "memory": 8}, variables=variables, stop_grace=60.0)
    return platform


def launch(platform, task, **what):
    return platform.launch_workers(1, cpu=task["cpu"], memory=task["memory"], **what)[0]["id"]


def status(platform, session_id):
    return next(session["status"] for session in platform.sessions() if session["id"] == session_id)


@pytest.mark.slow
def test_the_check_computes_on_a_cluster_within_the_default_quota(quota, amp, until, monkeypatch):
    monkeypatch.chdir(ROOT)
    task = tasks(amp, "run_session")[1]
    session_id = launch(quota, task, script=task["script"])
    until(lambda: status(quota, session_id) not in ("scheduling", "starting", "running"), 2 * PATIENCE)
    log = quota.log(session_id)
    assert status(quota, session_id) == "succeeded", log
    assert "dask-cml works: a cluster of one worker started, computed and shut down in" in log
    assert log.index("ok       platform") < log.index("dask-cml works")
    assert all(
        session["status"] != "running" for session in quota.sessions() if not session["stop_requested"]
    )


def ask(port, path, body=None, method=None):
    """Ask the web UI, as a program with its token does."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": "Bearer token"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_the_application_serves_the_page_and_shuts_down_its_clusters_when_it_stops(
    quota, amp, light, until, monkeypatch
):
    monkeypatch.chdir(ROOT)
    [task] = tasks(amp, "start_application")
    # IPython, in which CML runs scripts, runs what begins with its syntax.
    code = f"!true\n{(SCRIPTS / 'app.py').read_text()}"
    env = {"DASK_CML_SERVE_TOKEN": "token", "DASK_CML__SCHEDULER_ARGS": "['--no-dashboard']"}
    session_id = launch(quota, task, env=env, code=code)
    [described] = [session for session in quota.sessions() if session["id"] == session_id]
    port = int(described["app_url"].rstrip("/").rpartition(":")[2])
    until(lambda: listens(port))
    size = {"cpu": 1, "memory": 2, "scheduler_cpu": 0.5, "scheduler_memory": 2}
    ask(port, "/api/clusters", {"name": "night", "n_workers": 1, **size})
    until(lambda: ask(port, "/api/clusters/night")["n_arrived"] == 1)
    quota.stop_workers(session_id)
    until(lambda: status(quota, session_id) == "stopped")
    assert "The web UI is closed, and the clusters created there are stopped." in quota.log(session_id)
    assert store.records() == []
