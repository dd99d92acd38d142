"""``dask cml``, as a user has it in a shell."""

import asyncio
import re
from dataclasses import replace

import dask
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from clusters import (
    ObservedCluster,
    arrived,
    create_elsewhere,
    limits,
    live,
    sessions,
    simulate,
    target,
    who_gave_up,
    write_record,
)
from distributed import Client
from ports import free_port
from programs import STEERING, in_a_terminal
from shells import command, run, run_json, started
from simulated.shell import shell
from simulated.testing import eventually, simulated

import dask_cml
from dask_cml import cli
from dask_cml.cli import change, console
from dask_cml.layout import LOGS_FOLDER
from dask_cml.options import setting, state_directory
from dask_cml.records import store
from dask_cml.records.store import Maker, Record, SchedulerState
from dask_cml.sessions import tls
from dask_cml.words import format_duration, printable

pytestmark = pytest.mark.usefixtures("locally", "no_nannies")
NOBODY = Maker("elsewhere", 1, 1.0, "gone")


def listed(name):
    """Return what `dask cml list` says of a cluster, which its scheduler writes a moment later."""
    [row] = [row for row in run_json("list") if row["name"] == name]
    return row


def add_stale(name, **more):
    """Write the record of a cluster with keys, at whose address nobody answers."""
    keys, files = tls.as_files(True, state_directory() / name)
    launches = more.get("launches", {}).values()
    launched = (launch.id for launch in launches if launch.key == "scheduler")
    scheduler = SchedulerState(address=f"tls://127.0.0.1:{free_port()}", session=next(launched, None))
    more |= {"options": {"platform": "local"}, "scheduler": scheduler, "security": tls.paths(keys)}
    write_record(Record(name, maker=NOBODY, **more))
    tls.write(files)


@pytest.mark.slow
def test_create_names_a_command_and_the_link_of_a_dashboard_that_outlives_it(until):
    with dask.config.set({"cml.forward-dashboard": True}):  # for the creator
        output = run("create", "--name", "mine")
        assert store.read("mine").scheduler.orphan_timeout is None
    assert "Cluster mine has no workers yet: run `dask cml scale mine N` or " in output
    [link] = re.findall("^Dashboard: (.*)$", output, re.MULTILINE)
    with ObservedCluster.from_name("mine", quiet=True) as cluster:
        assert cluster.dashboard_link == link
    until(lambda: listed("mine")["dashboard"] == link)
    assert run("list").splitlines()[1].endswith(link)
    run("delete", "mine")


@pytest.mark.slow
def test_a_refused_launch_shows_the_reason_of_the_platform(platform):
    platform.configure(quota={"cpu": 2, "memory": 100})
    error = run("create", "--n-workers", 3, code=1)
    assert error.startswith("Error: CML refused to launch")
    assert "exceeded quota" in error
    assert "Or create the cluster without workers and scale it: " in error.splitlines()[1]
    assert not live(platform)
    assert store.records() == []


@pytest.mark.slow
@simulated
async def test_the_keeper_does_what_commands_ask_for(it):
    async with simulate(name="mine", security=True) as cluster:
        with dask.config.set({"cml.limits.sessions": 3}):
            words = "expected at most 2, because cml.limits.sessions is 3, in Dask's configuration"
            for arguments, error in [
                (("scale", "mine", 3), f"N=3: {words}"),
                (("group", "add", "mine", "big", "--n-workers", 3), f"--n-workers=3: {words}"),
                (("group", "add", "mine", "0"), "GROUP='0': expected at most 40 letters"),
                (("scale", "mine", 1, "--group", "gpu"), "--group='gpu': expected one of 'default'"),
                (("group", "delete", "mine", "default"), "GROUP='default': expected an added group (none); "),
                (("adapt", "mine", 2, 1), "MAXIMUM=1: expected at least 2 worker sessions, with MINIMUM=2"),
            ]:
                assert f"Error: invalid {error}" in await shell(*arguments, code=2)
            assert await shell("adapt", "mine", 0) == "Cluster mine adapts between 0 and 2 workers\n"
        assert await shell("adapt", "mine", 1, 2) == "Cluster mine adapts between 1 and 2 workers\n"
        await eventually(lambda: arrived(cluster) == 1)
        assert limits(cluster) == (1, 2)
        assert " of 1 (adapts between 1 and 2)" in await shell("group", "list", "mine")
        it.platform.doom("fails", times=10)
        assert "no new workers after 5 failures" in await shell("scale", "mine", 2, code=1)
        it.platform.heal()
        it.platform.doom("silent")
        waiting = asyncio.create_task(shell("scale", "mine", 2, code=1))
        await eventually(lambda: target(cluster) == 2 and who_gave_up(cluster) == {})
        await cluster.shutdown()
        assert "Error: the cluster mine has shut down: closed by" in await waiting


