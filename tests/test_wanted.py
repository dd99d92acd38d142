"""What is wanted: each operation, in the order in which the scheduler carries them out."""

from __future__ import annotations

import pytest

from dask_cml.scheduler.wanted import Wanted

GPU = {"gpu": {"options": {"nvidia_gpu": 1}}}
LIMITS = {"minimum": 1, "maximum": 4, "key": "k1", "options": {}}


def new(n=0, launched=0, **groups):
    """Return what is wanted of a cluster with `n` sessions, of which the first are launched."""
    wanted = Wanted("mine", "leader", {"default": {"target": n}, **groups})
    wanted.launched("leader", [*wanted.sessions][:launched])
    return wanted


def names(wanted, group="default"):
    return wanted.names(group)


def target(wanted, group="default"):
    return wanted.groups[group].target


# -- numbers and names


def test_the_first_sessions_are_those_of_all_groups():
    wanted = new(2, gpu={"target": 1})
    assert [*wanted.sessions] == ["mine-0", "mine-1", "mine-gpu-0"]
    assert {entry.manager for entry in wanted.sessions.values()} == {"leader"}


def test_scaling_up_gives_out_new_names_and_scaling_down_chooses_none():
    wanted = new(2)
    wanted.scale("other", "default", 4)
    assert names(wanted) == ["mine-0", "mine-1", "mine-2", "mine-3"]
    wanted.scale("other", "default", 1)
    assert (len(names(wanted)), target(wanted)) == (4, 1)


def test_the_last_of_many_wishes_counts():
    wanted = new()
    for n in 5, 0, 3, 2:
        wanted.scale("m", "default", n)
    assert (target(wanted), wanted.groups["default"].wishes) == (2, 4)


def test_names_are_never_used_twice():
    wanted = new(2)
    wanted.replace("leader", ["mine-0"], {})
    wanted.scale("m", "default", 0)
    wanted.trim("leader", "default", names(wanted))
    wanted.scale("m", "default", 1)
    assert names(wanted) == ["mine-3"]


def test_the_next_scheduler_gives_out_names_after_those_of_this_one():
    wanted = new(2, gpu={"options": {"cpu": 2}, "target": 1})
    wanted.adapt("m", "gpu", **LIMITS)
    again = Wanted("mine", "leader", wanted.to_json())
    assert [*again.sessions] == ["mine-2", "mine-3", "mine-gpu-1"]
    assert again.groups["gpu"].options == {"cpu": 2}
    assert again.groups["gpu"].adapting["key"] == "k1"


def test_a_session_that_was_launched_under_a_known_name_is_not_launched_again():
    """By a manager of the scheduler before this one."""
    wanted = new()
    wanted.launched("m", ["mine-7", "mine-0"])
    wanted.scale("m", "default", 2)
    assert names(wanted) == ["mine-8", "mine-9"]
    assert [name for name, entry in wanted.sessions.items() if entry.launched] == ["mine-7", "mine-0"]


# -- the leader's decisions


@pytest.mark.parametrize(
    ("op", "arguments", "result"),
    [
        ("trim", {"group": "default", "names": ["mine-0"]}, None),
        ("replace", {"names": ["mine-0"], "causes": {}}, []),
        ("refuse", {"group": "default", "names": ["mine-1"], "wishes": 1}, None),
        ("keep", {"names": ["mine-0"], "wishes": {"default": 1}}, None),
    ],
)
def test_decisions_of_another_manager_change_nothing(op, arguments, result):
    wanted = new(2, launched=1)
    wanted.scale("m", "default", 1)
    before = wanted.since(0)
    assert getattr(wanted, op)("other", **arguments) == result
    assert wanted.since(0) == before


def test_only_the_excess_is_trimmed():
    wanted = new(4)
    wanted.scale("m", "default", 1)
    wanted.scale("m", "default", 3)
    wanted.trim("leader", "default", ["mine-3", "mine-2", "mine-1", "unknown"])
    assert names(wanted) == ["mine-0", "mine-1", "mine-2"]
    wanted.trim("leader", "default", ["mine-2"])
    assert len(names(wanted)) == 3


def test_lost_sessions_are_replaced_if_they_are_still_wanted():
    wanted = new(3)
    wanted.scale("m", "default", 1)
    wanted.trim("leader", "default", ["mine-2", "mine-1"])
    assert wanted.replace("leader", ["mine-2", "mine-0", "unknown"], {}) == ["mine-0"]
    assert names(wanted) == ["mine-3"]


