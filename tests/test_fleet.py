"""What a user asks for is never lost, whatever the manager finds at the same moment."""

from __future__ import annotations

import random
import threading

import pytest

from dask_cml.errors import CMLError
from dask_cml.manager.fleet import Fleet
from dask_cml.options import Options


def new(processes: int = 1) -> Fleet[str]:
    return Fleet(Options.read(name="mine", processes=processes))


def of(n: int, processes: int = 1) -> Fleet[str]:
    """Return a fleet that is asked for `n` sessions, which the other managers know."""
    fleet = new(processes)
    fleet.resize(n)
    fleet.take_claims()
    return fleet


def launched(fleet: Fleet[str], n: int) -> None:
    """Give the first `n` missing keys a session."""
    for key in fleet.missing[:n]:
        fleet.launched(key, f"session of {key}")


def test_the_last_of_many_threads_wins():
    fleet = new()

    def scale(seed: int) -> None:
        luck = random.Random(seed)
        for _ in range(200):
            fleet.resize(luck.randrange(12))
            fleet.trim(fleet.keys[::-1])

    threads = [threading.Thread(target=scale, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fleet.resize(2)
    fleet.trim(fleet.keys[::-1])
    assert (fleet.group().target, len(fleet.keys)) == (2, 2)


def test_keys_are_never_used_twice():
    fleet = of(2)
    fleet.replace(["mine-0"])
    assert fleet.keys == ["mine-1", "mine-2"]


def test_a_refusal_lowers_the_target_to_what_was_granted():
    fleet = of(8)
    wish, missing = fleet.group().wishes, fleet.missing
    launched(fleet, 5)
    assert fleet.refuse(missing, wish) == (5, 8)
    assert (fleet.group().target, len(fleet.keys)) == (5, 5)


def test_a_refusal_leaves_a_smaller_wish_as_it_is():
    fleet = of(8)
    wish, missing = fleet.group().wishes, fleet.missing
    launched(fleet, 5)
    fleet.resize(1)
    assert fleet.refuse(missing, wish) is None
    assert fleet.group().target == 1
    fleet.trim(fleet.keys[::-1])
    assert len(fleet.keys) == 1


def test_a_refusal_of_an_older_wish_does_not_lower_a_new_one():
    fleet = of(8)
    wish, missing = fleet.group().wishes, fleet.missing
    launched(fleet, 5)
    fleet.resize(8)
    assert fleet.refuse(missing, wish) is None
    assert fleet.missing == ["mine-5", "mine-6", "mine-7"]


def test_adaptive_scaling_that_has_ended_has_no_say():
    fleet = new()
    adaptive = object()
    fleet.drive(adaptive)
    assert fleet.resize(3, adaptive)
    fleet.resize(0)
    assert not fleet.resize(3, adaptive)
    assert not fleet.remove(["mine-0"], adaptive)
    assert fleet.group().target == 0


def test_another_manager_is_not_followed_while_a_wish_is_untold():
    fleet = new()
    fleet.resize(5)
    assert not fleet.follow(1)
    assert not fleet.follow(1, ["mine-0"])
    assert (fleet.group().target, len(fleet.keys)) == (5, 5)
    assert fleet.take_claims() == {"default": 5}
    assert fleet.take_claims() == {}
    assert fleet.follow(1, ["other-0"])
    assert (fleet.group().target, fleet.keys) == (1, ["other-0"])


def test_a_claim_that_could_not_be_told_is_told_with_the_newest_target():
    fleet = new()
    fleet.resize(5)
    fleet.take_claims()
    fleet.resize(4)
    fleet.claim(["default"])
    assert fleet.take_claims() == {"default": 4}
    assert fleet.take_claims() == {}


def test_only_what_is_too_many_is_trimmed():
    fleet = of(4)
    chosen = fleet.keys[:3]
    fleet.resize(1)
    fleet.resize(3)
    assert fleet.trim(chosen) == ["mine-0"]
    assert fleet.trim(chosen) == []


def test_lost_sessions_that_nobody_wants_are_not_replaced():
    fleet = of(3)
    fleet.resize(1)
    fleet.trim(["mine-2", "mine-1"])
    assert fleet.replace(["mine-2", "mine-0"]) == ["mine-0"]
    assert fleet.keys == ["mine-3"]


def test_a_lost_session_is_not_replaced_while_there_are_too_many():
    fleet = of(3)
    fleet.resize(2)
    assert fleet.replace(["mine-1"]) == ["mine-1"]
    assert fleet.keys == ["mine-0", "mine-2"]


def test_what_is_removed_lowers_the_target():
    fleet = of(3)
    fleet.remove(["mine-1", "unknown"])
    assert (fleet.group().target, fleet.keys) == (2, ["mine-0", "mine-2"])
    fleet.resize(1)  # one of the two is still to be picked
    fleet.remove(["mine-0"])
    assert (fleet.group().target, fleet.keys) == (1, ["mine-2"])


def test_a_session_that_keeps_its_data_raises_the_target():
    fleet = of(1)
    launched(fleet, 1)
    fleet.resize(0)
    fleet.trim(["mine-0"])
    assert fleet.unwanted_workers == {"mine-0": "session of mine-0"}
    fleet.keep("mine-0")
    assert (fleet.group().target, fleet.keys, fleet.unwanted_workers) == (1, ["mine-0"], {})


def test_attached_sessions_keep_their_names_for_themselves():
    fleet = new()
    fleet.attach("mine-7", "session")
    fleet.resize(2)
    assert fleet.keys == ["mine-7", "mine-8"]
    assert fleet.drop("mine-7") == "session"
    assert fleet.drop("mine-7") is None


def test_workers_of_several_processes_have_their_sessions_name():
    fleet = of(2, processes=2)
    assert fleet.dask_names("mine-0") == ["mine-0-0", "mine-0-1"]
    assert fleet.arrived({"mine-1-1", "mine-0"}) == {"mine-1"}


@pytest.mark.parametrize(
    "wish", [lambda f: f.resize(1), lambda f: f.remove(["x"]), lambda f: f.drive(object())]
)
def test_a_closed_cluster_takes_no_wishes(wish):
    fleet = of(1)
    fleet.close()
    with pytest.raises(CMLError, match="cannot scale cluster mine: it is closed"):
        wish(fleet)
    assert not fleet.follow(3)
    fleet.clear()
    assert fleet.keys == []


def test_each_group_is_scaled_by_itself():
    fleet = of(2)
    fleet.add_group("gpu", Options.read(name="mine", processes=2))
    fleet.resize(1, group="gpu")
    assert fleet.take_claims() == {"gpu": 1}
    assert fleet.keys == ["mine-0", "mine-1", "mine-gpu-0"]
    assert fleet.dask_names("mine-gpu-0") == ["mine-gpu-0-0", "mine-gpu-0-1"]
    fleet.replace(["mine-gpu-0"])
    fleet.resize(1)
    fleet.trim(fleet.keys)
    assert fleet.keys == ["mine-1", "mine-gpu-1"]


def test_adaptive_scaling_of_one_group_has_no_say_in_another():
    fleet = of(1)
    fleet.add_group("gpu", Options.read(name="mine"))
    adaptive = object()
    fleet.drive(adaptive, "gpu")
    assert fleet.resize(2, adaptive, "gpu")
    assert not fleet.resize(2, adaptive)
    assert not fleet.remove(["mine-0"], adaptive)
    assert fleet.remove(["mine-gpu-0"], adaptive)
    assert (fleet.group().target, fleet.group("gpu").target) == (1, 1)
    fleet.resize(3)
    assert fleet.resize(1, adaptive, "gpu")


def test_a_group_ends_when_its_last_session_has_gone():
    fleet = of(0)
    fleet.add_group("gpu", Options.read(name="mine"))
    fleet.resize(1, group="gpu")
    launched(fleet, 1)
    assert not fleet.forget_ended_group("gpu")
    fleet.end_group("gpu")
    assert fleet.unwanted_workers.keys() == {"mine-gpu-0"}
    assert not fleet.forget_ended_group("gpu")
    fleet.stopped("mine-gpu-0")
    assert fleet.forget_ended_group("gpu")
    assert fleet.groups == ["default"]


def test_a_group_that_is_scaled_again_does_not_end():
    fleet = of(0)
    fleet.add_group("gpu", Options.read(name="mine"))
    fleet.end_group("gpu")
    fleet.resize(1, group="gpu")
    assert not fleet.forget_ended_group("gpu")
    fleet.end_group("gpu")
    fleet.take_claims()
    fleet.follow(2, group="gpu")
    assert not fleet.forget_ended_group("gpu")


def test_a_session_that_keeps_its_data_keeps_its_group():
    fleet = of(0)
    fleet.add_group("gpu", Options.read(name="mine"))
    fleet.resize(1, group="gpu")
    launched(fleet, 1)
    fleet.end_group("gpu")
    fleet.keep("mine-gpu-0")
    assert fleet.group("gpu").target == 1
    assert not fleet.forget_ended_group("gpu")
