"""``dask cml``: what its commands do, print and return."""

import asyncio
import json
import re
import signal
import time

import dask
import pytest
from clusters import arrived, create_and_kill, create_elsewhere, live, rebuild, simulate
from distributed import Client
from distributed.core import Status
from shells import run, run_json, shell, started
from simulated.shell import shell as shell_in_world
from simulated.shell import shell_json
from simulated.testing import eventually, simulated

from dask_cml import CMLCluster

LAB = {"name": "lab", "security": True}


@pytest.fixture
def locally(locally, no_nannies):
    return locally


def test_a_shell_creates_lists_scales_shows_and_deletes_a_cluster(locally, until, monkeypatch):
    monkeypatch.setenv("CDSW_ENGINE_ID", "mysession")
    out, err = shell("create", "night", "--n-workers", 1)
    assert out == "night\n"  # all else is for the reader
    assert re.match(r"Cluster night started in \d+ s", err)
    assert "\nAddress: cml://night\nDashboard: http" in err
    assert err.endswith("can run until session mysession ends, or until it is idle for 60 min.\n")

    assert run("scale", "night", 2) == "Cluster night scaled to 2 workers\n"
    until(lambda: run_json("list")[0]["workers"] == 2)
    header, line = run("list").splitlines()
    columns = "name status workers threads memory tasks by age dashboard"
    assert " ".join(header.split()) == columns
    assert line.split()[:4] == ["night", "running", "2", "2"]

    about = run("info", "night")
    for words in (
        "address    cml://night\n",
        "ends       after 60 min without tasks; with session mysession\n",
        "security   TLS with its own keys\n",
        "group      default  2 Dask workers connected, cpu=1 memory=2 nvidia_gpu=0\n",
        "  night-1  ends with the session mysession\n",
        "usage      total ",
    ):
        assert words in about
    described = run_json("info", "night")
    assert {*described["sessions"].values()} == {"scheduler", "night-0", "night-1"}
    assert {*described["sessions"]} == {session["id"] for session in live(locally)}
    logs = run("logs", "night")
    assert re.findall(r"==> (.*) <==", logs) == ["Scheduler", "night-0", "night-1"]
    assert "Scheduler at" in logs

    assert run("delete", "night") == "Cluster night deleted\n"
    assert not live(locally)
    assert run_json("list") == []
    assert run("logs", "night").startswith("Cluster night ended at ")  # even after its end
    assert [ended["name"] for ended in run_json("history")] == ["night"]


def test_ctrl_c_while_a_cluster_starts_stops_all_its_sessions(locally, until):
    locally.configure(start_delay=60)
    try:
        with started("create", "--n-workers", 1) as process:
            until(lambda: len(locally.sessions()) == 2)
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
            assert process.stdout.read() == ""
            assert process.stderr.read() == "Interrupted: 2 sessions stopped\n"
    finally:
        locally.configure(start_delay=0)
    assert all(session["stop_requested"] for session in locally.sessions())
    assert run_json("list") == []


@pytest.mark.slow
def test_flags_override_a_file_of_options(locally, tmp_path, monkeypatch):
    file = tmp_path / "night.yaml"
    file.write_text("cml:\n  name: night\n  n-workers: 0\n  env: {A: '1'}\n  idle-timeout: 2 hours\n")
    monkeypatch.setenv("DASK_CONFIG", str(file))
    env, arguments = ("--env", "B=2=3", "--env", "C=4"), ("--worker-args", "--lifetime '10 h'")
    out, _ = shell("create", "--n-workers", 1, *env, *arguments)
    assert out == "night\n"
    with CMLCluster.from_name("night", quiet=True) as cluster, Client(cluster) as client:
        client.wait_for_workers(1)
        [found] = client.run(lambda: dict(__import__("os").environ)).values()
        assert (found.get("B"), found.get("C")) == ("2=3", "4")
        assert "--lifetime" in cluster.job_script()
    assert "after 2 h without tasks" in run("info", "night")
    run("delete", "night")