def test_a_lost_session_is_not_replaced_while_others_exceed_the_target():
    wanted = new(3)
    wanted.scale("m", "default", 2)
    assert wanted.replace("leader", ["mine-1"], {}) == ["mine-1"]
    assert names(wanted) == ["mine-0", "mine-2"]


def test_a_replaced_session_stays_known_until_it_is_stopped_if_it_was_launched():
    wanted = new(2, launched=1)
    wanted.replace("leader", ["mine-0", "mine-1"], {})
    assert [*wanted.sessions] == ["mine-0", "mine-2", "mine-3"]
    wanted.stopped("leader", ["mine-0"])
    assert [*wanted.sessions] == ["mine-2", "mine-3"]


def test_a_refusal_lowers_the_target_to_the_launched_sessions():
    wanted = new(8)
    wanted.launched("leader", names(wanted)[:5])
    # One of them was launched after all, and the answer got lost.
    left = names(wanted)[4:]
    assert wanted.refuse("leader", "default", left, wishes=0) == [5, 8]
    assert (target(wanted), len(names(wanted))) == (5, 5)


@pytest.mark.parametrize("n", [1, 8])
def test_a_refusal_of_an_older_wish_changes_nothing(n):
    wanted = new(8, launched=5)
    left = names(wanted)[5:]
    wanted.scale("m", "default", n)
    assert wanted.refuse("leader", "default", left, wishes=0) is None
    assert (target(wanted), len(names(wanted))) == (n, 8)


def test_a_session_whose_data_no_worker_can_take_is_wanted_again():
    wanted = new(1, launched=1)
    wanted.scale("m", "default", 0)
    wanted.trim("leader", "default", ["mine-0"])
    since = wanted.changes.revision
    wanted.keep("leader", ["mine-0", "unknown"], {"default": 1})
    assert (target(wanted), names(wanted)) == (1, ["mine-0"])
    change = wanted.since(since)
    assert change["sessions"]["mine-0"]["wanted"]
    assert change["groups"]["default"]["target"] == 1


def test_no_session_is_kept_against_a_later_wish():
    wanted = new(1, launched=1)
    wanted.scale("m", "default", 0)
    wanted.trim("leader", "default", ["mine-0"])
    wanted.scale("m", "default", 0)
    wanted.keep("leader", ["mine-0"], {"default": 1})
    assert target(wanted) == 0


# -- removal by name


def test_removed_sessions_lower_the_target():
    wanted = new(3)
    wanted.remove("m", ["mine-1", "unknown"])
    assert (target(wanted), names(wanted)) == (2, ["mine-0", "mine-2"])
    wanted.scale("m", "default", 1)  # one of the two is still to be chosen
    wanted.remove("m", ["mine-0"])
    assert (target(wanted), names(wanted)) == (1, ["mine-2"])


def test_removing_sessions_of_one_group_leaves_the_others_alone():
    wanted = new(2, gpu={"target": 1})
    wanted.adapt("m", "default", **LIMITS)
    wanted.remove("m", ["mine-gpu-0"])
    assert (target(wanted), target(wanted, "gpu")) == (2, 0)
    assert wanted.groups["default"].adapting
    wanted.remove("m", ["mine-0"])
    assert wanted.groups["default"].adapting is None


# -- adaptive scaling


@pytest.mark.parametrize(("n", "after"), [(0, 1), (3, 3), (9, 4)])
def test_adapting_keeps_the_number_within_the_limits_at_once(n, after):
    wanted = new(n)
    wanted.adapt("m", "default", **LIMITS)
    assert target(wanted) == after
    assert wanted.groups["default"].adapting == {
        "minimum": 1,
        "maximum": 4,
        "options": {},
        "manager": "m",
        "key": "k1",
    }


@pytest.mark.parametrize(
    "later",
    [
        lambda wanted: wanted.scale("m", "default", 2),
        lambda wanted: wanted.adapt("m", "default", 0, 9, "k2", {}),
        lambda wanted: wanted.stop_adapting("m", "default", None),
        lambda wanted: wanted.stop_adapting("m", "default", "k1"),
        lambda wanted: wanted.remove("m", ["mine-0"]),
        lambda wanted: wanted.delete_group("m", "default"),
    ],
    ids=["scale", "adapt", "stop", "stop this one", "remove", "delete"],
)
def test_adaptive_scaling_that_was_replaced_changes_nothing(later):
    wanted = new(3)
    wanted.adapt("m", "default", **LIMITS)
    later(wanted)
    before = wanted.since(0)
    assert not wanted.resize("m", "default", 3, "k1")
    assert not wanted.shrink("m", "default", ["mine-1"], "k1")
    wanted.stop_adapting("m", "default", "k1")
    assert wanted.since(0) == before


