def test_session_runs_until_it_is_stopped(platform, until):
    [session] = platform.launch_workers(1, 1, 1, code="import time; time.sleep(600)")
    until(lambda: platform.list_workers()[0]["status"] == "running")
    platform.stop_workers(session["id"])
    until(lambda: platform.list_workers()[0]["status"] == "stopped")
