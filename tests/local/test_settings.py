from __future__ import annotations

import fcntl
import os
import pwd
import tempfile

import pytest

from dask_cml import local
from dask_cml.local import state

from .conftest import FOREVER


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
