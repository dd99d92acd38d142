"""The web UI, ``dask cml serve``: its clusters, the clusters of others, and the answers of its API."""

import asyncio
import json
import signal

import pytest
from clusters import create_and_kill, create_elsewhere
from conftest import PATIENCE
from distributed import Client
from served import PageServer
from shells import run, run_json
from simulated.faults import UnexpectedError
from simulated.shell import shell, shell_json
from simulated.testing import eventually, simulated
from web_ui import leave, on_page, running, serving

pytestmark = pytest.mark.usefixtures("light")


async def info(name):
    return await shell_json("info", name)


@on_page
async def test_the_page_creates_shows_scales_adapts_and_deletes_a_cluster(server, it):
    created = await server.post("/api/clusters", name="night", n_workers=1, cpu=2, memory="1 GiB")
    assert created.status in (201, 202)
    await server.until("night", running)
    found = await server.get("/api/clusters/night")
    assert (found["address"], found["client"]) == ("cml://night", 'Client("cml://night")')
    assert [session["role"] for session in found["sessions"]] == ["scheduler", "worker"]
    assert found["usage"]["total"]["sessions"] == 2
    assert "after 60 min without tasks" in (await info("night"))["ends"]

    assert (await server.post("/api/clusters/night/scale", n=3, worker_group="default")).status == 200
    await server.until("night", lambda cluster: running(cluster) and cluster["n_workers"] == 3)
    answer = await server.post("/api/clusters/night/adapt", minimum=0, maximum=2)
    assert answer.json["groups"][0]["adapts"] == {"minimum": 0, "maximum": 2}
    await server.until("night", lambda cluster: running(cluster) and cluster["n_workers"] == 0)
    async with Client("cml://night", asynchronous=True) as client:
        assert await client.submit(sum, [1, 2]) == 3
    answer = await server.request("DELETE", "/api/clusters/night/adapt?worker_group=default")
    assert answer.json["groups"][0]["adapts"] is None

    assert (await server.request("DELETE", "/api/clusters/night")).status == 200
    assert (await server.get("/api/clusters"))["clusters"] == []
    assert not it.platform.live
    [ended] = (await server.get("/api/history"))["clusters"]
    assert ended["name"] == "night"
    assert ended["why"].startswith("deleted by ")


@on_page
async def test_a_launch_that_cml_refuses_is_answered_with_its_reason_and_leaves_nothing(server, it, caplog):
    it.platform.configure({"sessions": 0})
    answer = await server.post("/api/clusters", name="night", n_workers=1)
    assert answer.status == 503
    assert "quota" in answer.json["error"]
    it.platform.configure()
    it.platform.fail("launch_workers", UnexpectedError("engineId"))
    answer = await server.post("/api/clusters", name="night", n_workers=1)
    assert (answer.status, "Traceback" in caplog.text) == (500, True)
    assert (await server.get("/api/clusters"))["clusters"] == []
    assert it.clusters == []


@pytest.mark.slow
@on_page
async def test_a_start_that_fails_later_stays_listed_with_its_reason_until_it_is_deleted(server, it):
    it.platform.doom("silent", key="scheduler")
    await server.post("/api/clusters", name="night", scheduler_timeout="60s")
    found = await server.until("night", lambda cluster: cluster["status"] == "failed")
    assert "did not answer within 60 s" in found["problem"]
    assert (await server.request("DELETE", "/api/clusters/night")).status == 200
    assert (await server.get("/api/clusters"))["clusters"] == []


@on_page
async def test_the_api_answers_each_error_with_its_status_and_reason(server):
    await server.post("/api/clusters", name="night")
    await server.until("night", running)
    big = json.dumps({"name": "x" * 70_000})
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    cases = [
        (400, await server.post("/api/clusters", cpu=-1), "invalid cpu=-1"),
        (401, await server.request("GET", "/api/clusters", token=False), "token"),
        (404, await server.request("GET", "/api/clusters/day"), "day"),
        (405, await server.request("DELETE", "/api/clusters"), ""),
        (409, await server.post("/api/clusters", name="night"), "To connect to it, in Python "),
        (413, await server.request("POST", "/api/clusters", raw=big), ""),
        (415, await server.request("POST", "/api/clusters", raw="--x--", **form), ""),
    ]
    for status, answer, words in cases:
        assert answer.status == status
        assert words in answer.json["error"]
    await server.request("DELETE", "/api/clusters/night")


@on_page
async def test_a_cluster_of_a_notebook_is_shown_changed_and_deleted_and_the_notebook_manages_it(server, it):
    creator = await create_elsewhere(it, name="day", security=True, n_workers=1)
    await server.until("day", running)
    assert (await server.post("/api/clusters/day/scale", n=2)).status == 200
    await server.until("day", lambda found: running(found) and found["n_workers"] == 2)
    found = await info("day")
    assert f"(process {creator.pid})" in found["manager"]
    assert f"with the creator's process {creator.pid} on " in "".join(found["ends"])
    assert (await server.request("DELETE", "/api/clusters/day")).status == 200
    await eventually(lambda: not it.platform.live)
    creator.kill()