@simulated
async def test_ctrl_c_while_scale_waits_says_what_the_cluster_still_does(it, capsys):
    async with simulate(name="mine") as cluster:
        cluster.scale(2)
        waiting = asyncio.create_task(change.wait_for_scale(cluster, 2, "default", 600.0))
        await asyncio.sleep(0.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert capsys.readouterr().err == "Cluster mine still scales to 2 workers\n"


@simulated
async def test_info_names_the_command_with_which_a_cluster_without_a_manager_adapts_again(it):
    creator = await create_elsewhere(it, name="lab", orphan_timeout="5 minutes")
    await shell("adapt", "lab", 1, 2)
    async with Client("cml://lab", asynchronous=True):
        creator.kill()
        await asyncio.sleep(60.0)
        assert "nothing adapts until you run `dask cml adapt lab 1 2`" in await shell("info", "lab")
    await eventually(lambda: not it.platform.live)


def test_list_and_info_show_what_is_left_and_the_command_that_removes_it():
    launches = sessions(aaaa="scheduler", bbbb="left-0")
    launches["bbbb"] = replace(launches["bbbb"], owner="72e171bfe1364d9c")
    address = f"tcp://127.0.0.1:{free_port()}"
    scheduler = SchedulerState(address=address, app_url="https://a/", closed="orphaned", session="aaaa")
    options = {"platform": "local", "scheduler_args": ["--no-dashboard"]}
    maker = replace(NOBODY, session=None)  # a session of the local platform ends with no other session
    write_record(Record("left", maker=maker, options=options, scheduler=scheduler, launches=launches))
    assert listed("left")["dashboard"] is None
    table, info = run("list"), run("info", "left")
    assert "https://a/" not in table
    problem = "its scheduler has closed: orphaned; run `dask cml delete left`\n"
    assert f"\nEnd of left: {problem}" in table
    assert f"\nend        {problem}" in info
    assert "bbbb  left-0  if it still runs\n" in info
    write_record(Record("far", maker=NOBODY, options={"platform": "cml"}))
    assert "\nends " not in info
    assert "\nends       not by itself\n" in run("info", "far")
    deleted = run("delete", "left", "far", "--reason", "not used", code=1)
    assert "Cluster left deleted\nError: cluster far not deleted: " in deleted
    assert deleted.endswith(". To try again: `dask cml delete far`\n")
    assert [record.name for record in store.records()] == ["far"]
    assert "orphaned; not used" in run("history")
    assert run("--version") == f"dask-cml, version {dask_cml.__version__}\n"


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
    assert run("logs", "left", "left-0", "left-1", code=2) == (
        "Error: invalid WORKER='left-1': expected one of Cluster, Scheduler, left-0, left-2\n"
    )
    # It has printed no line yet, and the documentation asks for both logs.
    assert run("logs", "left", "Cluster", "Scheduler") == scheduler
    lines = "==> left-0 <==\nEnd worker\n"
    assert run("logs", "left", "--tail", 1) == f"{scheduler}\n{lines}"
    assert run("logs", "left", "--warnings") == "No warnings of left yet\n"
    hot, cool = (f"2026-11-20 10:00:00,000 - distributed - {level} - It\n" for level in ("WARNING", "INFO"))
    write_log("left-0", f"{hot}  is hot\n{cool}[dask worker exited with status 1]\n")
    worker = f"==> left-0 <==\n{hot}  is hot\n[dask worker exited with status 1]\n"
    assert run("logs", "left", "--warnings") == worker
    assert run("logs", "left", "--warnings", "--tail", 1) == f"==> left-0 <==\n{worker.splitlines()[-1]}\n"


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


@pytest.mark.slow
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


@pytest.fixture
def given(monkeypatch):
    """What CMLCluster is called with; it is not made."""
    calls = []

    def call(self, **kwargs):
        configured = {name: setting(name) for name in ("inherit", "limits.hours")}
        calls.append(kwargs | configured)
        raise ValueError("it is not made")

    monkeypatch.setattr("dask_cml.cluster.CMLCluster.__init__", call)

    def given(*arguments):
        assert run("create", *arguments, code=1) == "Error: it is not made\n"
        [kwargs] = calls
        calls.clear()
        assert kwargs["shutdown_on_close"] is True
        return kwargs

    return given


def test_create_takes_every_kind_of_option(given):
    kwargs = given(
        *("--name", "lab", "--no-security", "--env", "A=1", "--env", "B="),
        *("--launch-options", "accelerator_label_id=3", "--scheduler-args", "--preload 'a b'"),
        *("--worker-class", "x.Y", "--platform", "local", "--n-workers", 2),
    )
    assert kwargs["security"] is False
    assert kwargs["name"] == given("lab")["name"] == "lab"
    error = run("create", "lab", "--name", "night", code=2)
    assert "expected one name: got 'lab', and --name night" in error
    assert kwargs["env"] == {"A": "1", "B": ""}
    assert kwargs["launch_options"] == {"accelerator_label_id": 3}
    assert kwargs["scheduler_args"] == ["--preload", "a b"]
    assert kwargs["n_workers"] == 2
    assert (kwargs["worker_class"], kwargs["platform"]) == ("x.Y", "local")
    # What a cluster takes from the configuration alone.
    kwargs = given("--inherit", "sql kafka", "--limits-hours", 8)
    assert (kwargs["inherit"], kwargs["limits.hours"]) == (("sql", "kafka"), 8)
    assert "limits_hours" not in kwargs
    error = run("create", "--limits-hours", 0, code=2)
    assert error.startswith("Error: invalid --limits-hours=0: expected a number")
    assert given("--env", '{"A": "1"}', "--resources", "GPU=1")["env"] == {"A": "1"}


def test_an_idle_cluster_shuts_down_after_an_hour_by_default(given):
    def idle_timeout(*arguments):
        return given(*arguments).get("idle_timeout", "as configured")

    assert idle_timeout() == "1 hour"
    assert idle_timeout("--idle-timeout", "5 minutes") == "5 minutes"
    assert idle_timeout("--idle-timeout", "never") == "never"
    with dask.config.set({"cml.idle-timeout": "2 hours"}):
        assert idle_timeout() == "as configured"


def test_an_invalid_option_is_refused_before_a_launch(platform):
    for option, words in {
        "--cpu=-1": "invalid --cpu=-1: expected a number",
        "--cpu=many": "invalid --cpu='many': expected a number",
        "--env=A": "invalid --env: expected NAME=VALUE",
        "--worker-args='": "invalid --worker-args: expected a command line",
        "--platform=mine": "",
        "--resources=GPU=0": "invalid --resources['GPU']=0: expected a number",
        "--processes=99": "invalid --processes=99: expected at most 13, with --memory=2 GiB",
    }.items():
        assert f"Error: {words}" in run("create", option, code=2)
    assert "invalid --name='': expected 1 to 100 printable" in run("create", "", code=2)
    assert "'--n-workers': 'lots'" in run("create", "--n-workers", "lots", code=2)
    assert "valid number of workers: expected a whole number" in run("scale", "lab", "lots", code=2)
    with dask.config.set({"cml.limits.sessions": 3}):
        words = "invalid --n-workers=3: expected at most 2, because cml.limits.sessions is 3, in Dask's"
        assert words in run("create", "--n-workers", 3, code=2)
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
    with dask.config.set({"cml.state-directory": __file__}):
        assert complete(["info"], "") == []


def test_durations_have_one_unit_and_two_digits():
    texts = {0.4: "0 s", 119: "119 s", 179: "2.9 min", 300: "5 min", 3600: "60 min", 10_476: "2.9 h"}
    texts |= {7_200: "2 h", 90_000: "25 h", 604_799: "6.9 d", 1e6: "11 d"}
    assert {seconds: format_duration(seconds) for seconds in texts} == texts
