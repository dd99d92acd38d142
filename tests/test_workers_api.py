"""The Workers API, called with care: what is retried, what is stopped, and in which threads."""

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import dask.config
import pytest
from simulated.faults import HTTPError, JSONDecodeError, ProtocolError
from simulated.platform import SimulatedPlatform
from simulated.testing import eventually

from dask_cml import CallFailed, CMLError, LaunchRefused, NotOnCML, local
from dask_cml.cancellation import start_call
from dask_cml.options import SessionSize
from dask_cml.sessions import workers_api
from dask_cml.sessions.plan import SessionPlan
from dask_cml.sessions.workers_api import WorkersAPI, has_ended, load_platform

SIZE = SessionSize(cpu=1.5, memory=2, nvidia_gpu=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(workers_api, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(workers_api, "_LONGEST_PAUSE", 0.004)
    with dask.config.set({"cml.api.poll-interval": "10ms", "cml.api.retries": 3, "cml.api.timeout": "30s"}):
        yield


@pytest.fixture
def stub():
    """The platform, where another session of the user's, not launched by us, must run to the end."""
    stub = SimulatedPlatform()
    [others] = stub.launch_workers(1, 1, 1)
    stub.calls.clear()
    yield stub
    assert () not in stub.arguments("stop_workers")
    assert others["id"] in stub.live


@pytest.fixture
def make(stub):
    made = []

    def make(**settings):
        keys = {f"cml.api.{name.replace('_', '-')}": value for name, value in settings.items()}
        with dask.config.set(keys):
            made.append(WorkersAPI(stub))
        return made[-1]

    yield make
    stub.heal()
    for api in made:
        api.end()


@pytest.fixture
def api(make):
    return make()


@pytest.fixture
def left(stub):
    others = set(stub.live)
    return lambda: set(stub.live) - others


def plan(name, code="pass", **more):
    return SessionPlan(name, name, name, SIZE, code, **{"env": {}, "log": Path(), **more})


async def launch(api, n=1):
    return [s["id"] for s in await asyncio.gather(*[api.launch(plan(f"s{i}")) for i in range(n)])]


async def do(api, function):
    if function == "launch_workers":
        await api.launch(plan("mine"))
    elif function == "list_workers":
        await api.sessions()
    else:
        await api.stop(*api.live)


FUNCTIONS = ["launch_workers", "list_workers", "stop_workers"]

# -- launch


async def test_each_session_is_launched_alone_with_the_given_options(stub, api):
    session = await api.launch(plan("mine", env={"A": "1"}, launch_options={"accelerator_label_id": 7}))
    [sent] = stub.arguments("launch_workers")
    size = {"cpu": 1.5, "memory": 2, "nvidia_gpu": 1}
    given = {"code": "pass", "env": {"A": "1"}, "name": "mine", "accelerator_label_id": 7}
    assert {"n": 1, **size, **given}.items() <= sent.items()
    assert api.live == {session["id"]: "mine"}


@pytest.mark.parametrize("newer", [True, False])
async def test_unknown_launch_options_are_refused_by_name_before_any_call(newer):
    stub = SimulatedPlatform(named=newer)
    api = WorkersAPI(stub)
    options = {"kernel": "r", "zone": 1, "colour": 2}
    with pytest.raises(
        ValueError, match=r"'colour', 'zone': expected parameters of the installed launch_workers: n, cpu, "
    ):
        await api.launch(plan("mine", launch_options=options))
    with pytest.raises(ValueError, match="'colour', 'zone'"):
        api.check_options(options)
    api.check_options(["kernel"])
    assert stub.calls == []


async def test_a_refused_launch_shows_the_reason_and_stops_the_half_created_session(stub, api, left):
    for n, codes in enumerate([[], [503], [403]], start=1):
        stub.refuse(message="failed to launch", k8s_message="exceeded quota: cpu")
        stub.answer_stop(*codes)
        with pytest.raises(LaunchRefused, match="mine") as caught:
            await api.launch(plan("mine"))
        assert caught.value.reason == "failed to launch. exceeded quota: cpu"
        half_made = [*stub.all][-1]
        assert stub.arguments("stop_workers")[-1] == (half_made,)
        assert stub.count("launch_workers") == n
        assert api.live.get(half_made) == ("mine" if codes else None)
    await api.close()
    assert not left()
    assert not api.live


async def test_a_refusal_that_counts_sessions_says_what_helps(stub, api):
    """Kubernetes begins each refusal with the name of the pod, so `pods` alone counts nothing."""
    quota = 'pods "x7" is forbidden: exceeded quota: q, requested: '
    for k8s_message, counts in [
        ("exceeded quota: pods", True),
        (f"{quota}pods=1, used: pods=50, limited: pods=50", True),
        (f"{quota}count/pods=1, limited: count/pods=50", True),
        ("You have reached your limit of 50 pods", True),
        (f"{quota}limits.cpu=4, limited: limits.cpu=8", False),
        ("podsecurity forbids it", False),
    ]:
        stub.refuse(k8s_message=k8s_message)
        with pytest.raises(LaunchRefused) as caught:
            await api.launch(plan("mine"))
        assert ("fewer, larger workers" in caught.value.reason) == counts
        assert ("OVERRIDE_PODQUOTA" in caught.value.reason) == counts


async def test_a_launch_is_retried_after_stopped_sessions_have_freed_the_quota(stub, api):
    [stopped] = await launch(api)
    await api.stop(stopped)
    # It has ended when the refusal arrives, but the platform may have counted it before.
    stub.refuse()
    await launch(api)
    assert stub.count("launch_workers") == 3
    stub.refuse()
    with pytest.raises(LaunchRefused):
        await launch(api)
    assert stub.count("launch_workers") == 4


async def test_only_an_answer_with_a_reason_is_a_refusal(stub, api):
    limit = "You have reached your limit of 2 sessions"
    for answer, words in [
        ({"k8sMessage": "no room"}, "no room"),
        ({"message": "no", "k8sMessage": "exceeded quota", "engineId": ""}, "no. exceeded quota"),
        ({"message": limit}, limit),
        ({"message": "Forbidden"}, "Forbidden"),
        ({"id": None, "message": "Quota exceeded"}, "Quota exceeded"),
    ]:
        before = stub.count("launch_workers")
        stub.say("launch_workers", [answer])
        with pytest.raises(LaunchRefused) as caught:
            await api.launch(plan("mine"))
        assert caught.value.reason == words
        assert not api.live
        assert stub.count("launch_workers") - before == 1
    assert stub.count("stop_workers") == 0


UNAUTHORIZED = {"message": "Unauthorized"}
#: What each function may answer that is no answer, and what is told of it if it lasts.
WRONG = [
    ("launch_workers", [{"message": "Internal Server Error"}], "Internal Server Error"),
    ("launch_workers", [{"message": "context deadline exceeded"}], "context deadline exceeded"),
    ("launch_workers", [{"message": "Rate limit exceeded"}], "Rate limit exceeded"),
    ("launch_workers", UNAUTHORIZED, "Unauthorized"),
    ("launch_workers", [{}], "with a dict instead of a session"),
    ("launch_workers", [{"id": None}], "with a dict instead of a session"),
    ("launch_workers", [], "with a list instead of a session"),
    ("launch_workers", None, "with a NoneType instead of a session"),
    ("list_workers", UNAUTHORIZED, "Unauthorized"),
    ("list_workers", {"message": "Internal Server Error"}, "Internal Server Error"),
    ("list_workers", ["stub000000000000"], "with a list instead of a session"),
    ("list_workers", None, "with a NoneType instead of a session"),
    ("stop_workers", UNAUTHORIZED, "Unauthorized"),
    ("stop_workers", [UNAUTHORIZED], "Unauthorized"),
    ("stop_workers", [], "with a NoneType instead of a session"),
    ("stop_workers", None, "with a NoneType instead of a session"),
]


@pytest.mark.parametrize(("function", "answer", "words"), WRONG)
async def test_a_malformed_answer_is_no_answer(stub, api, left, function, answer, words):
    """The call is tried again. An error says what the platform said if that lasts."""
    await launch(api)
    before = stub.count(function)
    stub.say(function, answer, answer)
    await do(api, function)
    assert stub.count(function) - before == 3
    await launch(api)
    stub.say(function, *[answer] * 4)
    with pytest.raises(CallFailed, match="4 tries") as caught:
        await do(api, function)
    if words == "Unauthorized":
        assert "CML refuses this session's CDSW_API_KEY (Unauthorized)" in str(caught.value)
    else:
        assert str(caught.value).endswith(words)
    assert "{" not in str(caught.value)
    assert api.problem == str(caught.value)
    await do(api, function)
    assert api.problem is None
    assert left() == {*api.live}


@pytest.mark.parametrize("function", FUNCTIONS)
async def test_temporary_errors_are_retried_until_the_time_limit(stub, api, function):
    for error in [
        *map(HTTPError, (500, 502, 503, 429, 408, 401)),
        ConnectionError("broken"),
        TimeoutError("timed out"),
        OSError("no route to host"),
        ProtocolError("incomplete read"),
        JSONDecodeError("no JSON"),
        json.JSONDecodeError("no JSON", "<html>", 0),
    ]:
        await launch(api)
        before = stub.count(function)
        stub.fail(function, error, error)
        await do(api, function)
        assert stub.count(function) - before == 3, error
    for error in HTTPError(503), ConnectionError("broken"):
        await launch(api)
        before = stub.count(function)
        stub.fail(function, *[error] * 4)
        with pytest.raises(CallFailed, match=r"^CML did not (launch|list|stop) .* in 4 tries, ") as caught:
            await do(api, function)
        assert caught.value.__cause__ is error
        assert str(caught.value).endswith(f"{type(error).__name__}: {error}")
        assert stub.count(function) - before == 1 + dask.config.get("cml.api.retries")
        await do(api, function)


@pytest.mark.parametrize("function", FUNCTIONS)
async def test_permanent_errors_are_raised_at_once(stub, api, function):
    """Those of the program as they are."""
    await launch(api)
    for error in (kind("no") for kind in (TypeError, ValueError, KeyError, AttributeError)):
        before = stub.count(function)
        stub.fail(function, error)
        with pytest.raises(type(error)) as caught:
            await do(api, function)
        assert caught.value is error
        assert stub.count(function) - before == 1
    no_key = RuntimeError("Environment variable CDSW_API_KEY is not set.")
    for error, words in [
        *[(HTTPError(status), f"HTTPError: {status} Error") for status in (400, 403, 404, 409)],
        (no_key, "CDSW_API_KEY is not set: restart the kernel, or start a new session"),
    ]:
        before = stub.count(function)
        stub.fail(function, error)
        with pytest.raises(CallFailed, match=rf"^CML did not \w+ [\w, ]+: {words}$") as caught:
            await do(api, function)
        assert caught.value.__cause__ is error
        assert stub.count(function) - before == 1
        assert api.problem == str(caught.value)


async def test_one_listing_serves_all_waiting_tasks_and_without_one_none_runs(stub, api):
    [session_id] = await launch(api)
    assert stub.count("list_workers") == 0
    listings = await asyncio.gather(*[api.sessions() for _ in range(100)])
    assert all(listing[session_id]["status"] == "starting" for listing in listings)
    await asyncio.sleep(0.1)
    assert stub.count("list_workers") == 1


async def test_a_cancelled_task_neither_cancels_nor_repeats_a_listing(stub, api):
    with stub.held("list_workers"):
        first, second = (asyncio.create_task(api.sessions()) for _ in range(2))
        await eventually(lambda: stub.under_way)
        first.cancel()
    assert await second
    assert first.cancelled()
    with stub.held("list_workers"):
        waiting = asyncio.create_task(api.sessions())
        await eventually(lambda: stub.under_way)
        waiting.cancel()
    await eventually(lambda: not stub.under_way)
    await asyncio.sleep(0.1)
    assert stub.count("list_workers") == 2


ENDED = ["succeeded", "failed", "stopped", "timedout", "skipped", "SKIPPED", "ENGINE_TIMEDOUT"]
LIVE = ["scheduling", "starting", "running", "stopping", "unknown", "ENGINE_RUNNING", "STOPPING"]


async def test_sessions_are_listed_with_the_documented_status_of_any_release(stub, api):
    statuses = [*ENDED, *LIVE, "\x1b[31mODD"]
    ids = await launch(api, len(statuses))
    stub.advances = False
    for session_id, status in zip(ids, statuses, strict=True):
        stub.set(session_id, status)
    found = await api.sessions()
    assert [has_ended(found[session_id]) for session_id in ids] == [status in ENDED for status in statuses]
    assert found[ids[statuses.index("ENGINE_RUNNING")]]["status"] == "running"
    assert found[ids[-1]]["status"] == "\\x1b[31modd"
    assert not has_ended({})


async def test_only_sessions_with_an_id_that_were_launched_or_adopted_are_stopped(stub, api):
    for session_id in ("", None, "../x", "ab cd"):
        with pytest.raises(ValueError, match=re.escape(f"invalid session id={session_id!r}: expected")):
            api.adopt(session_id, "night-1")
        await api.stop(session_id)
    await api.stop()
    await api.stop("stub000000000000")
    assert stub.calls == []


async def test_stop_ends_the_given_sessions_by_their_ids_and_no_others(stub, api, left):
    first, second, third = await launch(api, 3)
    await api.stop(first, third)
    assert {*stub.arguments("stop_workers")} == {(first,), (third,)}
    assert left() == {*api.live} == {second}
    stub.answer_stop(403)
    with pytest.raises(CMLError, match=f"{second}.*403"):
        await api.stop(second)
    assert stub.count("stop_workers") == 3
    assert {*api.live} == {second}
    stub.answer_stop(404)  # it is gone
    await api.stop(second)
    assert not api.live


@pytest.mark.parametrize("code", [403, 503])
async def test_of_several_sessions_only_those_that_were_not_stopped_are_named_and_tried_again(
    stub, api, left, code
):
    ids = await launch(api, 6)
    stub.denied[ids[2]] = code
    with pytest.raises(CallFailed, match=rf"^CML did not stop {ids[2]}(: | in .*: )CML answered {code}$"):
        await api.stop(*ids)
    assert left() == {*api.live} == {ids[2]}
    assert api.stopped == {*ids} - {ids[2]}
    with pytest.raises(CallFailed, match=f"did not stop {ids[2]}, which may still run: CML answered {code}"):
        await api.close()
    stub.denied.clear()
    await api.close()
    assert not left()


async def test_close_with_nothing_live_calls_nothing_and_nothing_is_launched_after_it(stub, api, caplog):
    caplog.set_level("INFO", "dask_cml")
    await api.close()
    await api.close()
    api.end()
    with pytest.raises(CMLError):
        await api.launch(plan("mine"))
    assert stub.calls == []
    assert "next try" not in caplog.text


async def test_close_stops_all_live_sessions_by_their_ids_and_may_be_called_again(stub, api, left):
    stopped, forgotten, *ids = await launch(api, 5)
    [elsewhere] = stub.launch_workers(1, 1, 1)
    api.adopt(elsewhere["id"], "theirs")
    ids.append(elsewhere["id"])
    await api.stop(stopped)
    api.forget(forgotten)
    assert api.live == {**{id: f"s{n}" for n, id in enumerate(ids[:3], 2)}, elsewhere["id"]: "theirs"}
    await asyncio.gather(api.close(), api.close())
    await api.close()
    assert {*stub.arguments("stop_workers")} == {(session_id,) for session_id in (stopped, *ids)}
    assert left() == {forgotten}
    assert not api.live


def test_a_signals_handler_may_end_it_while_a_session_is_entered(stub, api, left):
    class Interrupted(set):
        def add(self, session_id):
            super().add(session_id)
            api.end()

    api.launched = Interrupted()
    [session] = stub.launch_workers(1, 1, 1)
    api.adopt(session["id"], "mine")
    assert not left()


def test_end_needs_no_event_loop_and_names_what_it_could_not_stop(stub, api, left):
    ids = asyncio.run(launch(api, 3))
    for error in HTTPError(403), HTTPError(503):
        stub.fail("stop_workers", *[error] * 100)
        with pytest.raises(CMLError, match="may still run") as caught:
            api.end()
        assert all(session_id in str(caught.value) for session_id in ids)
        assert {*api.live} == left() == {*ids}
        stub.heal()
    api.end()
    assert not left()


@pytest.mark.parametrize("answered_before_close", [True, False])
async def test_a_launch_whose_task_is_cancelled_leaves_no_session(stub, api, left, answered_before_close):
    with stub.held("launch_workers") as release:
        task = asyncio.create_task(launch(api))
        await eventually(lambda: stub.under_way)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        if answered_before_close:
            release()
            await eventually(lambda: api.live)
        else:  # its process leaves the cluster before it shuts it down
            await api.leave(lambda: api.forget(*api.live.copy()))
        closing = asyncio.create_task(api.close())
        await asyncio.sleep(0)
        release()
    await closing
    assert stub.count("launch_workers") == 1
    assert not left()


@pytest.mark.parametrize("answer", [None, 403])
async def test_close_waits_for_launches_under_way_also_after_a_failed_stop(stub, api, left, answer):
    await launch(api)
    if answer:
        stub.answer_stop(answer)
    with stub.held("launch_workers") as release:
        launching = asyncio.create_task(launch(api, 3))
        await eventually(lambda: stub.under_way == 3)
        closing = asyncio.create_task(api.close())
        await eventually(lambda: stub.count("stop_workers"))
        assert not closing.done()
        release()
        await closing
    assert not left()
    assert not api.live
    assert stub.count("launch_workers") == 4
    await asyncio.wait([launching])


@pytest.mark.parametrize("how", ["answer", "error"])
async def test_a_refused_key_is_named_and_the_end_does_not_try_for_long_what_has_failed_for_long(
    stub, api, left, how, monkeypatch
):
    monkeypatch.setenv("CDSW_ENGINE_ID", "kbmjhsx8uobd5ks9")
    monkeypatch.delenv("CDSW_MASTER_ID", raising=False)
    await launch(api, 2)
    if how == "answer":
        stub.say("list_workers", *[UNAUTHORIZED] * 4)
        stub.answer_stop(*[401] * 100)
    else:
        stub.fail("list_workers", *[HTTPError(401)] * 4)
        stub.fail("stop_workers", *[HTTPError(401)] * 100)
    words = r"CML refuses .* CDSW_API_KEY \(.+\); if it was rotated, restart session kbmjhsx8uobd5ks9, with"
    with pytest.raises(CallFailed, match=words):
        await api.sessions()
    assert api.key_refused
    with pytest.raises(CallFailed, match=rf"which may still run: {words}"):
        await api.close()
    assert stub.count("stop_workers") <= 4
    stub.heal()
    await api.sessions()
    assert not api.key_refused
    await api.close()
    assert not left()


@pytest.mark.parametrize("function", FUNCTIONS)
async def test_a_call_that_hangs_is_abandoned_and_retried(stub, make, left, function):
    api = make(timeout="2s", threads=1)
    await launch(api)
    before = stub.count(function)
    with stub.hangs(function):
        await do(api, function)
        assert stub.count(function) - before == 2
        await launch(api)
        await do(api, function)
    await eventually(lambda: not stub.under_way)
    await eventually(lambda: left() == {*api.live})


async def test_launches_that_hang_delay_no_stop_and_no_list(stub, make, left, monkeypatch):
    monkeypatch.setattr(workers_api, "_MOST_HANGING", 1)
    api = make(timeout="300s", threads=1)
    session_ids = await launch(api)
    with stub.held("launch_workers"):
        launching = asyncio.create_task(launch(api))
        await eventually(lambda: stub.under_way)
        assert session_ids[0] in await asyncio.wait_for(api.sessions(), 120)
        await asyncio.wait_for(api.stop(*session_ids), 120)
        assert not launching.done()
    await launching
    await api.close()


async def test_a_call_that_hangs_for_ever_raises_an_error_and_few_hang_at_once(stub, make, monkeypatch):
    api = make(timeout="200ms", threads=1)
    with stub.hangs("list_workers", times=100):
        words = r"did not list sessions in 4 tries, .*: no answer within 0.2 s"
        with pytest.raises(CallFailed, match=words):
            await api.sessions()
        monkeypatch.setattr(workers_api, "_MOST_HANGING", 4)
        with pytest.raises(CallFailed, match="4 earlier calls have not returned"):
            await api.sessions()
        assert stub.count("list_workers") == 4
    await eventually(lambda: not stub.under_way)
    await api.sessions()


async def test_a_launch_that_hangs_is_repeated_once_until_it_returns(stub, make, left, monkeypatch):
    api = make(timeout="200ms", threads=1)
    with stub.hangs("launch_workers", times=3, after=True) as release:
        for _ in range(2):
            with pytest.raises(CallFailed, match="no answer within"):
                await api.launch(plan("mine"))
        assert stub.count("launch_workers") == 2
        launching = asyncio.create_task(api.launch(plan("mine")))
        release()
        assert (await launching)["id"] in left()
    assert stub.count("launch_workers") == 2
    with stub.hangs("launch_workers", times=2):
        with pytest.raises(CallFailed, match="no answer within"):
            await api.launch(plan("other"))
        monkeypatch.setattr(workers_api, "_LOST_AFTER", 0.0)
        await api.launch(plan("other"))
    await eventually(lambda: not stub.under_way)


async def test_a_launch_uses_the_session_of_a_call_that_was_answered_after_the_last_try(stub, make, left):
    api = make(timeout="200ms", threads=1)
    with stub.hangs("launch_workers", times=2, after=True), pytest.raises(CallFailed, match="no answer"):
        await api.launch(plan("mine"))
    await eventually(lambda: {*api.live} == left() != set())
    late = left()
    session = await api.launch(plan("mine"))
    assert session["id"] in late
    assert left() == late
    await api.stop(*late)
    assert (await api.launch(plan("mine")))["id"] not in late


async def test_a_launch_that_is_answered_late_leaves_its_session_to_the_cluster(stub, make, left):
    """A scheduler may run in it."""
    api = make(timeout="2s", threads=1)
    with stub.hangs("launch_workers", after=True) as release:
        launching = asyncio.create_task(api.launch(plan("mine")))
        await eventually(left)
        [first] = left()
        session = await launching
        assert session["id"] != first
        assert {*api.live} == {session["id"]}
        release()
        await eventually(lambda: {*api.live} == {first, session["id"]})
    assert left() == {first, session["id"]}
    await api.close()
    assert not left()


async def test_close_stops_all_sessions_but_those_whose_stop_hangs_and_names_these(stub, make, left):
    api = make(timeout="2s", threads=1)
    ids = await launch(api, 5)
    stub.never_stops.add(ids[2])
    with pytest.raises(CallFailed, match=rf"did not stop {ids[2]}, which may still run: no answer within"):
        await api.close()
    assert left() == {*api.live} == {ids[2]}
    stub.never_stops.clear()
    await api.close()
    assert not left()


async def test_a_stop_that_is_answered_while_its_repetition_fails_succeeds(stub, make, left, monkeypatch):
    api = make(timeout="1s", retries=1)
    ids = await launch(api)
    stop_workers, repeated = stub.stop_workers, threading.Event()

    def stop(*ids):
        if stub.count("stop_workers"):
            repeated.set()
            while api.live:
                time.sleep(0.001)
            raise HTTPError(403)
        answer = stop_workers(*ids)
        repeated.wait(60)
        return answer

    monkeypatch.setattr(stub, "stop_workers", stop)
    await api.stop(*ids)
    assert left() == {*api.live} == set()
    assert api.problem is None


async def test_a_hanging_stop_is_not_retried_beyond_the_time_limit_of_one_call(stub, make, left):
    api = make(timeout="1s", retries=6)
    ids = await launch(api, 3)
    with stub.hangs("stop_workers", times=100):
        with pytest.raises(CallFailed, match="may still run"):
            await api.close()
        # Twice; they might be tried again at the very end of the time.
        assert 2 * len(ids) <= stub.count("stop_workers") <= 3 * len(ids)
    await eventually(lambda: not left())


@pytest.mark.slow
@pytest.mark.parametrize("cancelled", [False, True])
def test_the_interpreter_ends_though_calls_hang(cancelled):
    program = """
import asyncio, concurrent.futures, sys, threading
import dask
from pathlib import Path
from dask_cml.options import SessionSize
from dask_cml.sessions.plan import SessionPlan
from dask_cml.sessions.workers_api import WorkersAPI

def launch_workers(n, cpu, memory, nvidia_gpu=0, code="", env={}):
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        return [future.result() for future in [pool.submit(hang)]]

def hang():
    loop.call_soon_threadsafe(hangs.set)
    threading.Event().wait()

list_workers = stop_workers = launch_workers

async def main():
    global hangs, loop
    hangs, loop = asyncio.Event(), asyncio.get_running_loop()
    with dask.config.set({"cml.api.timeout": "2s", "cml.api.retries": 0}):
        api = WorkersAPI(sys.modules["__main__"])
    plan = SessionPlan("mine", "mine", "mine", SessionSize(1, 1), "", {}, Path())
    launching = asyncio.ensure_future(api.launch(plan))
    if sys.argv[1] == "True":
        await hangs.wait()
        launching.cancel()
    try:
        await launching
    except BaseException as error:
        print(repr(error))
    await api.close()

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(cancelled)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert ("CancelledError" if cancelled else "CML did not launch mine in 1 try") in done.stdout


async def test_no_call_runs_in_the_thread_of_the_event_loop(stub, api):
    stub.refuse()
    with pytest.raises(LaunchRefused):
        await launch(api)
    ids = await launch(api, 2)
    await api.sessions()
    await api.stop(ids[0])
    await api.close()
    threads = {call.thread for call in stub.calls}
    assert {call.function for call in stub.calls} == set(FUNCTIONS)
    assert threading.current_thread().name not in threads


def test_a_call_for_which_the_system_has_no_thread_fails_with_its_words(monkeypatch):
    error = RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=error))
    with pytest.raises(CMLError, match="Workers API not called: can't start new thread"):
        start_call(list)


@pytest.fixture
def installed(monkeypatch):
    def installed(*names, functions=("launch_workers",)):
        for name in ("cml", "cml.workers_v1", "cdsw"):
            monkeypatch.setitem(sys.modules, name, None)
        for name in names:
            if "." in name:
                monkeypatch.setitem(sys.modules, "cml", ModuleType("cml"))
            module = ModuleType(name)
            module.__dict__.update(dict.fromkeys(functions, print))
            monkeypatch.setitem(sys.modules, name, module)
        return [sys.modules[name] for name in names]

    return installed


def test_cmls_module_is_used_and_the_local_platform_only_if_it_is_asked_for(installed):
    current, _ = installed("cml.workers_v1", "cdsw")
    assert load_platform("auto") is current
    [older] = installed("cdsw")
    assert load_platform("auto") is older
    installed("cml.workers_v1", functions=())
    with pytest.raises(NotOnCML):
        load_platform("auto")
    installed()
    with pytest.raises(NotOnCML, match=r'platform="local".*DASK_CML__PLATFORM=local'):
        load_platform("auto")
    assert load_platform("local") is local


async def test_closing_raises_an_error_in_all_tasks_that_wait_for_a_listing(stub, api):
    with stub.held("list_workers"):
        waiting = [asyncio.create_task(api.sessions()) for _ in range(3)]
        await eventually(lambda: stub.under_way)
        waiting.append(asyncio.create_task(api.sessions()))
        closing = asyncio.create_task(api.close())
        await asyncio.sleep(0)
        waiting[0].cancel()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    await closing
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, *[CMLError] * 3]


async def test_launches_that_wait_for_their_turn_at_the_end_are_not_done(stub, make, left):
    api = make(threads=1)
    await launch(api)
    with stub.held("launch_workers"):
        tasks = [asyncio.create_task(api.launch(plan("mine"))) for _ in range(5)]
        await eventually(lambda: stub.under_way)
        closing = asyncio.create_task(api.close())
        await eventually(lambda: not left())
    await closing
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert stub.count("launch_workers") == 2
    assert [type(outcome) for outcome in outcomes[1:]] == [CMLError] * 4
    assert not left()


async def test_a_launch_that_hangs_beyond_the_end_stops_its_session(stub, make, left):
    api = make(timeout="2s", threads=1)
    with stub.hangs("launch_workers", after=True):
        launching = asyncio.create_task(api.launch(plan("mine")))
        await eventually(left)
        [session_id] = left()
        stub.set(session_id, listed=False)
        await api.close()
        assert left() == {session_id}
    await eventually(lambda: not left())
    with pytest.raises(CMLError):
        await launching
