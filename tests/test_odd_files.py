"""Odd files in the folders of clusters and in the history: named, skipped, and nothing else fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from pathlib import Path

import dask
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from clusters import new_record, sign_of, write_record

from dask_cml import cli, doctor
from dask_cml.errors import CMLError
from dask_cml.layout import HISTORY_FOLDER, LOGS_FOLDER, RECORD_FILE, SESSIONS_FOLDER, scheduler_file
from dask_cml.private_files import make_folder, write_file
from dask_cml.records import store
from dask_cml.records.history import EndedCluster, ended_clusters
from dask_cml.records.record import Maker, SchedulerState
from dask_cml.serve.clusters import ProjectClusters
from dask_cml.words import printable

#: A name of a file that is no UTF-8, as Python represents it, and a character that is in no such name.
NO_UTF8, SURROGATE = "b\udcff", "\ud800"
ENDED = "0123456789abcdef"


@pytest.fixture
def lab(platform, monkeypatch):
    """The folder of a cluster that has died, next to an ended one, ``night``."""
    monkeypatch.setenv("DASK_CML__PLATFORM", "local")
    gone = Maker("elsewhere", 1, 1.0, "gone")
    scheduler = SchedulerState(address="tls://127.0.0.1:9", closed="idle for 60 s")
    keys = {"tls_ca_file": "/missing"}
    options = {"platform": "local"}
    record = new_record("lab", maker=gone, scheduler=scheduler, security=keys, options=options)
    folder = write_record(record)
    (folder / LOGS_FOLDER / "lab-scheduler.log").write_text("hello\n")
    os.utime(sign_of("lab"), (1, 1))
    make_folder(folder.parent / HISTORY_FOLDER)
    write_ended(folder, ENDED, name="night")
    with dask.config.set({"cml.platform": "local"}):
        yield folder


def write_ended(folder: Path, id: str, **fields: object) -> Path:
    """Write the history of a cluster."""
    content = EndedCluster.of(store.read(folder.name)).to_json() | {"id": id, **fields}
    path = folder.parent / HISTORY_FOLDER / f"{id}.json"
    write_file(path, json.dumps(content).encode())
    return path


def copied(folder: Path, to: str = "b", **fields: object) -> Path:
    """Return the folder of another cluster, whose record has these fields."""
    copy = folder.with_name(to)
    shutil.copytree(folder, copy)
    file = copy / RECORD_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "name": to, "id": "other", **fields}))
    return copy


def pipe(path: Path) -> Path:
    """Put a named pipe in place of a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


# Each puts something odd beside or into the folder, and returns what a warning names.


def a_folder_whose_name_is_no_utf8(lab):
    return copied(lab, NO_UTF8) / RECORD_FILE


def a_surrogate_in_the_name_of_a_record(lab):
    return copied(lab, name=SURROGATE) / RECORD_FILE


def a_surrogate_in_other_texts_of_a_record(lab):
    copied(lab, maker={"host": SURROGATE, "pid": 1, "started": 1.0, "user": SURROGATE})


def a_surrogate_in_the_path_of_the_logs(lab):
    copied(lab, options={"platform": "local", "log_directory": f"/{SURROGATE}"})


def a_surrogate_in_the_file_of_a_scheduler(lab):
    file = copied(lab) / scheduler_file(0)
    state = json.loads(file.read_text())
    group = {"options": {"memory": None}, "adapt": {"minimum": None, "maximum": SURROGATE}}
    changed = {"app_url": f"https://{SURROGATE}", "groups": {SURROGATE: group}, "closed": SURROGATE}
    file.write_text(json.dumps({**state, **changed}))


def options_of_none_in_a_record(lab):
    names = ("cpu", "memory", "memory_limit", "idle_timeout", "scheduler_args", "log_directory")
    copied(lab, options={**dict.fromkeys(names), "platform": "local"})


def a_platform_that_is_no_text_in_a_record(lab):
    return copied(lab, options={"platform": []}) / RECORD_FILE


def a_path_of_the_logs_that_is_no_text(lab):
    return copied(lab, options={"platform": "local", "log_directory": 3}) / RECORD_FILE


def a_memory_of_none_in_the_file_of_a_scheduler(lab):
    file = copied(lab) / scheduler_file(0)
    state = json.loads(file.read_text())
    file.write_text(json.dumps({**state, "workers": {"memory": None}}))
    return file


def a_pipe_in_place_of_a_folder(lab):
    pipe(lab.with_name("b"))


def a_pipe_in_place_of_a_record(lab):
    return pipe(copied(lab) / RECORD_FILE)


def a_pipe_in_place_of_the_file_of_a_scheduler(lab):
    return pipe(copied(lab) / scheduler_file(0))


def a_pipe_in_place_of_the_sessions(lab):
    folder = copied(lab)
    pipe(folder / SESSIONS_FOLDER)
    return folder / RECORD_FILE


def a_pipe_in_place_of_a_key(lab):
    folder = copied(lab, security={"tls_ca_file": str(lab.with_name("b") / "ca.pem")})
    pipe(folder / "ca.pem")


def a_pipe_in_place_of_a_log(lab):
    pipe(copied(lab) / LOGS_FOLDER / "b-scheduler.log")


