"""Folders that others could have written to: nothing is read from them, and nobody connected with."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess

import pytest
from clusters import WANTED, new_record, write_record

from dask_cml import private_files
from dask_cml.errors import CMLError
from dask_cml.private_files import NotPrivate, append, make_folder, read_file, write_file
from dask_cml.records import operations, store
from dask_cml.records.record import SchedulerState
from dask_cml.sessions.entry import Launch

STRANGER = 12345


@pytest.fixture(params=["of another user", "writable by the group", "writable by others"])
def open_up(request):
    """Give a path to another user, or let others write to it."""
    if request.param == "of another user":
        if os.geteuid() != 0:
            pytest.skip("only root can give files to others")
        return lambda path: os.chown(path, STRANGER, -1)
    more = stat.S_IWGRP if request.param == "writable by the group" else stat.S_IWOTH
    return lambda path: path.chmod(path.stat().st_mode | more)


@pytest.fixture
def umask():
    previous = os.umask(0)
    yield
    os.umask(previous)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


# -- folders


def test_a_new_folder_is_private_whatever_the_umask(tmp_path, umask):
    make_folder(tmp_path / "state")
    assert mode(tmp_path / "state") == 0o700
    make_folder(tmp_path / "state")


def test_a_folder_that_others_can_write_to_is_refused_with_the_command_that_fixes_it(tmp_path, open_up):
    folder = tmp_path / "it's mine"
    make_folder(folder)
    open_up(folder)
    with pytest.raises(NotPrivate) as refused:
        make_folder(folder)
    assert str(refused.value).startswith(f"{folder} ")
    assert isinstance(refused.value, CMLError)
    [command] = str(refused.value).split("`")[1:-1]
    subprocess.run(command, shell=True, check=True)
    make_folder(folder)
    assert mode(folder) == 0o700


# -- files


def test_only_regular_files_are_read(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "other").write_text("elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in "folder", "pipe", "link", "device", "socket":
            with pytest.raises(ValueError, match="it is not a regular file"):
                read_file(tmp_path / name)


def test_what_is_appended_is_for_its_owner_and_follows_no_link(tmp_path):
    log, link = tmp_path / "log", tmp_path / "link"
    link.symlink_to(log)
    append(log, b"1\n")
    append(log, b"2\n")
    with pytest.raises(ValueError, match="not a regular file"):
        append(link, b"3\n")
    assert log.read_bytes() == b"1\n2\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_new_file_belongs_to_its_writer_although_the_file_system_repeats_the_request(tmp_path, monkeypatch):
    """As NFS does if the answer was lost."""
    link = os.link

    def repeat(*arguments, **options):
        link(*arguments, **options)
        link(*arguments, **options)

    monkeypatch.setattr(os, "link", repeat)
    assert write_file(tmp_path / "file", b"mine", new=True)
    assert not write_file(tmp_path / "file", b"another", new=True)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"mine")]


# -- records


@pytest.fixture
async def planted():
    """A record with the address of a program, and the connections that this program gets."""
    connections = []
    async with await asyncio.start_server(lambda *_: connections.append(1), "127.0.0.1", 0) as trap:
        address = f"tcp://127.0.0.1:{trap.sockets[0].getsockname()[1]}"
        yield new_record("planted", scheduler=SchedulerState(address=address)), connections


async def test_in_a_folder_of_others_records_are_skipped_with_one_warning_and_no_connection(
    platform, caplog, open_up, planted
):
    record, connections = planted
    directory = write_record(record).parent
    open_up(directory)
    with pytest.raises(NotPrivate):
        store.claim(new_record("a"), WANTED)
    assert os.listdir(directory) == ["planted"]
    for _ in range(2):
        assert await operations.describe(store.records()) == []
    with pytest.raises(store.RecordUnreadable, match=r"so others can write to it|belongs to the user"):
        store.read("planted")
    with pytest.raises(store.RecordUnreadable):
        store.write_sessions(record, [Launch("session-1", "planted-0", None, 1)])
    assert connections == []
    [warning] = [
        log_record.getMessage() for log_record in caplog.records if log_record.name == private_files.__name__
    ]
    assert warning.startswith(f"{directory} ignored: it ")
