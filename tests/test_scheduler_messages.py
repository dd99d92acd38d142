"""Messages to the scheduler: a valid one passes, and one wrong value refuses all of it."""

from __future__ import annotations

import math

import pytest
from distributed.core import rpc
from schedulers import prepare, scheduler_in

from dask_cml.scheduler.wanted import OPERATIONS, check_operation

VALID = {
    "scale": {"group": "default", "n": 3},
    "adapt": {"group": "gpu", "minimum": 0, "maximum": None, "key": "a1", "options": {"interval": 1.0}},
    "stop_adapting": {"group": "gpu", "key": None},
    "remove": {"names": ["mine-0", "mine-1-0"]},
    "add_group": {"group": "gpu", "options": {"cpu": 2, "env": {"A": "b"}}, "n": 0},
    "delete_group": {"group": "gpu"},
    "resize": {"group": "gpu", "n": 100_000, "key": "a1"},
    "shrink": {"group": "gpu", "names": (), "key": "a1"},
    "trim": {"group": "gpu", "names": ["mine-0"]},
    "replace": {"names": ["mine-0"], "causes": {"mine-0": "evicted"}},
    "refuse": {"group": "gpu", "names": ["mine-0"], "wishes": 0},
    "keep": {"names": ["mine-0"], "wishes": {"default": 2}},
    "launched": {"names": ["mine-0"]},
    "stopped": {"names": ["mine-0"]},
    "found": {"states": {"mine-0": "running"}},
}
#: Wrong values of each argument.
WRONG = {
    "group": ["", "0", "a b", "x" * 400, 3, None, ["gpu"]],
    "n": [-1, 100_001, 1.5, True, "3", None, math.nan],
    "minimum": [-1, True, "0", None],
    "maximum": [-1, 1.5, "all", math.inf],
    "key": ["", 3, "x" * 400],
    "names": ["mine-0", [""], [3], {"mine-0"}, None, ["x" * 400], ["mine-0"] * 100_001],
    "causes": [None, [], {"": "a"}, {"mine-0": 3}, {"mine-0": "x" * 400}],
    "states": [None, [], {3: "running"}, {"mine-0": None}],
    "options": [None, [], {"a": object()}, {"a": math.nan}, {"a": "x" * 200_000}],
    "wishes": [None, -1, {"0": 1}, {"gpu": -1}, {"gpu": "1"}, {3: 1}],
}


def test_each_operation_has_a_valid_example():
    assert VALID.keys() == {operation.__name__ for operation in OPERATIONS}


@pytest.mark.parametrize("op", VALID)
@pytest.mark.parametrize("wish", [{}, {"wish": None}, {"wish": 7}], ids=["none", "null", "7"])
def test_valid_operations_pass(op, wish):
    check_operation({"op": op, **VALID[op], **wish})


@pytest.mark.parametrize(
    ("op", "argument"), [(op, each) for op, arguments in VALID.items() for each in arguments]
)
def test_a_wrong_or_missing_argument_refuses_the_operation(op, argument):
    valid = {"op": op, **VALID[op]}
    for wrong in WRONG[argument]:
        with pytest.raises(ValueError, match=rf"invalid .*\b{argument}\b"):
            check_operation({**valid, argument: wrong})
    without = {name: value for name, value in valid.items() if name != argument}
    with pytest.raises(ValueError, match=f"missing required field `{argument}`"):
        check_operation(without)


@pytest.mark.parametrize(
    "operation",
    [
        None,
        "scale",
        {},
        {"op": None},
        {"op": "apply"},
        {"op": "__init__"},
        {"op": ["scale"]},
        {"op": "scale", "group": "default", "n": 1, "manager": "other"},
        {"op": "scale", "group": "default", "n": 1, "wish": -1},
        {"op": "scale", "group": "default", "n": 1, "wish": "1"},
        {"op": "scale", "group": "default", "n": 1, "wish": True},
        {"op": "scale", "group": "default", "n": 1, 3: 4},
    ],
)
def test_other_operations_are_refused(operation):
    with pytest.raises(ValueError, match="invalid operation: "):
        check_operation(operation)


def test_an_error_quotes_only_the_beginning_of_a_wrong_value():
    for wrong in {"op": "x" * 10**6}, {"op": "scale", "group": "default", "n": 1, "x" * 10**6: 1}:
        with pytest.raises(ValueError, match="invalid") as caught:
            check_operation(wrong)
        assert len(str(caught.value)) < 300


# -- the other messages

WATCH = {"observes": False, "manager": "m-1", "lease": 15.0, "since": 0, "wait": 2}


@pytest.fixture
async def comm(tmp_path):
    async with scheduler_in(prepare(tmp_path / "mine")) as scheduler, rpc(scheduler.address) as connected:
        yield connected


async def refuses(send, values, argument):
    with pytest.raises(ValueError, match=rf"invalid message of a manager: .*`(\$\.)?{argument}\b"):
        await send(**values)


@pytest.mark.parametrize(
    "change",
    [
        {"observes": "no"},
        {"observes": None},
        {"manager": ""},
        {"manager": "x" * 65},
        {"manager": "a b"},
        {"manager": ["m"]},
        {"manager": "ä"},
        {"manager": "m\n"},
        {"lease": 0},
        {"lease": math.inf},
        {"lease": math.nan},
        {"lease": "15"},
        {"lease": True},
        {"since": -1},
        {"since": 1.0},
        {"wait": -2},
        {"wait": None},
        {"leader": "me"},
    ],
)
async def test_a_wrong_heartbeat_is_refused(comm, change):
    await comm.cml_watch(**WATCH)
    await refuses(comm.cml_watch, {**WATCH, **change}, *change)


async def test_a_heartbeat_that_lacks_a_value_is_refused(comm):
    for name in WATCH:
        without = {each: value for each, value in WATCH.items() if each != name}
        await refuses(comm.cml_watch, without, name)


@pytest.mark.parametrize(
    "values", [{}, {"orphan_timeout": None}, {"orphan_timeout": 300, "app_url": "https://abc.example.com/"}]
)
async def test_valid_values_are_kept(comm, values):
    await comm.cml_set(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"orphan_timeout": 0},
        {"orphan_timeout": math.nan},
        {"orphan_timeout": True},
        {"orphan_timeout": "never"},
        {"app_url": "javascript:alert(1)"},
        {"app_url": "https://" + "x" * 3000},
        {"app_url": None},
        {"leader": "me"},
    ],
)
async def test_wrong_and_unknown_values_are_refused(comm, values):
    await refuses(comm.cml_set, values, *values)


@pytest.mark.parametrize("handler", ["cml_held", "cml_notice"])
@pytest.mark.parametrize("names", ["mine-0", None, [""], [3], ["x" * 400], {"mine-0": 1}])
async def test_what_is_no_list_of_names_is_refused(comm, handler, names):
    await refuses(getattr(comm, handler), {"names": names}, "names")
