"""The record of a cluster: which content is valid, and whether its creator still runs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from dask_cml.records.record import Maker, Record, SchedulerState
from dask_cml.scheduler.board import WantedGroup

# -- what the scheduler writes

GROUPS = {"default": WantedGroup(), "gpu": WantedGroup({"nvidia_gpu": 1}, 2)}


def test_the_state_of_a_scheduler_reads_back_as_it_was_written():
    state = SchedulerState(
        3,
        GROUPS,
        address="tls://10.0.0.1:8786",
        session="abcdefgh12345678",
        app_url="https://a/",
        closed="idle for 60 s",
        protocol=3,
        revision=12,
        restarts=1,
        orphan_timeout=300.0,
        maker=Maker("host", 7, 1.5, None),
        activity={"tasks_done": 3},
    )
    content = dataclasses.asdict(state)
    assert content.pop("number") == 3
    assert SchedulerState.from_json(3, json.dumps(content)) == state
    groups = {"default": {"cpu": 2}, "gpu": {"nvidia_gpu": 1}}
    assert Record("a", options={"cpu": 2}, scheduler=state).groups == groups


def test_unknown_fields_of_a_scheduler_are_ignored_and_missing_ones_allowed():
    assert SchedulerState.from_json(0, json.dumps({"groups": {}, "region": "west"})) == SchedulerState()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        "null",
        '{"groups": {"default": {"options": {}, "target": NaN}}}',
        {"groups": 3},
        {"groups": {"gpu": []}},
        {"groups": {"gpu": {"options": None}}},
        {"groups": {}, "address": 8786},
        {"groups": {}, "app_url": {}},
        {"groups": {}, "protocol": "2"},
        {"groups": {}, "protocol": True},
        {"groups": {}, "revision": -1},
        {"groups": {}, "restarts": 10**30},
        {"groups": {}, "session": 7},
        {"groups": {}, "hours": 0},
        {"groups": {}, "orphan_timeout": 1e300},
        {"groups": {}, "activity": [1]},
    ],
)
def test_other_content_is_not_the_state_of_a_scheduler(content):
    with pytest.raises(ValueError):  # noqa: PT011  # of json, too
        SchedulerState.from_json(0, content if isinstance(content, str) else json.dumps(content))


def test_an_invalid_session_id_of_a_scheduler_counts_as_unknown():
    """Otherwise it would get into calls of the platform."""
    content = {"groups": {}, "session": "../etc"}
    assert SchedulerState.from_json(0, json.dumps(content)).session is None


def test_a_value_of_a_scheduler_that_is_null_is_unknown():
    content = dict.fromkeys(("revision", "restarts", "address", "hours", "activity"))
    assert SchedulerState.from_json(0, json.dumps({"groups": {}, **content})) == SchedulerState()


# -- what the creator writes


def test_a_record_reads_back_as_it_was_written():
    """A byte of a file name that is no text may be in an option."""
    record = Record("a", options={"local_directory": "/scratch/\udcff"}, security={"tls_ca_file": "/ca.pem"})
    assert Record.from_json(record.to_json()) == record


def test_a_record_contains_no_sessions_and_no_state_of_a_scheduler():
    others = {"launches": {"abcd1234": {}}, "ended": 3, "scheduler": {"address": "tcp://10.0.0.1:8786"}}
    record = Record("a")
    assert Record.from_json(json.dumps({**json.loads(record.to_json()), **others})) == record


# -- records of earlier releases, which are only deleted


@pytest.mark.parametrize("version", [1, 2])
def test_a_record_of_an_earlier_format_is_read_for_its_deletion(version):
    record = Record("old", options={"platform": "local"})
    content = json.loads(record.to_json()) | {"version": version, "scheduler_address": "tcp://10.0.0.1:8786"}
    assert Record.from_json(json.dumps(content)) == replace(record, version=version)


# -- its creator


def test_own_process_lives():
    assert Maker.this_process().lives() is True


def test_process_that_was_killed_does_not_live():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = psutil.Process(process.pid).create_time()
        maker = dataclasses.replace(Maker.this_process(), pid=process.pid, started=started)
        assert maker.lives() is True
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert maker.lives() is False  # a zombie
    assert maker.lives() is False


def test_process_id_that_was_used_again_is_another_process():
    own = Maker.this_process()
    assert dataclasses.replace(own, started=own.started - 3600).lives() is False


def test_the_life_of_a_process_in_another_session_is_unknown(monkeypatch):
    own = Maker.this_process()
    assert dataclasses.replace(own, host=f"not-{own.host}", pid=1).lives() is None
    monkeypatch.setenv("CDSW_ENGINE_ID", "abcdefgh12345678")
    assert own.lives() is None
    assert Maker.this_process().session == "abcdefgh12345678"
