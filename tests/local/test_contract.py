"""What is known of the Workers API, and must hold for whatever stands in for it."""

import json
import os
import sys
import time

import pytest

from .conftest import FOREVER, PLATFORM

not_on_cml = pytest.mark.skipif(
    PLATFORM == "cml", reason="needs settings, or would hit sessions of other work"
)
DUMP_ENVIRONMENT = "import json, os; json.dump(dict(os.environ), open('{output}', 'w'))"
STATUSES = ["scheduling", "starting", "running", "succeeded"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "workers_v1" in metafunc.fixturenames:
        # The stub's sessions run no code, and so write nothing.
        runs_code = {"directory", "output_of"} & {*metafunc.fixturenames}
        stub = [] if PLATFORM == "cml" or runs_code else ["simulated"]
        metafunc.parametrize("workers_v1", [PLATFORM, *stub], indirect=True)


def test_status_only_moves_forward_and_the_address_is_unknown_before_the_session_runs(launch, find):
    [session] = launch(code="import time; time.sleep(0.2)")
    assert session.get("ip_address", "unknown") == "unknown" or session["status"] == "running"
    seen = []
    while not seen or seen[-1] != "succeeded":
        now = find(session["id"])
        seen.append(now["status"])
        assert now.get("ip_address", "unknown") == "unknown" or now["status"] in ("running", "succeeded")
        time.sleep(0.01)
    places = [STATUSES.index(status) for status in seen]
    assert places == sorted(places)
    assert now["ip_address"].count(".") == 3


def test_sessions_end_as_their_code_says_and_stay_listed(launch, reaches, workers_v1):
    # The exit status of a command is lost.
    ends = {"pass": "succeeded", "1 / 0": "failed", "!no-such-command": "succeeded", "!exit 3": "succeeded"}
    ids = {code: launch(code=code)[0]["id"] for code in ends}
    long, stopped = (session["id"] for session in launch(2, code=FOREVER))
    assert len({*ids.values(), long, stopped}) == 6
    assert all(len(id) == 16 and id.isalnum() for id in ids.values())
    workers_v1.stop_workers(stopped)
    reaches(long, "running")
    reaches(stopped, "stopped")
    for code, status in ends.items():
        assert reaches(ids[code], "succeeded", "failed")["status"] == status
    result = workers_v1.await_workers([ids["pass"], ids["1 / 0"], stopped])
    assert [session["id"] for session in result["workers"]] == [ids["pass"]]
    assert {session["id"] for session in result["failures"]} == {ids["1 / 0"], stopped}
    listed = {session["id"]: session for session in workers_v1.list_workers()}
    assert listed[long]["status"] == "running"
    workers_v1.stop_workers(ids["1 / 0"])  # it has ended
    again = {session["id"]: session for session in workers_v1.list_workers()}[ids["1 / 0"]]
    assert (again["status"], again["finished_at"]) == ("failed", listed[ids["1 / 0"]]["finished_at"])


def test_command_is_expanded_by_ipython(output_of):
    assert output_of("!echo {20 + 3} > {output}").strip() == "23"


def test_script_takes_precedence_over_code(launch, reaches, directory):
    script = directory / "script.py"
    script.write_text(f"open({str(directory / 'output')!r}, 'w').write(__file__)")
    [session] = launch(script=str(script), code="1 / 0")
    reaches(session, "succeeded")
    assert (directory / "output").read_text().endswith("script.py")


def test_the_environment_describes_the_session_and_is_not_the_launchers(
    launch, reaches, directory, monkeypatch
):
    monkeypatch.setenv("OF_THE_LAUNCHER", "1")
    path = directory / "environment"
    code = "import os, sys; os.environ['EXECUTABLE'] = sys.executable; "
    code += DUMP_ENVIRONMENT.replace("{output}", str(path))
    [session] = launch(code=code, cpu=1.5, memory=2, env={"GIVEN": "1", "CDSW_ENGINE_ID": "another"})
    address = reaches(session, "succeeded")
    environment = json.loads(path.read_text())
    assert os.path.samefile(environment["EXECUTABLE"], sys.executable)
    assert environment["GIVEN"] == "1"
    assert "OF_THE_LAUNCHER" not in environment
    assert environment["HOME"] == os.environ["HOME"]
    assert environment["CDSW_ENGINE_ID"] == session["id"]
    assert environment["CDSW_MASTER_ID"] not in ("", session["id"])
    assert environment["CDSW_MASTER_IP"]
    assert environment["CDSW_IP_ADDRESS"] == address["ip_address"]
    assert int(environment["CDSW_CPU_MILLICORES"]) == 1500
    assert int(environment["CDSW_MEMORY_MB"]) == 2048
    assert int(environment["CDSW_APP_PORT"]) == int(environment["CDSW_READONLY_PORT"])
    assert int(environment["CDSW_PUBLIC_PORT"])
    for name in ("CDSW_API_KEY", "CDSW_DOMAIN", "CDSW_PROJECT", "CDSW_PROJECT_ID", "CDSW_CREATOR"):
        assert environment[name]


@not_on_cml
def test_over_quota_the_answer_is_a_dict_without_an_id(launch, find, reaches, workers_v1):
    """What was half made can be stopped."""
    workers_v1.configure(quota={"memory": 5})
    answers = sorted(launch(4, memory=2, code=FOREVER), key=lambda answer: "id" in answer)
    assert ["id" in answer for answer in answers] == [False, False, True, True]
    answer = answers[0]
    assert answer["message"]
    assert "exceeded quota: " in answer["k8sMessage"]
    assert answer["engineId"].isalnum()
    assert find(answer["engineId"])["status"] == "scheduling"
    [response] = workers_v1.stop_workers(answer["engineId"])
    assert response.status_code == 204
    reaches(answer["engineId"], "stopped")
    [response] = workers_v1.stop_workers("0123456789abcdef")
    assert response.status_code == 404


def test_stop_ends_the_given_sessions_only(launch, reaches, find, workers_v1):
    first, second, third = sessions = launch(3, code=FOREVER)
    for session in sessions:
        reaches(session, "running")
    result = workers_v1.await_workers(sessions, wait_for_completion=False)
    assert {session["id"] for session in result["workers"]} == {session["id"] for session in sessions}
    assert all(session["ip_address"] != "unknown" for session in result["workers"])
    assert result["failures"] == []
    responses = workers_v1.stop_workers(first["id"], find(second["id"]))  # as other functions return it
    assert [response.status_code for response in responses] == [204, 204]
    for session in (first, second):
        assert reaches(session, "stopped")["finished_at"]
    assert find(third["id"])["status"] == "running"


@not_on_cml
def test_stop_without_ids_stops_all_sessions_of_the_caller_only(launch, reaches, workers_v1, monkeypatch):
    mine = launch(2, code=FOREVER)
    with monkeypatch.context() as other:
        other.setenv("CDSW_ENGINE_ID", "ofanothersession")
        [others] = launch(code=FOREVER)
    assert len(workers_v1.stop_workers()) == 2
    for session in mine:
        reaches(session, "stopped")
    monkeypatch.setenv("CDSW_ENGINE_ID", "ofanothersession")
    reaches(others, "running")


def test_other_sessions_see_nothing_of_this_ones_but_can_stop_them(launch, reaches, output_of, workers_v1):
    [session] = launch(code=FOREVER)
    reaches(session, "running")
    seen = output_of(
        f"from {workers_v1.__name__} import list_workers, stop_workers\n"
        "print(len(list_workers()), file=open('{output}', 'w'))\n"
        f"stop_workers({session['id']!r})"
    )
    assert seen.strip() == "0"
    reaches(session, "stopped")


def test_session_can_launch_sessions_which_have_the_same_master(launch, reaches, directory, workers_v1):
    outer, path = directory / "outer", directory / "environment"
    inner = DUMP_ENVIRONMENT.replace("{output}", f"{path}.new") + f"; os.rename('{path}.new', '{path}')"
    [session] = launch(
        code=f"{DUMP_ENVIRONMENT.replace('{output}', str(outer))}\n"
        f"from {workers_v1.__name__} import launch_workers, list_workers\n"
        "import time\n"
        f"launch_workers(1, 1, 1, code={inner!r})\n"
        "while list_workers()[0]['status'] != 'succeeded': time.sleep(0.05)"
    )
    reaches(session, "succeeded")
    masters = {json.loads(file.read_text())["CDSW_MASTER_ID"] for file in (outer, path)}
    assert len(masters) == 1
    assert session["id"] not in masters
