"""What is known of the Workers API, and must hold for whatever stands in for it."""

from __future__ import annotations

import inspect
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


def test_parameters_of_launch_workers_have_the_known_names_and_order(workers_v1):
    known = ["n", "cpu", "memory", "nvidia_gpu", "kernel", "script", "code", "env"]
    parameters = [*inspect.signature(workers_v1.launch_workers).parameters]
    assert parameters[: len(known)] == known
    newer = {"name", "accelerator_label_id", "resource_profile_id", "resource_group_id"}
    newer.add("rdma_network_selections")
    assert {*parameters[len(known) :]} <= newer or PLATFORM == "cml"


def test_launch_returns_a_dict_with_an_id_for_each_session(launch):
    sessions = launch(2, code=FOREVER)
    ids = {session["id"] for session in sessions}
    assert len(ids) == 2
    assert all(len(id) == 16 and id.isalnum() for id in ids)


def test_list_has_running_and_ended_sessions(launch, reaches, workers_v1):
    [long], [short] = launch(code=FOREVER), launch(code="pass")
    reaches(long, "running")
    reaches(short, "succeeded")
    statuses = {session["id"]: session["status"] for session in workers_v1.list_workers()}
    assert statuses[long["id"]] == "running"
    assert statuses[short["id"]] == "succeeded"


def test_status_only_moves_forward(launch, find):
    [session] = launch(code="import time; time.sleep(0.2)")
    seen = [find(session["id"])["status"]]
    while seen[-1] != "succeeded":
        seen.append(find(session["id"])["status"])
        time.sleep(0.01)
    places = [STATUSES.index(status) for status in seen]
    assert places == sorted(places)


def test_address_is_not_known_before_the_session_runs(launch, find, reaches):
    [session] = launch(code=FOREVER)
    assert session.get("ip_address", "unknown") == "unknown" or session["status"] == "running"
    while (now := find(session["id"]))["status"] != "running":
        assert now.get("ip_address", "unknown") == "unknown"
    address = reaches(session, "running")["ip_address"]
    assert address.count(".") == 3


def test_code_runs_in_the_launchers_python(output_of):
    executable = output_of("import sys; open('{output}', 'w').write(sys.executable)")
    assert os.path.samefile(executable, sys.executable)


def test_a_session_whose_code_raises_an_exception_fails(launch, reaches):
    [session] = launch(code="1 / 0")
    assert reaches(session, "succeeded", "failed")["status"] == "failed"


@pytest.mark.parametrize("command", ["!no-such-command", "!exit 3"])
def test_exit_status_of_a_command_is_lost(launch, reaches, command):
    [session] = launch(code=command)
    assert reaches(session, "succeeded", "failed")["status"] == "succeeded"


def test_command_is_expanded_by_ipython(output_of):
    assert output_of("!echo {20 + 3} > {output}").strip() == "23"


def test_script_takes_precedence_over_code(launch, reaches, directory):
    script = directory / "script.py"
    script.write_text(f"open({str(directory / 'output')!r}, 'w').write(__file__)")
    [session] = launch(script=str(script), code="1 / 0")
    reaches(session, "succeeded")
    assert (directory / "output").read_text().endswith("script.py")


def test_environment_is_not_the_launchers(output_of, monkeypatch):
    monkeypatch.setenv("OF_THE_LAUNCHER", "1")
    environment = json.loads(output_of(DUMP_ENVIRONMENT, env={"GIVEN": "1"}))
    assert environment["GIVEN"] == "1"
    assert "OF_THE_LAUNCHER" not in environment
    assert environment["HOME"] == os.environ["HOME"]


def test_the_environment_describes_the_session(launch, reaches, directory):
    path = directory / "environment"
    code = DUMP_ENVIRONMENT.replace("{output}", str(path))
    [session] = launch(code=code, cpu=1.5, memory=2)
    address = reaches(session, "succeeded")
    environment = json.loads(path.read_text())
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
def test_over_quota_the_answer_is_a_dict_without_an_id(launch, workers_v1):
    workers_v1.configure(quota={"cpu": 1})
    [answer] = launch(cpu=2, code=FOREVER)
    assert "id" not in answer
    assert answer["message"]
    assert "exceeded quota: " in answer["k8sMessage"]
    assert answer["engineId"].isalnum()


@not_on_cml
def test_the_quota_can_refuse_some_of_many_sessions(launch, workers_v1):
    workers_v1.configure(quota={"memory": 5})
    answers = launch(4, memory=2, code=FOREVER)
    assert sorted("id" in answer for answer in answers) == [False, False, True, True]


@not_on_cml
def test_a_half_created_session_can_be_stopped(launch, find, reaches, workers_v1):
    workers_v1.configure(quota={"sessions": 0})
    [answer] = launch(code=FOREVER)
    assert find(answer["engineId"])["status"] == "scheduling"
    [response] = workers_v1.stop_workers(answer["engineId"])
    assert response.status_code == 204
    reaches(answer["engineId"], "stopped")


def test_stop_ends_the_given_sessions_only(launch, reaches, find, workers_v1):
    first, second, third = launch(3, code=FOREVER)
    for session in (first, second, third):
        reaches(session, "running")
    responses = workers_v1.stop_workers(first["id"], second["id"])
    assert [response.status_code for response in responses] == [204, 204]
    for session in (first, second):
        assert reaches(session, "stopped")["finished_at"]
    assert find(third["id"])["status"] == "running"


def test_stop_changes_nothing_of_an_ended_session(launch, reaches, find, workers_v1):
    [session] = launch(code="1 / 0")
    ended = reaches(session, "failed")
    workers_v1.stop_workers(session["id"])
    assert find(session["id"])["finished_at"] == ended["finished_at"]
    assert find(session["id"])["status"] == "failed"


@not_on_cml
def test_stop_of_an_unknown_session_is_answered_with_404(workers_v1):
    [response] = workers_v1.stop_workers("0123456789abcdef")
    assert response.status_code == 404


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


def test_await_returns_running_sessions(launch, reaches, workers_v1):
    sessions = launch(2, code=FOREVER)
    for session in sessions:
        reaches(session, "running")
    result = workers_v1.await_workers(sessions, wait_for_completion=False)
    assert {session["id"] for session in result["workers"]} == {session["id"] for session in sessions}
    assert all(session["ip_address"] != "unknown" for session in result["workers"])
    assert result["failures"] == []


def test_await_returns_done_and_failed_sessions(launch, reaches, workers_v1):
    [good], [bad], [stopped] = launch(code="pass"), launch(code="1 / 0"), launch(code=FOREVER)
    workers_v1.stop_workers(stopped["id"])
    for session in (good, bad, stopped):
        reaches(session, "succeeded", "failed", "stopped")
    result = workers_v1.await_workers([good["id"], bad["id"], stopped["id"]])
    assert [session["id"] for session in result["workers"]] == [good["id"]]
    assert {session["id"] for session in result["failures"]} == {bad["id"], stopped["id"]}


def test_stop_workers_accepts_sessions_as_other_functions_return_them(launch, reaches, workers_v1):
    [session] = launch(code=FOREVER)
    workers_v1.stop_workers(reaches(session, "running"))
    reaches(session, "stopped")
