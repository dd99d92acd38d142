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
        (["-c", f"import os; os.rmdir(os.getcwd()); {TELL}"], "None"),
    ],
)
def test_the_folder_of_a_program_is_where_it_finds_its_modules(tmp_path, words, expected):
    here = tmp_path / "here"
    here.mkdir()
    for name in "script.py", "program":
        (tmp_path / name).write_text(TELL)
    done = subprocess.run(
        [sys.executable, *(word.format(folder=tmp_path) for word in words)],
        cwd=here,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), str(tmp_path)])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected.format(folder=tmp_path, here=here)


@pytest.mark.slow
@pytest.mark.usefixtures("light")
async def test_sessions_find_the_modules_of_the_program(platform, folder):
    beside = importlib.import_module("beside")
    groups = {"own": {"n_workers": 1, "worker_class": "beside.Mine"}}
    async with (
        make(n_workers=1, worker_groups=groups) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(2)
        assert {*(await client.run(beside.add_one, 1)).values()} == {2}
        kinds = await client.run(lambda dask_worker: type(dask_worker).__name__)
        assert {*kinds.values()} == {"Worker", "Mine"}


def test_a_module_of_the_program_comes_before_others_unless_the_user_keeps_it_off(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", ["elsewhere", *sys.path])
    kept_off = Options.read(env={PROGRAM_FOLDER: ""}).inheriting().env[PROGRAM_FOLDER]
    monkeypatch.setenv(PROGRAM_FOLDER, kept_off)
    find_modules()
    assert sys.path[0] == "elsewhere"
    monkeypatch.setenv(PROGRAM_FOLDER, Options.read().inheriting().env[PROGRAM_FOLDER])
    find_modules()
    find_modules()
    assert sys.path[:2] == [str(folder), "elsewhere"]