def test_an_invalid_option_is_an_error_in_one_line_and_launches_nothing(locally):
    error = run("create", "--memory", "lots", code=2)
    assert error.startswith("Error: invalid --memory='lots': expected GiB as a number above 0")
    assert len(error.splitlines()) == 1
    assert "No such option" in run("create", "--no-such-option", code=2)
    assert locally.sessions() == []


@pytest.mark.slow
@simulated
async def test_scale_waits_until_all_are_connected_or_fails_with_the_reason_of_cml(it):
    async with simulate(**LAB) as cluster:
        assert await shell_in_world("scale", "lab", 2) == "Cluster lab scaled to 2 workers\n"
        assert arrived(cluster) == 2
        it.platform.configure({"sessions": 4})
        error = await shell_in_world("scale", "lab", 5, code=1)
        assert "the cluster lab has 3 of 5 workers launched: " in error
        assert "quota" in error
        it.platform.configure()
        await eventually(lambda: arrived(cluster) == 5)  # which the cluster tries again every minute


@simulated
async def test_groups_are_added_scaled_listed_and_deleted(it):
    async with simulate(**LAB) as cluster:
        added = await shell_in_world("group", "add", "lab", "big", "--n-workers", 1, "--memory", "4 GiB")
        assert added == "Worker group big added to cluster lab: 1 worker\n"
        assert "idle for" in await shell_in_world("list")  # from its first second
        await shell_in_world("scale", "lab", 2, "--group", "big")
        assert arrived(cluster) == cluster.worker_groups["big"].n_workers == 2
        listed = await shell_json("group", "list", "lab")
        assert [(group["name"], group["n_workers"]) for group in listed] == [("default", 0), ("big", 2)]
        deleted = await shell_in_world("group", "delete", "lab", "big")
        assert deleted == "Worker group big deleted from cluster lab\n"
        assert cluster.worker_groups.keys() == {"default"}


@pytest.mark.slow
@simulated
async def test_list_tells_running_starting_silent_and_dead_clusters_apart(it):
    async def create():
        async with simulate(name="starting", security=True):
            await asyncio.Event().wait()

    creators = [
        await create_elsewhere(it, name=name, security=True) for name in ("running", "silent", "dead")
    ]
    creators[2].kill()
    it.platform.evict(it.platform.running["dead-scheduler"])
    it.process_of("silent-scheduler").pause(3600.0)
    it.platform.doom("waits", key="scheduler")
    it.platform.configure({"sessions": 2}, waits_for_room=True)
    starting = it.process("starting")
    starting.start(create())
    await until_status(running="running", silent="not answering", dead="stale", starting="starting")
    assert "starting, queued" in await shell_in_world("list")
    # What may only be busy is left alone.
    pruned = await shell_in_world("prune")
    assert "Cluster dead deleted\n" in pruned
    assert "Cluster silent skipped: " in pruned
    assert "`dask cml delete silent`" in pruned
    assert "silent-scheduler" in it.platform.running
    starting.kill()
    await shell_in_world("delete", "--all")
    assert it.clusters == []
    await eventually(lambda: not it.platform.live)
    for creator in creators:
        creator.kill()


async def until_status(**expected):
    """Wait until `dask cml list` shows these clusters, with these words."""
    deadline = time.monotonic() + 300.0
    while (found := {row["name"]: row["status"] for row in await shell_json("list")}) != expected:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(1.0)


@simulated
async def test_list_and_info_show_queued_sessions_and_the_problem(it):
    with dask.config.set({"cml.failure-limit": 1}):
        async with simulate(**LAB) as cluster:
            it.platform.configure({"sessions": 1}, waits_for_room=True)
            cluster.scale(1)
            while "0 (1 queued" not in await shell_in_world("list"):
                await asyncio.sleep(1.0)
            cluster.scale(0)
            it.platform.configure()
            it.platform.doom("fails")
            cluster.scale(1)
            problem = "no new workers after 1 failures in a row: "
            while f"\nProblem of lab: {problem}" not in await shell_in_world("list"):
                await asyncio.sleep(1.0)
            assert problem in await shell_in_world("info", "lab")