def a_file_of_the_history_whose_name_is_no_utf8(lab):
    file = lab.parent / HISTORY_FOLDER / f"{NO_UTF8}.json"
    file.write_text("{}")
    return file


def a_surrogate_in_the_history(lab):
    write_ended(lab, "other", name=SURROGATE, why=SURROGATE, user=SURROGATE, log_directory=SURROGATE)


def a_number_of_none_in_the_history(lab):
    return write_ended(lab, "other", most_workers=None)


def a_pipe_in_the_history(lab):
    return pipe(lab.parent / HISTORY_FOLDER / "other.json")


def a_pipe_in_place_of_a_log_in_the_history(lab):
    write_ended(lab, "other")
    make_folder(lab.parent / HISTORY_FOLDER / "other")
    pipe(lab.parent / HISTORY_FOLDER / "other" / "cluster.log")


OF_CLUSTERS = [
    a_folder_whose_name_is_no_utf8,
    a_surrogate_in_the_name_of_a_record,
    a_surrogate_in_other_texts_of_a_record,
    a_surrogate_in_the_path_of_the_logs,
    a_surrogate_in_the_file_of_a_scheduler,
    options_of_none_in_a_record,
    a_platform_that_is_no_text_in_a_record,
    a_path_of_the_logs_that_is_no_text,
    a_memory_of_none_in_the_file_of_a_scheduler,
    a_pipe_in_place_of_a_folder,
    a_pipe_in_place_of_a_record,
    a_pipe_in_place_of_the_file_of_a_scheduler,
    a_pipe_in_place_of_the_sessions,
    a_pipe_in_place_of_a_key,
    a_pipe_in_place_of_a_log,
]
OF_THE_HISTORY = [
    a_file_of_the_history_whose_name_is_no_utf8,
    a_surrogate_in_the_history,
    a_number_of_none_in_the_history,
    a_pipe_in_the_history,
    a_pipe_in_place_of_a_log_in_the_history,
]
odd_things = pytest.mark.parametrize("odd", [*OF_CLUSTERS, *OF_THE_HISTORY], ids=lambda odd: odd.__name__)


def run(*arguments):
    """Run a command, and return its output, which a terminal must be able to show."""
    result = CliRunner().invoke(cli.cml, arguments)
    assert result.exit_code == 0, result.output
    result.output.encode()
    return result.output


@pytest.mark.parametrize("odd", OF_CLUSTERS, ids=lambda odd: odd.__name__)
def test_what_cannot_be_read_next_to_a_cluster_is_named_once(lab, odd, caplog):
    named = odd(lab)
    for _ in range(2):
        assert "lab" in [record.name for record in store.records()]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [message for message in messages if f"{printable(str(named))} ignored: " in message]
    assert len(messages) == (named is not None)


@pytest.mark.parametrize("odd", OF_THE_HISTORY, ids=lambda odd: odd.__name__)
def test_what_cannot_be_read_in_the_history_is_named_once(lab, odd, caplog):
    named = odd(lab)
    for _ in range(2):
        assert "night" in [cluster.name for cluster in ended_clusters()]
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [message for message in messages if f"{printable(str(named))} ignored: " in message]
    assert len(messages) == (named is not None)


@odd_things
def test_commands_show_clusters_beside_something_odd(lab, odd):
    odd(lab)
    assert "\nlab  " in run("list")
    assert '"name": "lab"' in run("list", "--json")
    assert "stale" in run("info", "lab")
    assert "hello" in run("logs", "lab")
    assert "\nnight  " in run("history")
    assert '"name": "night"' in run("history", "--json")
    completed = ShellComplete(cli.cml, {}, "cml", "_COMPLETE").get_completions(["info"], "")
    names = [completion.value for completion in completed]
    assert "lab" in names
    "".join(names).encode()


@odd_things
def test_prune_deletes_a_dead_cluster_next_to_something_odd(lab, odd):
    odd(lab)
    assert "lab deleted" in run("prune")


@odd_things
def test_the_doctor_examines_clusters_next_to_something_odd(lab, odd):
    odd(lab)
    findings = doctor.clusters.versions([], timeout=30)
    assert "cluster lab" in [finding.name for finding in findings]


@odd_things
async def test_the_page_and_the_sidebar_show_clusters_next_to_something_odd(lab, odd, caplog):
    """The sidebar reads the records by the page's base class."""
    odd(lab)
    clusters = ProjectClusters(interval=0.01)
    clusters.start()
    try:
        while not clusters.findings:
            await asyncio.sleep(0.01)
        described = clusters.describe()
        assert {cluster["name"]: cluster["status"] for cluster in described}["lab"] == "stale"
        details = [await clusters.details(cluster["name"]) for cluster in described]
        ended = await clusters.ended()
        assert "night" in [cluster.name for cluster in ended]
        for cluster in ended:
            with contextlib.suppress(ValueError, CMLError):  # the log is missing, or a pipe
                cluster.logs().part("Cluster")
        shown = [*described, *details, *(cluster.describe() for cluster in ended)]
        assert "cannot be described" not in json.dumps(shown)
    finally:
        await clusters.close()
    assert [record for record in caplog.records if record.exc_info] == []
