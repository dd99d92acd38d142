from __future__ import annotations

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


@pytest.mark.slow
def test_a_fault_applies_to_matching_sessions_after_the_skipped_ones(platform, launch):
    platform.inject("refused", match="worker", skip=1, times=2)
    refused = [
        "id" not in launch(code=FOREVER, name=name)[0]
        for name in ("worker-0", "scheduler", "worker-1", "worker-2", "worker-3")
    ]
    assert refused == [False, False, True, True, False]
    platform.inject("refused", match="of this code")
    assert "id" not in launch(code=f"{FOREVER}  # a match of this code")[0]


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


def test_a_fault_hits_requests_for_a_time_or_until_it_is_cleared(platform):
    platform.inject("error", seconds=600)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="injected fault"):
            platform.list_workers()
    platform.clear_faults()
    platform.clear_faults()
    platform.inject("error", seconds=-1)
    assert platform.list_workers() == []