@simulated
async def test_info_needs_no_name_in_a_project_with_one_cluster(it):
    assert "No clusters. Create one: " in await shell_in_world("info", code=2)
    async with simulate(**LAB):
        assert (await shell_in_world("info")).splitlines()[0].split() == ["name", "lab"]
        async with simulate(name="night"):
            assert "expected the name of a cluster: " in await shell_in_world("info", code=2)


@simulated
async def test_info_of_a_cluster_that_has_ended_names_its_history(it):
    async with simulate(**LAB):
        pass
    for words in ["info", "lab"], ["scale", "lab", 3], ["delete", "lab"], ["group", "list", "lab"]:
        error = await shell_in_world(*words, code=1)
        assert error.endswith("It has ended: run `dask cml history lab`\n")


@simulated
async def test_delete_ends_a_cluster_even_if_it_does_not_answer(it):
    await create_and_kill(it, **LAB, n_workers=1)
    it.process_of("lab-scheduler").pause(3600.0)
    assert await shell_in_world("delete", "lab") == "Cluster lab deleted\n"
    await eventually(lambda: not it.platform.live)
    assert it.clusters == []


@simulated
async def test_delete_ends_a_cluster_that_a_notebook_has_created_or_all_of_the_project(it):
    async with (
        simulate(**LAB, n_workers=1) as lab,
        simulate(name="night") as night,
        simulate(name="day") as day,
    ):
        assert await shell_in_world("delete", "lab") == "Cluster lab deleted\n"
        await eventually(lambda: lab.status == Status.closed)
        assert (night.status, day.status) == (Status.running, Status.running)
        assert "expected names of clusters" in await shell_in_world("delete", code=2)
        await shell_in_world("delete", "--all")
        await eventually(lambda: night.status == day.status == Status.closed)
    assert not it.platform.live


@simulated
async def test_an_unknown_name_is_an_error_with_the_names_that_exist(it):
    async with simulate(**LAB):
        for words in ["info", "other"], ["delete", "lab", "other"], ["scale", "other", 1], ["logs", "other"]:
            assert "existing clusters: 'lab'" in await shell_in_world(*words, code=1)
        assert "'lab'. Nothing was deleted\n" in await shell_in_world("delete", "lab", "other", code=1)
        for words in ["info", ""], ["delete", "lab", ""], ["scale", "", 1], ["logs", ""]:
            assert "invalid NAME='': expected 1 to 100 " in await shell_in_world(*words, code=1)
        assert {*it.platform.running} == {"lab-scheduler"}


@simulated
async def test_a_cluster_of_a_shell_adapts_by_itself_when_python_asks_for_it(it):
    await create_and_kill(it, **LAB, shutdown_on_close=False)
    async with rebuild("lab") as cluster:
        cluster.adapt(0, 2)
    async with Client("cml://lab", asynchronous=True) as client:
        assert await client.submit(sum, [1, 2]) == 3
        assert await client.gather(client.map(lambda n: n, range(3), pure=False)) == [0, 1, 2]
    while "adapts between 0 and 2" not in await shell_in_world("info", "lab"):
        await asyncio.sleep(1.0)
    await shell_in_world("delete", "lab")


@pytest.mark.slow
def test_programs_read_json_and_exit_codes(locally):
    assert json.loads(shell("list", "--json")[0]) == []
    assert shell("list") == ("", "No clusters. Create one: dask cml create --n-workers 2\n")
    assert "no cluster named 'lab'" in shell("delete", "lab", code=1)[1]
    assert "Missing argument" in shell("scale", "lab", code=2)[1]
