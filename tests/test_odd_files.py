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


def copied(folder: Path, to: str = "", **fields: object) -> Path:
    """Return the folder of another cluster, whose record has these fields."""
    id = f"b{len(os.listdir(folder.parent))}"
    copy = shutil.copytree(folder, folder.with_name(to or id))
    changed(copy / RECORD_FILE, **{"name": copy.name, "id": id, **fields})
    return copy


def pipe(path: Path) -> Path:
    """Put a named pipe in place of a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def changed(file: Path, **fields: object) -> Path:
    """Change fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return file


@pytest.fixture
def odd(lab):
    """All that is odd, next to a cluster. Returns what warnings name."""
    history, local = lab.parent / HISTORY_FOLDER, {"platform": "local"}
    # What can be read, or is read by nobody here.
    copied(lab, maker={"host": SURROGATE, "pid": 1, "started": 1.0, "user": SURROGATE})
    copied(lab, options=local | {"log_directory": f"/{SURROGATE}"})
    names = ("cpu", "memory", "memory_limit", "idle_timeout", "scheduler_args", "log_directory")
    copied(lab, options=dict.fromkeys(names) | local)
    group = {"options": {"memory": None}, "adapt": {"minimum": None, "maximum": SURROGATE}}
    more = {"app_url": f"https://{SURROGATE}", "groups": {SURROGATE: group}, "closed": SURROGATE}
    changed(copied(lab) / scheduler_file(0), **more)
    pipe(lab.with_name("a-pipe"))
    copied(lab, security={"tls_ca_file": str(pipe(lab.parent / "ca.pem"))})
    folder = copied(lab)
    pipe(folder / LOGS_FOLDER / f"{folder.name}-scheduler.log")
    write_ended(lab, "surrogate", name=SURROGATE, why=SURROGATE, user=SURROGATE, log_directory=SURROGATE)
    write_ended(lab, "other")
    make_folder(history / "other")
    pipe(history / "other" / "cluster.log")
    no_utf8 = history / f"{NO_UTF8}.json"
    no_utf8.write_text("{}")
    return [
        no_utf8,
        copied(lab, NO_UTF8) / RECORD_FILE,
        copied(lab, name=SURROGATE) / RECORD_FILE,
        copied(lab, options={"platform": []}) / RECORD_FILE,
        copied(lab, options=local | {"log_directory": 3}) / RECORD_FILE,
        changed(copied(lab) / scheduler_file(0), workers={"memory": None}),
        pipe(copied(lab) / RECORD_FILE),
        pipe(copied(lab) / scheduler_file(0)),
        pipe(copied(lab) / SESSIONS_FOLDER).with_name(RECORD_FILE),
        write_ended(lab, "none", most_workers=None),
        pipe(history / "pipe.json"),
    ]


def run(*arguments):
    """Run a command, and return its output, which a terminal must be able to show."""
    result = CliRunner().invoke(cli.cml, arguments)
    assert result.exit_code == 0, result.output
    result.output.encode()
    return result.output


def test_what_cannot_be_read_is_named_once(odd, caplog):
    for _ in range(2):
        assert "lab" in [record.name for record in store.records()]
        assert "night" in [cluster.name for cluster in ended_clusters()]
    messages = [record.getMessage() for record in caplog.records]
    for named in odd:
        assert sum(f"{printable(str(named))} ignored: " in message for message in messages) == 1
    assert len(messages) == len(odd)


@pytest.mark.slow
def test_commands_show_clusters_beside_something_odd(odd):
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


def test_prune_deletes_a_dead_cluster_next_to_something_odd(odd):
    assert "lab deleted" in run("prune")


def test_the_doctor_examines_clusters_next_to_something_odd(odd):
    findings = doctor.clusters.versions([], timeout=30)
    assert "cluster lab" in [finding.name for finding in findings]


async def test_the_page_and_the_sidebar_show_clusters_next_to_something_odd(odd, caplog):
    """The sidebar reads the records by the page's base class."""
    clusters = ProjectClusters(interval=0.01)
    clusters.start()
    try:
        while not clusters.findings:
            await asyncio.sleep(0.01)
        described = clusters.describe()
        assert {cluster["name"]: cluster["status"] for cluster in described}["lab"] == "stale"
        assert len(described) > 5
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
