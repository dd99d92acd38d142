"""``dask cml``, as a user has it in a shell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import dask
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from clusters import (
    LAUNCHED,
    ObservedCluster,
    arrived,
    board_of,
    limits,
    sessions,
    target,
    write_record,
)
from ports import free_port
from schedulers import prepare, scheduler_in
from terminals import STEERING, in_a_terminal
from testbed import faults

import dask_cml
from dask_cml import CMLCluster, cli
from dask_cml.cli import console
from dask_cml.layout import LOGS_FOLDER, scheduler_file
from dask_cml.options import setting, state_directory
from dask_cml.options.table import ARGUMENTS
from dask_cml.records import operations, store
from dask_cml.records.record import Maker, Record, SchedulerState
from dask_cml.scheduler.resident import WHO
from dask_cml.sessions import tls
from dask_cml.words import format_duration, printable

NOBODY = Maker("elsewhere", 1, 1.0, "gone")


@pytest.fixture(autouse=True)
def locally(platform, no_nannies, monkeypatch):
    monkeypatch.setenv("DASK_CML__PLATFORM", "local")
    with dask.config.set({"cml.platform": "local"}):
        yield


def command(*arguments):
    return [sys.executable, "-m", "dask", "cml", *map(str, arguments)]


def shell(*arguments, code=0):
    """Run a command in a process of its own, and return what it wrote to stdout and stderr."""
    result = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=240)
    assert result.returncode == code, result.stderr
    return result.stdout, result.stderr


def run(*arguments, code=0):
    """Run a command in this process, and return its output."""
    result = CliRunner().invoke(cli.cml, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def listed(name):
    """Return what `dask cml list` says of a cluster, which its scheduler writes a moment later."""
    [row] = [row for row in json.loads(run("list", "--json")) if row["name"] == name]
    return row


def live(platform):
    """Return the ids of the sessions that are neither over nor being stopped."""
    present = [session for session in platform.sessions() if session["status"] in ("starting", "running")]
    return [session["id"] for session in present if not session["stop_requested"]]


def add_record(name, address=None, **more):
    launches = more.get("launches", {}).values()
    launched = (launch.id for launch in launches if launch.key == "scheduler")
    scheduler = SchedulerState(address=address, session=next(launched, None))
    record = Record(name, maker=NOBODY, options={"platform": "local"}, scheduler=scheduler, **more)
    write_record(record)
    return record


def add_stale(name, **more):
    """Write the record of a cluster with keys, at whose address nobody answers."""
    keys, files = tls.as_files(True, state_directory() / name)
    add_record(name, f"tls://127.0.0.1:{free_port()}", security=tls.paths(keys), **more)
    tls.write(files)


# -- a cluster's life


@pytest.mark.slow
def test_create_prints_the_link_of_a_dashboard_that_outlives_the_command(left_by_create, until):
    [line] = [line for line in left_by_create.splitlines() if line.startswith("Dashboard: ")]
    link = line.removeprefix("Dashboard: ")
    with ObservedCluster.from_name("mine", quiet=True) as cluster:
        assert cluster.dashboard_link == link
    until(lambda: listed("mine")["dashboard"] == link)
    assert run("list").splitlines()[1].endswith(link)


@pytest.fixture
def left_by_create():
    """What `dask cml create` prints about a cluster that forwards its dashboard for its creator."""
    with dask.config.set({"cml.forward-dashboard": True}):
        output = run("create", "--name", "mine")
    yield output
    run("delete", "mine")


@pytest.mark.slow
async def test_the_creator_of_a_deleted_cluster_launches_no_more_sessions(platform, holds):
    async with CMLCluster(n_workers=1, name="mine", quiet=True, asynchronous=True) as cluster:
        await holds(lambda: arrived(cluster))
        assert await operations.end_all(store.records()) == {"mine": None}
        await holds(lambda: cluster.status.name == "closed")
        assert not live(platform)
        assert store.records() == []


@pytest.mark.slow
def test_a_refused_launch_shows_the_reason_of_the_platform(platform):
    platform.configure(quota={"cpu": 2, "memory": 100})
    error = run("create", "--n-workers", 3, code=1)
    assert error.startswith("Error: CML refused to launch")
    assert "exceeded quota" in error
    assert "Or create the cluster without workers and scale it: " in error.splitlines()[1]
    assert not live(platform)
    assert store.records() == []
    platform.configure(quota=None)
    run("create", "--name", "small")
    platform.configure(quota={"cpu": 2, "memory": 100})
    error = run("scale", "small", 3, code=1)
    assert "1 of 3 workers launched" in error
    assert "exceeded quota" in error
    run("delete", "--all")


def test_create_names_a_command_and_delete_notes_a_reason_in_the_history():
    assert "Cluster night has no workers yet: run `dask cml scale night N` or " in run("create", "night")
    run("delete", "night", "--reason", "the month is over")
    assert [cluster.why for cluster in asyncio.run(operations.ended_clusters())] == ["the month is over"]


@pytest.mark.slow
def test_a_command_does_not_wait_for_a_cluster_whose_workers_fail(platform):
    run("create", "--name", "mine")
    platform.inject("fails", match="mine-", times=10)
    error = run("scale", "mine", 1, code=1)
    assert "no new workers after 5 failures" in error
    run("delete", "mine")


# -- adapt, and who keeps a cluster


@contextlib.contextmanager
def started(*arguments):
    with subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_the_keeper_adapts_what_a_command_asks_for(until):
    with CMLCluster(name="mine", quiet=True) as cluster:
        assert run("adapt", "mine", 1, 2) == "Cluster mine adapts between 1 and 2 workers\n"
        until(lambda: arrived(cluster) == 1)
        assert limits(cluster) == (1, 2)


@pytest.fixture
def left(platform):
    """A cluster whose creator has left it, so that nobody keeps it."""
    with CMLCluster(name="mine", quiet=True, shutdown_on_close=False):
        pass
    yield
    run("delete", "mine")


def test_no_command_keeps_a_cluster(left):
    for looking in ["list"], ["info", "mine"], ["group", "list", "mine"], ["logs", "mine"]:
        run(*looking)
    run("scale", "mine", 0)
    run("adapt", "mine", 0, 1)
    log = run("logs", "mine", "Scheduler")
    assert not [line for line in log.splitlines() if "kept by" in line and WHO not in line]


@pytest.mark.slow
def test_what_a_script_asks_for_before_it_ends_is_written_on_the_board(left, until):
    code = "from dask_cml import CMLCluster; CMLCluster.from_name('mine', quiet=True).scale(1)"
    subprocess.run([sys.executable, "-c", code], check=True)
    until(lambda: json.loads(run("group", "list", "mine", "--json"))[0]["n_workers"] == 1)


@pytest.mark.slow
def test_a_script_that_takes_a_cluster_over_does_not_scale_it(left):
    run("scale", "mine", 1)
    with CMLCluster.from_name("mine", quiet=True) as cluster:
        assert target(cluster) == 1


@pytest.mark.slow
def test_a_script_that_connects_to_a_cluster_does_not_scale_it(until):
    with CMLCluster(n_workers=1, name="mine", quiet=True) as cluster:
        cluster.scale(0)
        until(lambda: board_of(cluster).groups["default"].target == 0)
        with CMLCluster.from_name("mine", quiet=True) as remote:
            until(lambda: [*remote.worker_spec] == [])
            assert board_of(cluster).groups["default"].target == 0


def test_commands_refuse_more_than_a_limit_and_adapt_without_a_maximum_takes_it():
    with CMLCluster(name="mine", quiet=True), dask.config.set({"cml.limits.sessions": 3}):
        words = "expected at most 2, because cml.limits.sessions is 3, in Dask's configuration"
        assert f"Error: invalid n=3: {words}" in run("scale", "mine", 3, code=1)
        assert f"Error: invalid n_workers=3: {words}" in run("create", "--n-workers", 3, code=1)
        added = run("group", "add", "mine", "big", "--n-workers", 3, code=1)
        assert f"Error: invalid n_workers=3: {words}" in added
        assert run("adapt", "mine", 0) == "Cluster mine adapts between 0 and 2 workers\n"


def test_list_shows_no_link_of_a_dashboard_that_does_not_exist():
    options = {"platform": "local", "scheduler_args": ["--no-dashboard"]}
    scheduler = SchedulerState(address=f"tcp://127.0.0.1:{free_port()}", app_url="https://a/")
    write_record(Record("a", maker=NOBODY, options=options, scheduler=scheduler))
    assert listed("a")["dashboard"] is None
    assert "https://a/" not in run("list")


def test_a_session_of_the_local_platform_ends_with_no_other_session():
    launches = sessions(aaaa="scheduler", bbbb="lab-0")
    launches["bbbb"] = replace(launches["bbbb"], owner="72e171bfe1364d9c")
    write_record(Record("lab", maker=replace(NOBODY, session=None), launches=launches))
    assert "bbbb  lab-0\n" in run("info", "lab")


def test_the_version_is_that_of_the_package():
    assert run("--version") == f"dask-cml, version {dask_cml.__version__}\n"


def test_a_stale_cluster_is_shown_with_the_command_that_removes_what_is_left():
    scheduler = SchedulerState(address="tls://127.0.0.1:1", closed="orphaned")
    about = {"maker": NOBODY, "options": {"platform": "local"}, "launches": sessions(aaaa="left-0")}
    write_record(Record("left", scheduler=scheduler, **about))
    problem = "its scheduler has closed: orphaned; run `dask cml delete left`\n"
    assert f"\nProblem of left: {problem}" in run("list")
    info = run("info", "left")
    assert f"\nproblem    {problem}" in info
    assert "aaaa  left-0  if it still runs\n" in info


def test_a_silent_cluster_counts_its_hours_until_its_last_sign_of_life():
    add_stale("left", launches=sessions(aaaa="scheduler", bbbb="left-0"))
    sign = state_directory() / "left" / scheduler_file(0)
    os.utime(sign, (LAUNCHED + 3600, LAUNCHED + 3600))
    about = json.loads(run("info", "left", "--json"))
    assert about["status"] == "not answering"
    assert about["usage"]["total"]["hours"] == pytest.approx(2.0, abs=0.01)


# -- logs


@pytest.fixture
def write_log():
    """Write to the log of a session of the cluster `left`, whose scheduler is gone."""
    add_stale("left", launches=sessions(aaaa="scheduler", bbbb="left-2"))

    def write(session, text, mode="a"):
        with (state_directory() / "left" / LOGS_FOLDER / f"{session}.log").open(mode) as file:
            file.write(text)

    write("left-scheduler", "Scheduler at\n")
    write("left-0", "Start worker\nEnd worker\n")
    return write


def test_logs_of_a_cluster_whose_scheduler_is_gone(write_log):
    scheduler, worker = "==> Scheduler <==\nScheduler at\n", "==> left-0 <==\nStart worker\nEnd worker\n"
    assert run("logs", "left") == f"{scheduler}\n{worker}"
    assert run("logs", "left", "left-0") == worker
    assert run("logs", "left", "Scheduler") == scheduler
    assert run("logs", "left", "left-2") == "No logs of left yet\n"
    assert run("logs", "left", "left-0", "left-1", code=1) == (
        "Error: invalid worker 'left-1': expected one of Cluster, Scheduler, left-0, left-2\n"
    )
    # It has printed no line yet, and the documentation asks for both logs.
    assert run("logs", "left", "Cluster", "Scheduler") == scheduler


@pytest.mark.slow
def test_control_characters_of_other_processes_do_not_reach_a_terminal(platform):
    options = {"platform": "local", "cpu": "many"}
    record = Record("a", maker=replace(NOBODY, host=STEERING, user=STEERING), options=options)
    folder = write_record(record)
    (folder / LOGS_FOLDER / "a-0.log").write_text(f"{STEERING}\n50%\r100%\n")
    for arguments in ["list"], ["info", "a"], ["logs", "a"], ["scale", f"b{STEERING}", "1"]:
        status, output = in_a_terminal(command(*arguments))
        assert status == (arguments[0] == "scale")  # no cluster has this name
        assert r"\x1b]0;title\x07\x1b[2J\u202e\u200f" in output
        # The terminal ends lines with \r\n, click makes headings bold, and progress is replaced.
        left = re.sub("\r\n|\x1b\\[[01]m|\r\x1b\\[2K", "", output)
        assert left == printable(left)


def test_logs_are_followed_until_the_cluster_is_gone(write_log):
    with started("logs", "left", "--follow") as process:

        def shown(n):
            return [process.stdout.readline() for _ in range(n)]

        assert shown(2) == ["==> Scheduler <==\n", "Scheduler at\n"]
        assert shown(4) == ["\n", "==> left-0 <==\n", "Start worker\n", "End worker\n"]
        write_log("left-0", "once more\nand")
        assert shown(1) == ["once more\n"]
        write_log("left-2", "begins\n")
        assert shown(3) == ["\n", "==> left-2 <==\n", "begins\n"]
        write_log("left-2", "anew\n", "w")
        assert shown(1) == ["anew\n"]
        store.remove(store.read("left"))
        assert process.wait(120) == 0
        assert process.stdout.read() == ""
        assert process.stderr.read() == "Cluster left shut down\n"


def test_logs_of_chosen_workers_are_followed_until_ctrl_c(write_log):
    with started("logs", "left", "left-0", "-f") as process:
        assert process.stdout.readline() == "==> left-0 <==\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        assert process.stderr.read() == ""


# -- what create is given


@pytest.fixture
def given(monkeypatch):
    """What CMLCluster is called with; it is not made."""
    calls = []

    def call(self, **kwargs):
        calls.append(kwargs)
        raise ValueError("it is not made")

    monkeypatch.setattr("dask_cml.cluster.CMLCluster.__init__", call)

    def given(*arguments):
        assert run("create", *arguments, code=1) == "Error: it is not made\n"
        [kwargs] = calls
        calls.clear()
        assert kwargs["shutdown_on_close"] is True
        return kwargs

    return given


def test_create_has_a_flag_for_what_a_cluster_keeps():
    context = cli.create.create.make_context("create", [])
    flags = {flag for parameter in cli.create.create.get_params(context) for flag in parameter.opts}
    without = {"create_mode", "orphan_timeout", "shutdown_on_close", "forward_dashboard"}
    settled = {argument.name for argument in ARGUMENTS.values() if f"--{argument.key}" not in flags}
    assert settled == without
    assert flags - {f"--{argument.key}" for argument in ARGUMENTS.values()} == {
        *("new_name", "--help", "--inherit", "--limits-hours"),
    }


def test_create_sets_what_a_cluster_takes_from_the_configuration_alone(monkeypatch):
    found = []

    def call(self, **kwargs):
        found.append((setting("inherit"), setting("limits.hours"), {"inherit", "limits_hours"} & {*kwargs}))
        raise ValueError("it is not made")

    monkeypatch.setattr("dask_cml.cluster.CMLCluster.__init__", call)
    run("create", "--inherit", "sql kafka", "--limits-hours", 8, code=1)
    assert found == [(("sql", "kafka"), 8, set())]
    assert (setting("inherit"), setting("limits.hours")) == ((), None)
    assert run("create", "--limits-hours", 0, code=1).startswith(
        "Error: invalid limits_hours=0: expected a number"
    )


def test_create_takes_every_kind_of_option(given):
    kwargs = given(
        *("--no-security", "--env", "A=1", "--env", "B=", "--launch-options", "accelerator_label_id=3"),
        *(
            "--scheduler-args",
            "--preload 'a b'",
            "--worker-class",
            "x.Y",
            "--platform",
            "local",
            "--n-workers",
            2,
        ),
    )
    assert kwargs["security"] is False
    assert kwargs["env"] == {"A": "1", "B": ""}
    assert kwargs["launch_options"] == {"accelerator_label_id": 3}
    assert kwargs["scheduler_args"] == ["--preload", "a b"]
    assert kwargs["n_workers"] == 2
    assert (kwargs["worker_class"], kwargs["platform"]) == ("x.Y", "local")


@pytest.mark.parametrize("arguments", [("lab",), ("--name", "lab")])
def test_create_takes_the_name_as_the_other_commands_do(given, arguments):
    assert given(*arguments)["name"] == "lab"


def test_create_takes_one_name():
    error = run("create", "lab", "--name", "night", code=2)
    assert "expected one name: got 'lab', and --name night" in error


def test_an_idle_cluster_shuts_down_after_an_hour_by_default(given):
    def idle_timeout(*arguments):
        return given(*arguments).get("idle_timeout", "as configured")

    assert idle_timeout() == "1 hour"
    assert idle_timeout("--idle-timeout", "5 minutes") == "5 minutes"
    assert idle_timeout("--idle-timeout", "never") == "never"
    with dask.config.set({"cml.idle-timeout": "2 hours"}):
        assert idle_timeout() == "as configured"


@pytest.mark.parametrize(
    ("option", "code"),
    [
        (("--cpu", "-1"), 1),
        (("--cpu", "many"), 1),
        (("--env", "A"), 1),
        (("--worker-args", "'"), 1),
        (("--platform", "mine"), 2),
        (("--n-workers", "lots"), 2),
    ],
)
def test_an_invalid_option_is_refused_before_a_launch(platform, option, code):
    error = run("create", *option, code=code)
    assert "Error: " in error
    assert "'lots'" not in error or "'--n-workers': 'lots'" in error
    assert platform.sessions() == []


def test_a_shell_whose_encoding_lacks_a_character_gets_the_line_nevertheless(state):
    write_record(Record("łódź", options={"platform": "local"}))
    result = CliRunner(charset="latin-1").invoke(cli.cml, ["list"])
    assert (result.exit_code, "\\u0142" in result.output) == (0, True)


def test_help_groups_the_options_of_a_cluster_and_shows_their_defaults(monkeypatch):
    with dask.config.set({"cml.env": {"TOKEN": "s3cr3t"}, "cml.scheduler-args": ["--preload", "a b"]}):
        cli.create._cluster_options.cache_clear()
        text = " ".join(run("create", "--help").split())
    cli.create._cluster_options.cache_clear()
    headings = [
        "One worker session:",
        "The scheduler's session:",
        "Every session:",
        "The cluster:",
        "The platform:",
    ]
    places = [text.index(heading) for heading in (*headings, "This command: --help")]
    assert places == sorted(places)
    assert "of one worker session. [default: 0]" in text
    assert "[default: security]" in text
    assert "[default: --preload 'a b']" in text
    assert "s3cr3t" not in text
    assert text.count('By default 1 hour; "never"') == 1
    assert "--scheduler-memory" in text
    assert "--shutdown-on-close" not in text
    group = run("group", "add", "--help")
    assert "The scheduler's session:" not in group
    assert "[default: 0]" not in group


# -- what is left of clusters


@pytest.mark.slow
def test_a_cluster_whose_sessions_cannot_be_stopped_keeps_its_record(platform):
    [session] = platform.launch_workers(1, 1, 1, name="kept", code="import time; time.sleep(600)")
    add_stale("kept", launches=sessions(**{session["id"]: "scheduler"}))
    add_stale("other")
    faults.inject("error", function="stop_workers", status=403, times=100)
    out, err = shell("delete", "--all", code=1)
    assert out == "Cluster other deleted\n"
    again = r"To try again: `dask cml delete kept`"
    assert re.fullmatch(rf"Error: cluster kept not deleted: .*{session['id']}.*\. {again}\n", err)
    assert [record.name for record in store.records()] == ["kept"]
    faults.clear()
    run("delete", "kept")


async def test_deleting_a_cluster_without_keys_ends_no_other_scheduler_at_its_address(tmp_path):
    async with scheduler_in(prepare(tmp_path / "other")) as other:
        add_record("mine", other.address)
        assert await operations.end_all(store.records()) == {"mine": None}
        assert other.status.name == "running"


# -- terminals


def test_a_narrow_terminal_cuts_no_name():
    name = "a-long-name-" * 8
    add_record(name)
    status, output = in_a_terminal(command("list"), COLUMNS="40")
    assert (status, name in output) == (0, True)


def test_progress_is_for_terminals_only(capsys, monkeypatch):
    console.show("waiting")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    console.show(f"waiting{STEERING}")
    console.show()
    out, err = capsys.readouterr()
    assert not out
    assert err == f"\r\x1b[2Kwaiting{printable(STEERING)}\r\x1b[2K"


def test_names_are_completed():
    def complete(words, incomplete):
        completion = ShellComplete(cli.cml, {}, "cml", "_CML_COMPLETE")
        return [item.value for item in completion.get_completions(words, incomplete)]

    for name in ("one", "other", "o $(touch hacked)"):  # click's script for bash quotes nothing
        add_stale(name)
    assert complete(["info"], "o") == ["one", "other"]
    assert complete(["delete", "one"], "") == ["other"]
    assert complete(["create"], "--scheduler-m") == ["--scheduler-memory"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (119, "119 s"),
        (179, "2.9 min"),
        (300, "5 min"),
        (3600, "60 min"),
        (10_476, "2.9 h"),
        (7_200, "2 h"),
        (90_000, "25 h"),
        (604_799, "6.9 d"),
        (1e6, "11 d"),
    ],
)
def test_durations_have_one_unit_and_two_digits(seconds, text):
    assert format_duration(seconds) == text
