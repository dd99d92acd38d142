"""What earlier versions of the local platform, or a full disk, left in the state directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def write_session(session):
    folder = Path(os.environ["DASK_CML_LOCAL_DIRECTORY"], "sessions", "0123456789abcdef")
    folder.mkdir(mode=0o700)
    (folder / "lock").touch(mode=0o600)
    (folder / "session.json").write_text(session)


def test_settings_of_other_versions_are_readable(platform):
    folder = Path(os.environ["DASK_CML_LOCAL_DIRECTORY"])
    (folder / "settings.json").write_text('{"latency": 0.0, "of_a_later_version": 1}')
    assert platform.settings().latency == 0.0


def test_sessions_of_another_release_are_not_listed(platform, caplog):
    write_session('{"status": "running", "created_at": 1790000000.0, "version": 3}')
    assert platform.sessions() == []
    assert caplog.records == []


@pytest.mark.parametrize("session", ["", "{", "[]", '{"version": 4}'])
def test_unreadable_session_is_skipped_with_one_line(platform, launch, caplog, session):
    write_session(session)
    [session] = launch(code="pass")
    assert [session["id"] for session in platform.sessions()] == [session["id"]]
    platform.sessions()
    assert [line.getMessage().split(":")[0] for line in caplog.records] == [
        "session 0123456789abcdef ignored"
    ]
