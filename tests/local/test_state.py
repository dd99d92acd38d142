"""What earlier versions of the local platform, or a full disk, left in the state directory."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from .conftest import FOREVER

#: A session of the first version. Whatever a version adds must have a default.
PLAN = {
    "cpu": 1.0,
    "memory": 1.0,
    "nvidia_gpu": 0,
    "kernel": "python3",
    "script": "",
    "code": FOREVER,
    "env": {},
    "name": "old",
    "id": "0123456789abcdef",
    "launcher": "ofanothersession",
    "created_at": time.time() - 3600,
    "ip": "127.0.0.1",
    "ports": [20000, 20001],
    "app_url": "http://127.0.0.1:20000/",
    "python": "python",
    "directory": "/",
    "start_delay": 0.0,
    "stop_grace": 2.0,
    "lifetime": None,
    "fate": None,
    "hide": 0.0,
    "hide_ip": 0.0,
}


def write_session(status, plan=PLAN):
    folder = Path(os.environ["DASK_CML_LOCAL_DIRECTORY"], "sessions", "0123456789abcdef")
    folder.mkdir(mode=0o700)
    (folder / "lock").touch(mode=0o600)
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "status.json").write_text(status)


@pytest.mark.parametrize("status", ["running", "stopped"])
def test_sessions_of_an_earlier_version_are_readable(platform, launch, reaches, monkeypatch, status):
    write_session(json.dumps({"status": status, "running_at": time.time() - 3600}))
    monkeypatch.setenv("CDSW_ENGINE_ID", "ofanothersession")
    ended = "failed" if status == "running" else "stopped"  # its supervisor runs no longer
    assert [each["status"] for each in platform.list_workers()] == [ended]
    platform.configure(quota={"sessions": 1})
    [session] = launch(code="pass")
    reaches(session, "succeeded")
    assert len(platform.sessions()) == 2
    platform.stop_workers(PLAN["id"])
    assert len(platform.prune()) == 2


def test_settings_and_faults_of_other_versions_are_readable(platform):
    folder = Path(os.environ["DASK_CML_LOCAL_DIRECTORY"])
    (folder / "settings.json").write_text('{"latency": 0.0, "of_a_later_version": 1}')
    fault = {"kind": "answer", "match": None, "skip": 0, "times": 1, "seconds": None, "status": 500}
    (folder / "faults.json").write_text(json.dumps([{**fault, "function": None, "injected_at": 0.0}]))
    assert platform.settings().latency == 0.0
    assert platform.list_workers() == {"message": "Internal Server Error"}


@pytest.mark.parametrize("status", ["", "{", "[]", '{"supervisor": 1}'])
def test_unreadable_session_is_skipped_with_one_line(platform, launch, caplog, status):
    write_session(status)
    [session] = launch(code="pass")
    assert [each["id"] for each in platform.sessions()] == [session["id"]]
    platform.sessions()
    assert [line.getMessage().split(":")[0] for line in caplog.records] == [
        "session 0123456789abcdef skipped"
    ]
