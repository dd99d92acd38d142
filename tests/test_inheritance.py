"""What sessions take over from the program that creates their cluster: the folder with its modules."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
from clusters import make
from distributed import Client

from dask_cml.inheritance import find_modules
from dask_cml.layout import PROGRAM_FOLDER
from dask_cml.options import Options

MODULE = """
from distributed import Worker

class Mine(Worker):
    pass

def add_one(x):
    return x + 1
"""
TELL = "from dask_cml import inheritance; print(inheritance.program_folder())"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the program, with a module."""
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "beside.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("dask_cml.options.program_folder", lambda: str(folder))
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["{folder}/script.py"], "{folder}"),
        (["{folder}/program"], "None"),  # as pip installs programs
        (["-m", "script"], "{here}"),
        (["-c", TELL], "{here}"),
    ],
)
def test_the_folder_of_a_program_is_where_it_finds_its_modules(tmp_path, words, expected):
    for name in "script.py", "program":
        (tmp_path / name).write_text(TELL)
    done = subprocess.run(
        [sys.executable, *(word.format(folder=tmp_path) for word in words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), str(tmp_path)])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected.format(folder=tmp_path, here=os.getcwd())


def test_a_removed_folder_has_no_modules(tmp_path):
    folder = tmp_path / "removed"
    folder.mkdir()
    code = f"import os; os.rmdir(os.getcwd()); {TELL}"
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("worker_class", [None, "beside.Mine"])
async def test_sessions_find_the_modules_of_the_program(platform, folder, worker_class):
    beside = importlib.import_module("beside")
    async with (
        make(n_workers=1, worker_class=worker_class) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        assert await client.submit(beside.add_one, 1) == 2
        [kind] = (await client.run(lambda dask_worker: type(dask_worker).__name__)).values()
        assert kind == ("Worker" if worker_class is None else "Mine")


def test_a_module_of_the_program_comes_before_others_of_its_name(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", ["elsewhere", *sys.path])
    monkeypatch.setenv(PROGRAM_FOLDER, str(folder))
    find_modules()
    find_modules()
    assert sys.path[:2] == [str(folder), "elsewhere"]


def test_a_user_can_keep_the_folder_off_the_path(folder, monkeypatch):
    assert Options.read().inheriting().env[PROGRAM_FOLDER] == str(folder)
    options = Options.read(env={PROGRAM_FOLDER: ""}).inheriting()
    monkeypatch.setenv(PROGRAM_FOLDER, options.env[PROGRAM_FOLDER])
    before = [*sys.path]
    find_modules()
    assert sys.path == before
