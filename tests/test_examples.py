"""The examples run to their end on the local platform and leave no session, which `platform` checks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = [pytest.param(path, id=path.name) for path in sorted(EXAMPLES.glob("*.ipynb"))]
SCRIPTS = [pytest.param(path, id=path.name) for path in sorted(EXAMPLES.glob("*.py"))]


@pytest.fixture
def laptop(platform, monkeypatch, tmp_path):
    """A folder on a machine that is no CML session; there goes what Jupyter writes to home folders."""
    monkeypatch.delenv("CDSW_ENGINE_ID", raising=False)
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    # Notebooks run `python` in a shell, which is this one also where its environment was not activated.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    yield tmp_path
    assert platform.sessions()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_runs(laptop, path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(laptop)}}).execute()


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS)
def test_script_runs(laptop, path):
    subprocess.run([sys.executable, str(path)], cwd=laptop, check=True, timeout=240)


@pytest.fixture
def job():
    """The command of a Job's script. CML runs scripts in IPython."""
    pytest.importorskip("IPython")
    return [sys.executable, "-m", "IPython", "--colors=nocolor", str(EXAMPLES / "job.py")]


def is_over(platform):
    """Whether all sessions have ended, or are being stopped."""
    return all(session["finished_at"] or session["stop_requested"] for session in platform.sessions())


@pytest.mark.slow
def test_a_job_that_fails_exits_with_another_status_and_leaves_no_session(platform, laptop, job):
    subprocess.run(job, cwd=laptop, check=True, timeout=240)
    result = laptop / "prices.json"
    assert len(json.loads(result.read_text())) == 100
    assert is_over(platform)
    result.unlink()
    result.mkdir()  # so the result cannot be written
    done = subprocess.run(job, cwd=laptop, timeout=240, capture_output=True, text=True)
    assert done.returncode == 1
    assert "IsADirectoryError" in done.stdout + done.stderr
    assert is_over(platform)


@pytest.mark.slow
def test_a_job_that_is_stopped_exits_with_another_status_and_leaves_no_session(platform, laptop, job, until):
    platform.configure(quota={"sessions": 1}, over_quota="wait")
    with subprocess.Popen(job, cwd=laptop, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: [session["status"] for session in platform.sessions()].count("scheduling") == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) not in (0, -signal.SIGTERM)
    assert is_over(platform)
