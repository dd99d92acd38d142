"""What earlier versions of the local platform, or a full disk, left in the state directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def write_session(status, plan):
    folder = Path(os.environ["DASK_CML_LOCAL_DIRECTORY"], "sessions", "0123456789abcdef")
    folder.mkdir(mode=0o700)
    (folder / "lock").touch(mode=0o600)
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "status.json").write_text(status)


def test_settings_of_other_versions_are_readable(platform):
    folder = Path(os.environ["DASK_CML_LOCAL_DIRECTORY"])
    (folder / "settings.json").write_text('{"latency": 0.0, "of_a_later_version": 1}')
    assert platform.settings().latency == 0.0


def test_sessions_of_another_release_are_not_listed(platform, caplog):
    write_session('{"status": "running"}', {"created_at": 1790000000.0})
    assert platform.sessions() == []
    assert caplog.records == []


@pytest.mark.parametrize("status", ["", "{", "[]", '{"supervisor": 1}'])
def test_unreadable_session_is_skipped_with_one_line(platform, launch, caplog, status):
    write_session(status, {"version": 3})
    [session] = launch(code="pass")
    assert [each["id"] for each in platform.sessions()] == [session["id"]]
    platform.sessions()
    assert [line.getMessage().split(":")[0] for line in caplog.records] == [
        "session 0123456789abcdef skipped"
    ]
