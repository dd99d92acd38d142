from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from testbed import faults

from .conftest import FOREVER


def test_a_refused_launch_leaves_a_half_created_session(platform, launch):
    platform.inject("refused")
    [answer] = launch(code=FOREVER)
    assert "id" not in answer
    assert "exceeded quota: " in answer["k8sMessage"]
    [session] = platform.sessions()
    assert (session["id"], session["status"]) == (answer["engineId"], "scheduling")
    assert "id" in launch(code=FOREVER)[0]


def test_session_can_end_without_running_its_code(platform, launch, reaches, directory):
    for kind, status in {"fails": "failed", "succeeds": "succeeded"}.items():
        platform.inject(kind)
        [session] = launch(code=f"open({str(directory / 'ran')!r}, 'w')")
        assert reaches(session, status)["running_at"]
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


@pytest.mark.slow
def test_fault_is_used_up_once_by_all_threads_and_processes(platform, launch):
    platform.inject("refused", times=3)
    code = f"from dask_cml import local; print(local.launch_workers(6, 1, 1, code={FOREVER!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    here = launch(6, code=FOREVER)
    there, _ = process.communicate()
    sessions = platform.sessions()
    platform.stop_workers(*[session["id"] for session in sessions])
    assert len(sessions) == 12
    assert sum("id" not in answer for answer in here) + there.count("engineId") == 3


def test_error_with_a_status_is_raised_as_an_http_error(platform, launch):
    faults.inject("error", status=503, function="launch_workers")
    with pytest.raises(OSError, match="503 Service Unavailable") as info:
        launch(code=FOREVER)
    assert info.value.response.status_code == 503
    assert platform.sessions() == []


def test_an_error_of_the_server_comes_back_as_if_it_were_the_result(platform, launch):
    faults.inject("answer", status=401, function="list_workers")
    faults.inject("answer", status=500, function="launch_workers")
    faults.inject("answer", status=503, function="launch_workers", message="no healthy upstream")
    assert platform.list_workers() == {"message": "Unauthorized"}
    assert platform.launch_workers(1, 1, 1, code=FOREVER) == [{"message": "Internal Server Error"}]
    assert platform.launch_workers(1, 1, 1, code=FOREVER) == [{"message": "no healthy upstream"}]
    assert platform.list_workers() == []


def test_request_can_be_done_and_not_answered(platform, launch, until):
    faults.inject("unanswered", function="launch_workers")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(launch, code=FOREVER)
        try:
            until(platform.list_workers)
            assert not answer.done()
        finally:
            faults.clear()
        assert answer.result()[0]["id"] == platform.list_workers()[0]["id"]


def test_cleared_faults_hit_nothing(platform, launch):
    platform.inject("refused", times=100)
    platform.clear_faults()
    platform.clear_faults()
    assert "id" in launch(code=FOREVER)[0]
