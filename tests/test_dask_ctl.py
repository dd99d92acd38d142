"""dask-ctl finds, steers and ends clusters. Collected where dask-ctl is installed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from clusters import write_record

from dask_cml.records.record import Maker, Record, SchedulerState
from dask_cml.sessions import tls

SPEC = """
version: 1
module: dask_cml
class: CMLCluster
kwargs:
  name: mine
  n-workers: 1
"""


@pytest.fixture(autouse=True)
def locally(platform, monkeypatch):
    monkeypatch.setenv("DASK_CML__PLATFORM", "local")


@pytest.fixture
def spec(tmp_path):
    file = tmp_path / "spec.yaml"
    file.write_text(SPEC)
    return str(file)


def run(*command):
    """Run a program of its own: dask-ctl has an event loop and signal handlers from its import on."""
    result = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def ctl(*arguments):
    return run("-m", "dask", "cluster", *arguments)


def live(platform):
    running = [session for session in platform.sessions() if session["status"] == "running"]
    return [session for session in running if not session["stop_requested"]]


def test_stale_records_do_not_slow_discovery(platform, spec, tmp_path):
    ctl("create", "-f", spec)
    keys, files = tls.as_files(True, tmp_path)
    tls.write(files)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        refuses = listener.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        for i in range(100):
            port = refuses if i % 2 else silent.getsockname()[1]
            maker = Maker("elsewhere", 1, 1.0, "gone")
            scheduler = SchedulerState(address=f"tls://127.0.0.1:{port}")
            write_record(Record(f"stale-{i}", maker=maker, scheduler=scheduler, security=tls.paths(keys)))
        listing = ctl("list")
    assert "mine" in listing
    assert "stale" not in listing
    assert "timed out" not in listing  # dask-ctl gives a discovery 5 s
    ctl("delete", "mine")
    assert not live(platform)
