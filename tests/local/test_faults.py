from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
from extensions import faults

from .conftest import FOREVER


def test_a_refused_launch_leaves_a_half_created_session(platform, launch):
    platform.inject("refused")
    [answer] = launch(code=FOREVER)
    assert "id" not in answer
    assert "exceeded quota: " in answer["k8sMessage"]
    [session] = platform.sessions()
    assert (session["id"], session["status"]) == (answer["engineId"], "scheduling")
    assert "id" in launch(code=FOREVER)[0]


@pytest.mark.parametrize(("kind", "status"), [("fails", "failed"), ("succeeds", "succeeded")])
def test_session_can_end_without_running_its_code(platform, launch, reaches, directory, kind, status):
    platform.inject(kind)
    [session] = launch(code=f"open({str(directory / 'ran')!r}, 'w')")
    assert reaches(session, status)["running_at"]
    assert not (directory / "ran").exists()


def test_session_can_hang_without_running_its_code(platform, launch, reaches, directory):
    platform.inject("hangs")
    [session] = launch(code=f"open({str(directory / 'ran')!r}, 'w')")
    reaches(session, "running")
    platform.stop_workers(session["id"])
    reaches(session, "stopped")
    assert not (directory / "ran").exists()


def test_session_can_be_stuck_in_scheduling(platform, launch, reaches, find):
    platform.inject("stuck")
    [stuck], [other] = launch(code=FOREVER), launch(code=FOREVER)
    reaches(other, "running")
    assert find(stuck["id"])["status"] == "scheduling"
    platform.stop_workers(stuck["id"])
    assert not reaches(stuck, "stopped")["running_at"]


def test_a_fault_applies_to_matching_sessions_after_the_skipped_ones(platform, launch):
    platform.inject("refused", match="worker", skip=1, times=2)
    refused = [
        "id" not in launch(code=FOREVER, name=name)[0]
        for name in ("worker-0", "scheduler", "worker-1", "worker-2", "worker-3")
    ]
    assert refused == [False, False, True, True, False]
    platform.inject("refused", match="of this code")
    assert "id" not in launch(code=f"{FOREVER}  # a match of this code")[0]


def test_fault_is_used_up_once_by_all_threads_and_processes(platform, launch):
    platform.inject("refused", times=3)
    code = f"from dask_cml import local; print(local.launch_workers(6, 1, 1, code={FOREVER!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    here = launch(6, code=FOREVER)
    there, _ = process.communicate()
    sessions = platform.sessions()
    platform.stop_workers(*[each["id"] for each in sessions])
    assert len(sessions) == 12
    assert sum("id" not in each for each in here) + there.count("engineId") == 3


def test_statuses_of_newer_releases(platform, launch, reaches):
    faults.inject("unknown_status", seconds=600)
    [session] = launch(code=FOREVER)
    assert reaches(session, "UNKNOWN")["running_at"]
    faults.expire()
    reaches(session, "running")
    faults.inject("stopping", seconds=600)
    [session] = launch(code=FOREVER)
    platform.stop_workers(session["id"])
    assert reaches(session, "STOPPING")["finished_at"] is None
    faults.expire()
    reaches(session, "stopped")


def test_invisible_session_is_not_listed_for_a_time(platform, launch):
    faults.inject("invisible", seconds=600)
    [session] = launch(code=FOREVER)
    assert platform.list_workers() == []
    assert [each["id"] for each in platform.sessions()] == [session["id"]]
    faults.expire()
    assert [each["id"] for each in platform.list_workers()] == [session["id"]]


def test_address_can_stay_unknown_for_a_time(platform, launch, reaches, find):
    faults.inject("unknown_ip", seconds=600)
    [session] = launch(code=FOREVER)
    assert reaches(session, "running")["ip_address"] == "unknown"
    faults.expire()
    assert find(session["id"])["ip_address"] == "127.0.0.1"


def test_one_session_can_have_several_faults(platform, launch, reaches):
    platform.inject("hangs")
    faults.inject("unknown_ip", seconds=600)
    [session] = launch(code="pass")
    assert reaches(session, "running")["ip_address"] == "unknown"


def test_error_with_a_status_is_raised_as_an_http_error(platform, launch):
    faults.inject("error", status=503, function="launch_workers")
    with pytest.raises(OSError, match="503 Service Unavailable") as info:
        launch(code=FOREVER)
    assert info.value.response.status_code == 503
    assert platform.sessions() == []


def test_error_without_a_status_is_a_lost_connection(platform):
    faults.inject("error", times=2)
    for call in (platform.list_workers, lambda: platform.stop_workers("0123456789abcdef")):
        with pytest.raises(ConnectionError):
            call()
    assert platform.list_workers() == []


def test_one_failed_request_of_a_launch_leaves_the_other_sessions(platform, launch):
    faults.inject("error", status=500, function="launch_workers")
    with pytest.raises(OSError, match="500"):
        launch(3, code=FOREVER)
    sessions = platform.sessions()
    platform.stop_workers(*[each["id"] for each in sessions])
    assert len(sessions) == 2