def test_adaptive_scaling_of_one_group_leaves_the_others_alone():
    wanted = new(1, gpu={"target": 1})
    wanted.adapt("m", "gpu", **LIMITS)
    assert wanted.resize("m", "gpu", 2, "k1")
    assert not wanted.resize("m", "default", 2, "k1")
    assert wanted.shrink("m", "gpu", ["mine-0", "mine-gpu-0"], "k1")
    assert (target(wanted), target(wanted, "gpu")) == (1, 1)
    wanted.scale("m", "default", 3)
    assert wanted.resize("m", "gpu", 1, "k1")


# -- groups


def test_a_group_is_added_once():
    wanted = new()
    wanted.add_group("m", "gpu", {"cpu": 2}, 2)
    assert names(wanted, "gpu") == ["mine-gpu-0", "mine-gpu-1"]
    with pytest.raises(ValueError, match="invalid name='gpu': expected a name that no worker group"):
        wanted.add_group("other", "gpu", {"cpu": 4}, 1)
    assert wanted.groups["gpu"].options == {"cpu": 2}


def test_an_unknown_group_is_refused():
    with pytest.raises(ValueError, match="invalid worker_group='no': expected one of 'default', 'gpu'"):
        new(**GPU).scale("m", "no", 1)


def test_a_deleted_group_is_removed_after_its_last_session():
    wanted = new(gpu={"target": 2})
    wanted.launched("leader", ["mine-gpu-0"])
    wanted.delete_group("m", "gpu")
    assert [*wanted.sessions] == ["mine-gpu-0"]
    assert wanted.groups["gpu"].deleted
    wanted.stopped("leader", ["mine-gpu-0"])
    assert wanted.groups.keys() == {"default"}
    wanted = new(**GPU)
    wanted.delete_group("m", "gpu")
    assert wanted.groups.keys() == {"default"}


@pytest.mark.parametrize(
    "again",
    [
        lambda wanted: wanted.scale("m", "gpu", 1),
        lambda wanted: wanted.adapt("m", "gpu", 1, 1, "k1", {}),
        lambda wanted: wanted.add_group("m", "gpu", {}, 1),
        lambda wanted: wanted.keep("leader", ["mine-gpu-0"], {"gpu": 1}),
    ],
    ids=["scale", "adapt", "add", "keep"],
)
def test_a_deleted_group_that_is_wanted_again_stays(again):
    wanted = new(gpu={"target": 1})
    wanted.launched("leader", ["mine-gpu-0"])
    wanted.delete_group("m", "gpu")
    again(wanted)
    wanted.stopped("leader", ["mine-gpu-0"])
    assert names(wanted, "gpu") == ["mine-gpu-1"]


# -- what happened to sessions


def test_the_launcher_of_a_session_is_the_manager_that_reports_it():
    wanted = new(1)
    wanted.launched("other", ["mine-0"])
    entry = wanted.sessions["mine-0"]
    assert (entry.launched, entry.manager) == (True, "other")
    wanted.launched("other", ["mine-5"])  # which nobody wants any more
    assert names(wanted) == ["mine-0"]


def test_a_session_of_another_cluster_is_refused():
    wanted = new()
    for name in "mine", "mine-", "others-0", "mine-0-1":
        with pytest.raises(ValueError, match=f"invalid session '{name}': expected"):
            wanted.launched("m", [name])


def test_connected_dask_workers_are_those_of_a_session():
    wanted = new(gpu={"options": {"processes": 2}, "target": 1})
    for name in "mine-gpu-0-0", "mine-gpu-0-1", "mine-gpu-7-0", "users":
        wanted.connected(name)
    assert wanted.sessions["mine-gpu-0"].seen == {"mine-gpu-0-0", "mine-gpu-0-1"}


def test_a_stopped_session_that_is_wanted_is_replaced():
    wanted = new(1, launched=1)
    wanted.stopped("m", ["mine-0", "unknown"])
    assert [*wanted.sessions] == names(wanted) == ["mine-1"]


# -- operations of managers


def test_a_wish_that_is_sent_again_is_carried_out_once():
    wanted = new()
    wish = {"op": "add_group", "group": "gpu", "options": {}, "n": 0, "wish": 1}
    assert wanted.apply("m", wish) is None
    revision = wanted.changes.revision
    assert wanted.apply("m", wish) is None
    assert wanted.changes.revision == revision
    # Another manager counts its own wishes.
    assert "invalid name='gpu'" in wanted.apply("other", wish)["error"]
    assert "invalid name='gpu'" in wanted.apply("other", wish)["error"]
    assert "invalid name='gpu'" in wanted.apply("m", {**wish, "wish": 2})["error"]


