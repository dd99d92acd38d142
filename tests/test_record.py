"""The record of a cluster: which content is valid, and whether its creator still runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from dask_cml.records.record import Maker, Record, SchedulerState

# -- what the scheduler writes


def test_fields_of_a_scheduler_may_be_missing_null_or_unknown_and_its_session_invalid():
    nothing = dict.fromkeys(("revision", "restarts", "address", "hours", "activity"))
    content = {"groups": {}, "region": "west", "session": "../etc", **nothing}
    assert SchedulerState.from_json(0, json.dumps(content)) == SchedulerState()


def test_other_content_is_not_the_state_of_a_scheduler():
    invalid = {"address": 8786, "app_url": {}, "revision": -1, "restarts": 10**30, "session": 7, "hours": 0}
    invalid |= {"groups": 3, "orphan_timeout": 1e300, "activity": [1]}
    contents = [{name: value} for name, value in invalid.items()]
    contents += [{"protocol": "2"}, {"protocol": True}, {"groups": {"gpu": []}}]
    contents += [{"groups": {"gpu": {"options": None}}}]
    nan = '{"groups": {"default": {"options": {}, "target": NaN}}}'
    for text in "", "[1]", "null", nan, *map(json.dumps, contents):
        with pytest.raises(ValueError):  # noqa: PT011  # of json, too
            SchedulerState.from_json(0, text)


# -- what the creator writes


def test_a_record_reads_back_as_it_was_written():
    """A byte of a file name that is no text may be in an option."""
    record = Record("a", options={"local_directory": "/scratch/\udcff"}, security={"tls_ca_file": "/ca.pem"})
    assert Record.from_json(record.to_json()) == record


def test_a_record_contains_no_sessions_and_an_earlier_format_is_read_for_its_deletion():
    others = {"launches": {"abcd1234": {}}, "ended": 3, "scheduler": {"address": "tcp://10.0.0.1:8786"}}
    record = Record("old", options={"platform": "local"})
    for version in 1, 2, record.version:
        content = (
            json.loads(record.to_json()) | others | {"version": version, "scheduler_address": "tcp://x:1"}
        )
        assert Record.from_json(json.dumps(content)) == replace(record, version=version)


# -- its creator


def test_a_process_lives_until_it_ends_also_if_its_id_is_used_again():
    own = Maker.this_process()
    assert own.lives() is True
    assert replace(own, started=own.started - 3600).lives() is False
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        maker = replace(own, pid=process.pid, started=psutil.Process(process.pid).create_time())
        assert maker.lives() is True
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert maker.lives() is False  # a zombie
    assert maker.lives() is False


def test_the_life_of_a_process_in_another_session_is_unknown(monkeypatch):
    own = Maker.this_process()
    assert replace(own, host=f"not-{own.host}", pid=1).lives() is None
    monkeypatch.setenv("CDSW_ENGINE_ID", "abcdefgh12345678")
    assert own.lives() is None
    assert Maker.this_process().session == "abcdefgh12345678"