def test_errors_can_last_for_a_time(platform):
    faults.inject("error", function="list_workers", seconds=600)
    for _ in range(3):
        with pytest.raises(ConnectionError):
            platform.list_workers()
    faults.expire()
    assert platform.list_workers() == []


def test_error_of_await_hits_its_listing(platform):
    faults.inject("error", function="await_workers", status=502)
    assert platform.list_workers() == []
    with pytest.raises(OSError, match="502"):
        platform.await_workers(["0123456789abcdef"])


def test_stop_can_be_answered_with_an_error(platform, launch, find, reaches):
    [session] = launch(code=FOREVER, name="worker-7")
    faults.inject("answer", function="stop_workers", status=500, match="worker-7")
    [response] = platform.stop_workers(session["id"])
    assert response.status_code == 500
    assert not response.ok
    assert find(session["id"])["status"] != "stopped"
    platform.stop_workers(session["id"])
    reaches(session, "stopped")


def test_an_error_of_the_server_comes_back_as_if_it_were_the_result(platform, launch):
    faults.inject("answer", status=401, function="list_workers")
    faults.inject("answer", status=500, function="launch_workers")
    faults.inject("answer", status=503, function="launch_workers", message="no healthy upstream")
    assert platform.list_workers() == {"message": "Unauthorized"}
    assert platform.launch_workers(1, 1, 1, code=FOREVER) == [{"message": "Internal Server Error"}]
    assert platform.launch_workers(1, 1, 1, code=FOREVER) == [{"message": "no healthy upstream"}]
    assert platform.list_workers() == []


def test_a_gateways_page_is_no_json_unless_nobody_decodes_it(platform, launch, reaches):
    faults.inject("page", times=3)
    with pytest.raises(ValueError, match="Expecting value") as info:
        platform.list_workers()
    assert isinstance(info.value, OSError)
    with pytest.raises(ValueError, match="Expecting value"):
        platform.launch_workers(1, 1, 1, code=FOREVER)
    [response] = platform.stop_workers("0123456789abcdef")
    assert response.status_code == 502
    assert platform.list_workers() == []


@pytest.fixture
def in_thread(platform):
    """Call a function in a thread, and return the list that its result comes into, or its error."""
    threads = []

    def in_thread(function):
        results = []

        def run():
            try:
                results.append(function())
            except OSError as error:
                results.append(error)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return results

    yield in_thread
    faults.clear()
    for thread in threads:
        thread.join()


def test_request_can_hang_until_the_faults_are_cleared(platform, in_thread, until):
    faults.inject("hang", function="list_workers")
    results = in_thread(platform.list_workers)
    until(lambda: not faults.left())
    assert results == []
    faults.clear()
    until(lambda: results)
    assert isinstance(results[0], ConnectionError)


def test_all_requests_of_a_time_can_hang(platform, in_thread, until):
    end = time.time() + 1
    faults.inject("hang", seconds=1)
    results = [in_thread(platform.list_workers) for _ in range(3)]
    until(lambda: all(results))
    assert time.time() >= end
    assert platform.list_workers() == []


def test_request_can_be_done_and_not_answered(platform, launch, in_thread, until):
    faults.inject("unanswered", function="launch_workers")
    results = in_thread(lambda: launch(code=FOREVER))
    until(platform.list_workers)
    assert results == []
    faults.clear()
    until(lambda: results)
    assert results[0][0]["id"] == platform.list_workers()[0]["id"]


def test_without_its_key_no_function_works_where_it_is_needed(platform, monkeypatch):
    calls = [
        lambda: platform.launch_workers(1, 1, 1, code=FOREVER),
        platform.list_workers,
        lambda: platform.await_workers(["0123456789abcdef"]),
        lambda: platform.stop_workers("0123456789abcdef"),
        platform.stop_workers,
    ]
    monkeypatch.delenv("CDSW_API_KEY", raising=False)
    faults.inject("key", seconds=600)
    for call in calls:
        with pytest.raises(RuntimeError, match="CDSW_API_KEY is not set"):
            call()
    monkeypatch.setenv("CDSW_API_KEY", "key")
    assert platform.list_workers() == []


def test_request_can_be_slow(platform):
    faults.inject("slow", seconds=0.3)
    begin = time.monotonic()
    platform.list_workers()
    assert time.monotonic() - begin >= 0.3


def test_cleared_faults_hit_nothing(platform, launch):
    platform.inject("refused", times=100)
    platform.clear_faults()
    platform.clear_faults()
    assert "id" in launch(code=FOREVER)[0]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("nonsense", {}, "'refused', 'fails'"),
        ("fails", {"times": 0}, "times"),
        ("fails", {"skip": -1}, "skip"),
    ],
)
def test_invalid_faults_are_refused(platform, kind, options, words):
    with pytest.raises(ValueError, match=words):
        platform.inject(kind, **options)
    assert platform.list_workers() == []