def test_the_kept_answers_of_many_managers_are_few():
    wanted = new()
    for manager in range(110):
        for wish in range(110):
            wanted.apply(f"m{manager}", {"op": "scale", "group": "default", "n": 1, "wish": wish})
    assert len(wanted._answered._results) == 10_000


# -- what managers are told


def test_a_manager_first_gets_the_whole_state_and_then_changes():
    wanted = new(2, gpu={"target": 1})
    first = wanted.since(0)
    assert first["whole"]
    assert first["leader"] == "leader"
    assert first["groups"].keys() == {"default", "gpu"}
    assert "names" not in first["groups"]["default"]
    assert first["sessions"]["mine-gpu-0"] == {
        "group": "gpu",
        "manager": "leader",
        "launched": False,
        "leaving": False,
        "last": None,
        "seen": [],
        "wanted": True,
    }
    unchanged = wanted.since(first["revision"])
    assert (unchanged["whole"], unchanged["groups"], unchanged["sessions"]) == (False, None, {})
    wanted.launched("leader", ["mine-0"])
    change = wanted.since(first["revision"])
    assert {*change["sessions"]} == {"mine-0"}
    assert change["groups"] is None
    wanted.stopped("leader", ["mine-0"])
    assert wanted.since(change["revision"])["sessions"]["mine-0"] is None


def test_a_manager_that_missed_too_much_gets_all():
    wanted = new(1)
    known = wanted.changes.revision
    for name in range(60_000):
        wanted.changes.touch(("worker", f"tcp://{name}"))
    assert len(wanted.changes._changed) < 60_000
    assert wanted.since(known)["whole"]
    assert not wanted.since(wanted.changes.revision - 1)["whole"]


def test_a_revision_of_another_scheduler_is_not_known():
    wanted = new(1)
    assert wanted.since(wanted.changes.revision + 10)["whole"]


def test_managers_get_the_new_leader():
    wanted = new()
    known = wanted.changes.revision
    wanted.lead("leader")
    assert wanted.changes.revision == known
    wanted.lead("other")
    assert wanted.since(known)["leader"] == "other"


def test_a_wish_that_comes_after_a_younger_one_of_another_manager_changes_nothing():
    wanted = Wanted("mine", "m1")
    scale = {"op": "scale", "group": "default", "wish": 1}
    wanted.apply("m1", {**scale, "n": 2, "age": 2.0}, now=100.0)
    late = wanted.apply("m2", {**scale, "n": 5, "age": 60.0}, now=110.0)
    assert late == {"error": "another manager has changed worker group 'default' since this request"}
    assert wanted.groups["default"].target == 2
    wanted.apply("m2", {**scale, "wish": 2, "n": 6, "age": 0.0}, now=111.0)
    wanted.apply("m1", {**scale, "wish": 2, "n": 7, "age": 0.5}, now=111.1)  # both were on their way
    assert wanted.groups["default"].target == 7
    wanted.apply("m1", {**scale, "wish": 3, "n": 8, "age": 30.0}, now=112.0)  # the message before took long
    assert wanted.groups["default"].target == 8


def test_a_removal_that_comes_after_a_younger_wish_of_another_manager_changes_nothing():
    wanted = Wanted("mine", "m1", {"default": {"target": 3}})
    adapt = {"op": "adapt", "group": "default", "minimum": 0, "maximum": 10, "key": "k", "options": {}}
    wanted.apply("m2", {**adapt, "wish": 1, "age": 0.0}, now=100.0)
    late = wanted.apply("m1", {"op": "remove", "wish": 1, "names": ["mine-2"], "age": 60.0}, now=110.0)
    assert "another manager has changed worker group 'default'" in late["error"]
    group = wanted.groups["default"]
    assert (group.target, group.adapting["key"], len(names(wanted))) == (3, "k", 3)


def test_another_scheduler_has_no_group_that_was_to_be_deleted():
    wanted = Wanted("mine", "m1", {"default": {}, "big": {"target": 1}})
    wanted.apply("m1", {"op": "launched", "names": ["mine-big-0"]})
    wanted.apply("m1", {"op": "delete_group", "group": "big"})
    assert wanted.groups["big"].deleted
    assert [*Wanted("mine", "m1", wanted.to_json()).groups] == ["default"]
