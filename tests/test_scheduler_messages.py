"""Messages to the scheduler: a valid one passes, and one wrong value refuses all of it in words."""

from __future__ import annotations

import math
import re

import pytest
from distributed.core import rpc
from schedulers import WATCH, post, prepare, report, scheduler_in

LIMITS = {"minimum": 0, "maximum": 3, "interval": 1.0, "wait_count": 3, "target_duration": 5.0}
REQUEST = {"kind": "adapt", "limits": LIMITS}
VALID = {
    "cml_watch": WATCH,
    "cml_post": post(**REQUEST),
    "cml_report": report(events=[{"action": "lost", "session": "mine-0"}]),
    "cml_held": {"names": ["mine-0", "mine-1-0"]},
    "cml_last": {"names": []},
    "cml_notice": {"names": ["mine-0"]},
}
NAMES = ["mine-0", None, [""], [3], ["x" * 400], {"mine-0": 1}, ["mine-0"] * 100_001]
TEXTS = ["", "x" * 400, None, 3]
WATCHERS = ["x" * 65, "a b", "ä", "m\n", ["m"], *TEXTS]
NUMBERS = [-1, 1.5, 2**60, True, "3", None]
REQUESTS = [
    None,
    3,
    {"n": 3},
    *({"kind": wrong} for wrong in ("burn", None)),
    *({**REQUEST, "group": wrong} for wrong in ("0", "a b", *TEXTS)),
    *({"kind": "scale", "n": wrong} for wrong in (100_001, math.nan, *NUMBERS)),
    *({**REQUEST, "limits": {**LIMITS, name: -1}} for name in LIMITS),
    *({**REQUEST, "limits": {**LIMITS, "maximum": wrong}} for wrong in (1.5, "all", math.inf, None)),
    *({**REQUEST, "limits": wrong} for wrong in ({"minimum": 0}, {**LIMITS, "step": 1})),
    {"kind": "add group", "group": "new", "options": []},
    *({"kind": "close", "names": wrong} for wrong in NAMES),
    {**REQUEST, "pause": 1},
]
#: Wrong values of each argument, by handlers.
WRONG = {
    "cml_watch": {
        "watcher": WATCHERS,
        "rank": [0, 6, 1.5, True, "1", None],
        "who": TEXTS,
        "since": NUMBERS,
        "wait": [-2, 0, None, math.nan, math.inf, "2", True],
        "keeper": ["me"],
    },
    "cml_post": {"sender": WATCHERS, "number": NUMBERS, "request": REQUESTS},
    "cml_report": {
        "keeper": WATCHERS,
        "term": NUMBERS,
        "report": [
            None,
            [],
            *({"groups": wrong} for wrong in (3, {"default": 3}, {"default": {"target": "3"}})),
        ],
        "events": [None, [3], [{"action": 3}], [{"": "lost"}], [{"cause": "x" * 4000}]],
        "n_before": NUMBERS,
        "leaves": ["no", None, 1],
    },
    **{handler: {"names": NAMES} for handler in ("cml_held", "cml_last", "cml_notice")},
}


@pytest.fixture
async def comm(tmp_path):
    folder = prepare(tmp_path / "mine", keeper="keeper")
    async with scheduler_in(folder) as scheduler, rpc(scheduler.address) as connected:
        yield connected


@pytest.mark.parametrize("handler", VALID)
async def test_a_valid_message_passes_and_one_that_lacks_a_value_is_refused(comm, handler):
    send = getattr(comm, handler)
    assert "refused" not in (await send(**VALID[handler]) or {})
    for name in VALID[handler]:
        without = {argument: value for argument, value in VALID[handler].items() if argument != name}
        assert f"missing required field `{name}`" in (await send(**without))["refused"]


@pytest.mark.parametrize(
    ("handler", "argument"), [(handler, argument) for handler in WRONG for argument in WRONG[handler]]
)
async def test_one_wrong_value_refuses_the_message_and_changes_nothing(comm, handler, argument):
    before = await comm.cml_watch(**WATCH)
    for wrong in WRONG[handler][argument]:
        refused = (await getattr(comm, handler)(**{**VALID[handler], argument: wrong}))["refused"]
        assert re.match("invalid (message to the scheduler|groups of a report): ", refused)
        assert argument in refused
        assert len(refused) < 500
    assert await comm.cml_watch(**WATCH) == before