@pytest.mark.slow
@on_page
async def test_a_cluster_that_outlives_its_creator_manages_itself_while_the_page_shows_it(server, it):
    await leave("day", n_workers=1)
    await server.until("day", running)
    while (await info("day"))["manager"] != "its scheduler's session":
        await asyncio.sleep(1.0)
    it.platform.evict(it.platform.running["day-0"])
    await eventually(lambda: "day-1" in it.platform.running)
    await server.until("day", running)
    await server.request("DELETE", "/api/clusters/day")


@pytest.mark.slow
@on_page
async def test_a_page_that_only_shows_an_orphan_does_not_keep_it(server, it):
    await create_and_kill(it, name="day", n_workers=1, security=True, orphan_timeout="60s")
    await server.until("day", running)
    await eventually(lambda: not it.platform.live)
    while not (ended := (await server.get("/api/history"))["clusters"]):
        await asyncio.sleep(1.0)
    assert [cluster["why"] for cluster in ended] == [
        "orphaned: no process and no client has used it for 60 s"
    ]


@on_page
async def test_a_change_of_a_cluster_that_nobody_manages_is_carried_out(server, it):
    await create_and_kill(it, name="day", n_workers=1, security=True, orphan_timeout="10 minutes")
    await server.until("day", running)
    assert (await server.post("/api/clusters/day/scale", n=2)).status == 200
    await server.until("day", lambda found: running(found) and found["n_workers"] == 2)
    assert len(it.platform.running) == 3
    await server.request("DELETE", "/api/clusters/day")


@on_page
async def test_a_cluster_without_keys_is_shown_by_its_files_and_can_only_be_deleted(server, it):
    """Another program may have its address by now, and would get whatever is sent there."""
    creator = await create_elsewhere(it, name="open", security=False, n_workers=1)
    found = await server.until("open", lambda cluster: cluster["status"] == "running")
    assert found["n_workers"] == 1
    assert len((await server.get("/api/clusters/open"))["sessions"]) == 2
    for path, body in (("scale", {"n": 2}), ("adapt", {"minimum": 1})):
        answer = await server.post(f"/api/clusters/open/{path}", **body)
        assert answer.status == 503
        assert answer.json["error"].startswith("cluster 'open' has no keys, so the web UI cannot tell it")
    assert (await server.request("DELETE", "/api/clusters/open")).status == 200
    await eventually(lambda: not it.platform.live)
    creator.kill()


@simulated
async def test_a_page_that_stops_shuts_down_its_own_clusters_and_no_others(it):
    await leave("day")
    async with serving() as server:
        await server.post("/api/clusters", name="night", n_workers=1)
        await server.until("night", running)
        await server.until("day", running)
    assert {*it.platform.running} == {"day-scheduler"}
    assert [row["name"] for row in await shell_json("list")] == ["day"]
    await shell("delete", "day")


@pytest.mark.slow
@simulated
async def test_another_page_takes_over_the_clusters_of_a_killed_one(it):
    async def serve():
        async with serving() as server:
            await server.post("/api/clusters", name="night", n_workers=1)
            await server.until("night", running)
            created.set()
            await asyncio.Event().wait()

    created = asyncio.Event()
    page = it.process("page", {"CDSW_ENGINE_ID": "notebook12345678"})
    page.start(serve())
    await created.wait()
    page.kill()
    async with serving() as server:
        await server.until("night", running)
        it.platform.evict(it.platform.running["night-0"])
        await eventually(lambda: "night-1" in it.platform.running)
        await asyncio.sleep(120.0)  # no orphan
        assert len(it.platform.running) == 2
    assert not it.platform.live


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.images), signal.SIGINT, signal.SIGHUP]
)
def test_a_signal_ends_the_command_and_its_own_clusters(locally, tmp_path, number):
    with PageServer(tmp_path) as page:
        run("create", "day")
        page.create("night", n_workers=1)
        page.until_runs("day", 0)
        page.process.send_signal(number)
        assert page.process.wait(PATIENCE) == 0
    assert [row["name"] for row in run_json("list")] == ["day"]
    run("delete", "day")


@pytest.mark.images
def test_a_restarted_command_takes_over_the_clusters_of_a_killed_one(locally, tmp_path):
    with PageServer(tmp_path) as page:
        page.create("night", n_workers=1)
        page.process.kill()
    with PageServer(tmp_path) as page:
        page.until_runs("night", 1)
        with Client("cml://night") as client:
            assert client.submit(sum, [1, 2]).result() == 3
    assert run_json("list") == []
