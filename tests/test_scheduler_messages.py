"""Messages to the scheduler: a valid one passes, and one wrong value refuses all of it in words."""

from __future__ import annotations

import math

import pytest
from distributed.core import rpc
from schedulers import WATCH, prepare, report, scheduler_in

LIMITS = {"minimum": 0, "maximum": 3, "interval": 1.0, "wait_count": 3, "target_duration": 5.0}
VALID = {
    "cml_watch": WATCH,
    "cml_set": {
        "groups": {"default": {"target": 100_000, "adapt": LIMITS}},
        "orphan_timeout": 300,
        "app_url": "https://abc.example.com/",
    },
    "cml_report": report(
        report={"problem": None}, closed=["mine-0"], events=[{"action": "lost", "session": "mine-0"}]
    ),
    "cml_lease": {"watcher": "m-1", "take": True},
    "cml_held": {"names": ["mine-0", "mine-1-0"]},
    "cml_last": {"names": []},
    "cml_notice": {"names": ["mine-0"]},
}
NAMES = ["mine-0", None, [""], [3], ["x" * 400], {"mine-0": 1}, ["mine-0"] * 100_001]
WATCHERS = ["", "x" * 65, "a b", "ä", "m\n", ["m"], None, 3]
GROUPS = [
    None,
    3,
    {"": {}},
    {"0": {}},
    {"a b": {}},
    {"x" * 400: {}},
    {"default": 3},
    *({"default": {"target": wrong}} for wrong in (-1, 100_001, 1.5, True, "3", None, math.nan)),
    *({"default": {"request": wrong}} for wrong in (-1, "1", True)),
    {"default": {"pause": 1}},
    {"default": {"adapt": {"minimum": 0}}},
    *({"default": {"adapt": {**LIMITS, name: -1}}} for name in LIMITS),
    *({"default": {"adapt": {**LIMITS, "maximum": wrong}}} for wrong in (1.5, "all", math.inf, None)),
    {"new": {"options": []}},
]
#: Wrong values of each argument, by handlers.
WRONG = {
    "cml_watch": {
        "watcher": WATCHERS,
        "counts": ["no", None, 1],
        "since": [-1, 1.0, None],
        "wait": [-2, 0, None, math.nan, math.inf, "2", True],
        "keeper": ["me"],
    },
    "cml_set": {
        "groups": GROUPS,
        "orphan_timeout": [0, math.nan, True, "never"],
        "app_url": ["javascript:alert(1)", "https://" + "x" * 3000, None],
        "keeper": ["me"],
    },
    "cml_report": {
        "keeper": WATCHERS,
        "report": [None, []],
        "closed": NAMES,
        "groups": GROUPS,
        "n_before": [None, -1, "3"],
        "events": [None, [3], [{"action": 3}], [{"": "lost"}], [{"cause": "x" * 4000}]],
    },
    "cml_lease": {"watcher": WATCHERS, "take": [None, "yes", 1]},
    "cml_held": {"names": NAMES},
    "cml_last": {"names": NAMES},
    "cml_notice": {"names": NAMES},
}


@pytest.fixture
async def comm(tmp_path):
    async with scheduler_in(prepare(tmp_path / "mine")) as scheduler, rpc(scheduler.address) as connected:
        yield connected


@pytest.mark.parametrize("handler", VALID)
async def test_a_valid_message_passes_and_one_that_lacks_a_value_is_refused(comm, handler):
    send = getattr(comm, handler)
    assert "refused" not in (await send(**VALID[handler]) or {})
    for name in VALID[handler]:
        without = {argument: value for argument, value in VALID[handler].items() if argument != name}
        answer = await send(**without)
        assert handler == "cml_set" or f"missing required field `{name}`" in answer["refused"]


@pytest.mark.parametrize(
    ("handler", "argument"), [(handler, argument) for handler in WRONG for argument in WRONG[handler]]
)
async def test_one_wrong_value_refuses_the_message_and_changes_nothing(comm, handler, argument):
    before = await comm.cml_watch(**WATCH)
    for wrong in WRONG[handler][argument]:
        refused = (await getattr(comm, handler)(**{**VALID[handler], argument: wrong}))["refused"]
        assert refused.startswith("invalid message to the scheduler: ")
        assert argument in refused
        assert len(refused) < 500
    assert await comm.cml_watch(**WATCH) == before
