"""What a manager knows of the workers: the answers of the scheduler, and its own wishes until then."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from fleets import Cluster, dask_worker

from dask_cml.errors import CMLError
from dask_cml.scheduler.wanted import Wanted


def seen(fleet, group="default"):
    """The target of a group, and the names of its wanted sessions."""
    state = fleet.group(group)
    return state.wanted.target, [*state.names]


# -- wishes


def test_a_wish_counts_before_the_scheduler_has_answered():
    mine = Cluster(1)
    mine.fleet.wish("scale", group="default", n=3)
    assert seen(mine.fleet) == (3, ["mine-0", "mine-1", "mine-2"])
    assert mine.fleet.names == ["mine-0", "mine-1", "mine-2"]
    assert [member.name for member in mine.fleet.members] == ["mine-0"]
    mine.carry_out()
    assert seen(mine.fleet) == (3, ["mine-0", "mine-1", "mine-2"])
    assert mine.fleet.wishes == []


@pytest.mark.parametrize(
    ("wishes", "after"),
    [
        ([("scale", {"n": 3}), ("scale", {"n": 1})], 1),
        ([("adapt", {"minimum": 2, "maximum": 5, "key": "k", "options": {}})], 3),
        ([("adapt", {"minimum": 4, "maximum": None, "key": "k", "options": {}})], 4),
        ([("scale", {"n": 9}), ("adapt", {"minimum": 0, "maximum": 2, "key": "k", "options": {}})], 2),
        ([("delete_group", {})], 0),
    ],
)
def test_the_last_wishes_of_a_group_count(wishes, after):
    """As the scheduler carries them out."""
    mine = Cluster(gpu={"target": 3})
    for op, arguments in wishes:
        mine.fleet.wish(op, group="gpu", **arguments)
    assert mine.fleet.group("gpu").wanted.target == after
    assert mine.fleet.group().wanted.target == 0
    adapts = wishes[-1][0] == "adapt"
    assert (mine.fleet.group("gpu").wanted.adapting is not None) == adapts
    if wishes[-1][0] != "delete_group":
        mine.carry_out()
        assert mine.fleet.group("gpu").wanted.target == after
        assert (mine.fleet.group("gpu").wanted.adapting is not None) == adapts


def test_a_removed_session_lowers_the_target_at_once():
    mine = Cluster(3)
    mine.fleet.wish("remove", names=["mine-1", "unknown"])
    assert mine.fleet.group().wanted.target == 2
    mine.carry_out()
    assert seen(mine.fleet) == (2, ["mine-0", "mine-2"])


def test_a_wish_replaces_earlier_ones_of_its_group():
    mine = Cluster(gpu={})
    for group in "default", "gpu":
        for n in range(50):
            mine.fleet.wish("scale", group=group, n=n)
    mine.fleet.wish("remove", names=["mine-0"])
    assert [(each["op"], each.get("group"), each.get("n")) for each in mine.fleet.wishes] == [
        ("scale", "default", 49),
        ("scale", "gpu", 49),
        ("remove", None, None),
    ]


def test_the_last_wish_of_many_threads_counts():
    mine = Cluster()

    def scale(seed):
        luck = random.Random(seed)
        for _ in range(200):
            mine.fleet.wish("scale", group="default", n=luck.randrange(12))
            names = mine.fleet.names
            assert len(names) == len({*names})

    with ThreadPoolExecutor(8) as threads:
        scaling = [threads.submit(scale, seed) for seed in range(8)]
        while not all(each.done() for each in scaling):
            mine.carry_out()
    for each in scaling:
        each.result()
    mine.fleet.wish("scale", group="default", n=2)
    mine.carry_out()
    assert mine.fleet.group().wanted.target == mine.wanted.groups["default"].target == 2


def test_a_closed_cluster_refuses_wishes():
    mine = Cluster(1)
    mine.fleet.close()
    with pytest.raises(CMLError, match="cannot scale cluster mine: it is closed"):
        mine.fleet.wish("scale", group="default", n=3)
    mine.fleet.clear()
    assert (seen(mine.fleet), mine.fleet.members, mine.fleet.observed) == ((0, []), [], set())


# -- groups


def test_an_unknown_group_is_refused():
    with pytest.raises(ValueError, match="invalid worker_group='no': expected one of 'default', 'gpu'"):
        Cluster(gpu={}).fleet.group("no")


def test_groups_follow_the_answers_of_the_scheduler():
    mine = Cluster()
    mine.wanted.add_group("m2", "gpu", {"nvidia_gpu": 2, "processes": 2}, 1)
    mine.answer()
    assert mine.fleet.groups == ["default", "gpu"]
    assert mine.fleet.group("gpu").options.nvidia_gpu == 2
    assert mine.fleet.options_of("gpu").processes == 2
    assert not mine.fleet.group("gpu").wanted.deleted
    mine.launch("mine-gpu-0")
    mine.wanted.delete_group("m2", "gpu")
    mine.answer()
    assert mine.fleet.group("gpu").wanted.deleted
    mine.wanted.stopped("m1", ["mine-gpu-0"])
    mine.answer()
    assert mine.fleet.groups == ["default"]
    assert mine.fleet.options_of("gpu") is mine.fleet.options


def test_a_group_that_is_added_again_has_its_new_options():
    mine = Cluster(gpu={"options": {"cpu": 2}})
    assert mine.fleet.group("gpu").options.cpu == 2
    mine.wanted.delete_group("m2", "gpu")
    mine.wanted.add_group("m2", "gpu", {"cpu": 4}, 0)
    mine.answer()
    assert mine.fleet.group("gpu").options.cpu == 4


def test_a_group_that_a_newer_release_has_added_is_ignored(caplog):
    mine = Cluster(1)
    mine.wanted.add_group("m2", "new", {"colour": "blue"}, 1)
    mine.answer()
    assert mine.fleet.groups == ["default"]
    assert "Worker group new of cluster mine ignored" in caplog.text
    assert seen(mine.fleet) == (1, ["mine-0"])
    assert [each.name for each in mine.fleet.unlaunched] == ["mine-0"]


# -- sessions and Dask workers


def test_a_session_has_arrived_once_one_of_its_dask_workers_is_connected():
    mine = Cluster(2, processes=2, gpu={"options": {"processes": 1}, "target": 1})
    member = mine.fleet.member("mine-0")
    for connected, arrived, whole in (["mine-0-1"], {"mine-0"}, False), (["mine-0-0"], {"mine-0"}, True):
        mine.connect(*connected)
        assert mine.fleet.arrived("default") == arrived
        assert (member.is_whole, member.has_registered) == (whole, whole)
    mine.connect("mine-gpu-0", "users")
    assert mine.fleet.arrived() == {"mine-0", "mine-gpu-0"}
    assert mine.fleet.observed == {"mine-0-0", "mine-0-1", "mine-gpu-0", "users"}
    mine.disconnect("mine-0-0")
    assert (member.is_whole, member.has_registered) == (False, True)
    mine.disconnect("mine-0-1", "users")
    assert mine.fleet.arrived("default") == set()
    assert mine.fleet.observed == {"mine-gpu-0"}


def test_a_dask_worker_that_comes_back_at_another_address_is_connected():
    """Its old connection may end after that."""
    mine = Cluster(1)
    mine.connect("mine-0")
    mine.connected = {"tcp://new": "mine-0"}
    mine.answer()
    mine.gone = ["tcp://mine-0"]
    mine.answer()
    assert mine.fleet.arrived() == {"mine-0"}
    assert mine.fleet.member("mine-0").connected == ["mine-0"]


@pytest.mark.parametrize("name", [5, 0.5, ("mine", 0), "", "mine", "mine-", "others-0"])
def test_dask_workers_of_the_user_are_observed_only(name):
    mine = Cluster(1)
    mine.connected = {"tcp://10.0.0.1:1": name}
    mine.answer()
    assert mine.fleet.observed == {name}
    assert mine.fleet.arrived() == set()


def test_a_session_that_another_manager_stopped_is_gone():
    mine = Cluster(2)
    mine.launch("mine-0")
    mine.wanted.replace("m1", ["mine-0"], {})
    mine.wanted.stopped("m2", ["mine-0"])
    mine.answer()
    member = mine.fleet.member("mine-0")
    assert (member.gone, member.wanted) == (True, False)
    assert mine.fleet.detach("mine-0").session_id == "session of mine-0"
    assert mine.fleet.member("mine-0") is None
    assert mine.fleet.detach("mine-0") is None


def test_a_manager_knows_its_launched_session_before_the_scheduler_does():
    mine = Cluster()
    mine.fleet.attach("mine-3", SimpleNamespace(waits_for=None))
    mine.answer()
    assert {*mine.fleet.workers} == {"mine-3"}
    assert not mine.fleet.member("mine-3").wanted
    assert mine.fleet.names == []


def test_sessions_that_wait_for_room_are_wanted_ones_that_never_connected():
    mine = Cluster(4)
    mine.launch("mine-0", "mine-1", "mine-2", "mine-3")
    for name in "mine-0", "mine-1", "mine-2":
        mine.fleet.workers[name].waits_for = 9.0
    mine.connect("mine-1")
    mine.disconnect("mine-1")
    mine.wanted.replace("m1", ["mine-2"], {})
    mine.answer()
    assert mine.fleet.waits() == {"mine-0": 9.0}


def test_a_wish_to_stop_adapting_counts_before_the_scheduler_has_answered():
    mine = Cluster(1)
    mine.fleet.wish("adapt", group="default", minimum=1, maximum=3, key="a", options={})
    mine.fleet.wish("stop_adapting", group="default", key="another")
    assert mine.fleet.group().wanted.adapting["maximum"] == 3
    mine.fleet.wish("stop_adapting", group="default", key="a")
    assert mine.fleet.group().wanted.adapting is None


# -- answers


def test_an_answer_that_comes_late_changes_nothing():
    mine = Cluster(1)
    late = {**mine.wanted.since(1), "workers": {"tcp://old": dask_worker("mine-0")}}
    mine.wanted.scale("m2", "default", 3)
    mine.connect("mine-0")
    mine.fleet.update(late)
    assert seen(mine.fleet)[0] == 3
    assert mine.fleet.member("mine-0").connected == ["mine-0"]


def test_a_whole_answer_replaces_all():
    """As from the next scheduler, which counts its revisions anew."""
    mine = Cluster(3)
    mine.launch("mine-0")
    mine.connect("mine-0", "users")
    for n in 5, 1, 2:
        mine.wanted.scale("m2", "default", n)
        mine.answer()
    mine.wanted = Wanted("mine", "m2", {"default": {"target": 1, "number": 9}})
    mine.connected = {"tcp://new": "mine-9"}
    mine.answer()
    assert (mine.fleet.leader, mine.fleet.revision) == ("m2", mine.wanted.changes.revision)
    assert seen(mine.fleet) == (1, ["mine-9"])
    assert mine.fleet.observed == {"mine-9"}
    assert mine.fleet.member("mine-0").gone
    assert (mine.fleet.tasks_done, mine.fleet.managers) == (7, 2)


@pytest.mark.parametrize("count", ["many", None, float("nan"), -1])
@pytest.mark.parametrize("what", ["tasks_done", "managers", "age", "most_age"])
def test_an_invalid_answer_changes_nothing(what, count):
    mine = Cluster(1)
    mine.wanted.scale("m2", "default", 3)
    before = mine.fleet.revision
    with pytest.raises(ValueError, match=f"the scheduler's answer is invalid: {what}="):
        mine.fleet.update({**mine.wanted.since(before), "workers": {}, what: count})
    assert mine.fleet.revision == before


def test_a_manager_asks_again_for_an_answer_that_it_cannot_read():
    mine = Cluster(1)
    mine.wanted.scale("m2", "default", 3)
    before = mine.fleet.revision
    answer = mine.wanted.since(before)
    with pytest.raises(TypeError):
        mine.fleet.update({**answer, "sessions": {"mine-0": "wanted"}, "workers": {}})
    assert mine.fleet.revision == before
    mine.answer()
    assert mine.fleet.group().wanted.target == 3


def test_full_workers_are_counted_while_another_thread_takes_an_answer():
    mine = Cluster(1)
    answers = []

    class Worker(dict):
        def get(self, *key):
            while answers:  # the other thread has its answer while this one looks at the workers
                answer = answers.pop()
                threads.append(threading.Thread(target=mine.fleet.update, args=[answer]))
                threads[-1].start()
                threads[-1].join(0.2)
            return super().get(*key)

    threads = []
    first = {"tcp://a": Worker(dask_worker("a")), "tcp://b": Worker(dask_worker("b"))}
    whole = {**mine.wanted.since(0), "whole": True}
    mine.fleet.update({**whole, "workers": first})
    answers.append({**whole, "workers": {"tcp://c": dask_worker("c")}})
    assert mine.fleet.full is None
    for thread in threads:
        thread.join()
    assert mine.fleet.observed == {"c"}
