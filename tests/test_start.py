"""Starts that fail: the error says why, and no session is left."""

from __future__ import annotations

import pytest

import dask_cml
from dask_cml import CMLCluster, CMLError, LaunchRefused, SchedulerTimeout, SessionFailed

pytestmark = pytest.mark.usefixtures("light")


@pytest.fixture
def start(platform):
    """Start a cluster of three workers, which fails; return the error."""

    def start(error, **options):
        with pytest.raises(error) as caught:
            CMLCluster(n_workers=3, platform="local", quiet=True, **options)
        assert isinstance(caught.value, RuntimeError)
        return caught.value

    return start


@pytest.mark.parametrize("granted", [0, 3])
def test_quota_says_the_platforms_words(platform, start, granted):
    """It refuses the scheduler, or the third of three workers."""
    platform.configure(quota={"sessions": granted})
    assert "exceeded quota" in str(start(LaunchRefused))


def test_a_half_made_session_of_a_refused_launch_is_stopped(platform, start):
    platform.inject("refused", match="The scheduler of")
    start(LaunchRefused)
    assert platform.sessions()


@pytest.mark.parametrize(("fault", "status"), [("fails", "failed"), ("succeeds", "succeeded")])
def test_an_ended_scheduler_session_is_named_with_its_status(platform, start, fault, status):
    platform.inject(fault, match="The scheduler of")
    message = str(start(SessionFailed))
    [session] = [s for s in platform.sessions() if s["name"].endswith("-scheduler")]
    assert session["id"] in message
    assert f"its status is {status}" in message


def test_a_scheduler_that_cannot_run_is_told_with_its_output(start):
    message = str(start(SessionFailed, scheduler_args=["--preload", "no_such_module"]))
    assert "no_such_module" in message


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hangs", "did not answer within 3 s, its status is running"),
        ("stuck", "did not run within 4 s, its status is scheduling"),
    ],
)
def test_a_scheduler_that_does_not_come_is_given_up(platform, start, fault, words):
    platform.inject(fault, match="The scheduler of")
    assert words in str(start(SchedulerTimeout, scheduler_timeout=3, pending_timeout=4))


def test_not_on_cml(platform):
    with pytest.raises(dask_cml.NotOnCML, match='platform="local"'):
        CMLCluster()


@pytest.mark.parametrize("fault", [{"status": 503}, {"status": None}])
def test_what_may_pass_is_tried_again(platform, fault):
    platform.inject("error", function="launch_workers", times=2, **fault)
    platform.inject("error", function="list_workers", times=1, **fault)
    with CMLCluster(n_workers=1, platform="local") as cluster:
        assert len(cluster.sessions) == 2


def test_what_will_not_pass_is_told_at_once(platform, start):
    platform.inject("error", function="launch_workers", status=403)
    with pytest.raises(CMLError, match=r"did not launch .*: HTTPError: 403 Forbidden"):
        CMLCluster(platform="local")


def test_sessions_listed_late_and_without_address_are_waited_for(platform):
    platform.inject("invisible", seconds=1.5, times=2)
    platform.inject("unknown_ip", seconds=1.5, times=2)
    with CMLCluster(n_workers=1, platform="local") as cluster:
        assert len(cluster.sessions) == 2
