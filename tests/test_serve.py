"""The JSON API of `dask cml serve`: what it answers, whom, and what it manages."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import dask
import pytest
from conftest import PATIENCE, configured
from distributed import Client
from served import PageServer
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets

from dask_cml import CMLCluster
from dask_cml.manager import leadership
from dask_cml.records import store
from dask_cml.serve import board as board_module
from dask_cml.serve.access import Access
from dask_cml.serve.application import make_application
from dask_cml.serve.board import Board
from dask_cml.serve.views import TaskRate

SECRET = "correct-horse-battery"


@dataclass
class Answer:
    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


@dataclass
class Server:
    """The page, and a program that asks it."""

    board: Board
    access: Access

    async def ask(self, method: str, path: str, body: object = None, *, token=True, **headers) -> Answer:
        if token:
            headers["Authorization"] = f"Bearer {self.access.token}"
        request = HTTPRequest(
            f"http://127.0.0.1:{self.access.port}{path}",
            method=method,
            headers=headers,
            body=None if body is None else json.dumps(body),
            allow_nonstandard_methods=True,
            follow_redirects=False,
            request_timeout=120,
        )
        answer = await AsyncHTTPClient().fetch(request, raise_error=False)
        assert answer.code != 599, answer.error
        return Answer(answer.code, answer.headers, answer.body.decode())

    async def get(self, path: str, **headers) -> Any:
        answer = await self.ask("GET", path, **headers)
        assert answer.status == 200, answer
        return answer.json

    async def post(self, path: str, **body) -> Answer:
        return await self.ask("POST", path, body)

    async def cluster(self, name: str) -> Any:
        [found] = [each for each in (await self.get("/api/clusters"))["clusters"] if each["name"] == name]
        return found

    async def until(self, name: str, condition) -> Any:
        """Wait until what is said of a cluster fulfils a condition."""

        async def wait() -> Any:
            while True:
                found = [each for each in self.board.clusters() if each["name"] == name]
                if found and condition(found[0]):
                    return found[0]
                await asyncio.sleep(0.02)

        return await asyncio.wait_for(wait(), 120)


@pytest.fixture
def local_clusters(platform, light, monkeypatch):
    with configured(monkeypatch, "platform", "local"):
        yield


@pytest.fixture
async def server(local_clusters):
    sockets = bind_sockets(0, "127.0.0.1")
    access, board = Access(sockets[0].getsockname()[1]), Board(interval=0.1)
    http = HTTPServer(make_application(board, access))
    http.add_sockets(sockets)
    board.start()
    yield Server(board, access)
    http.stop()
    await board.close()
    await http.close_all_connections()


async def made_elsewhere(name, **options):
    """A cluster that nobody manages any more in this process."""
    options = {"shutdown_on_close": False, "quiet": True, **options}
    await (await CMLCluster(name=name, asynchronous=True, **options)).close()


def started(command):
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def running(cluster):
    return cluster["status"] == "running" and cluster["n_arrived"] == cluster["n_workers"]


# -- clusters of the page


async def test_cluster_is_created_described_and_deleted(server, platform):
    created = await server.post("/api/clusters", name="night", n_workers=1, cpu=2, memory="1 GiB")
    assert created.status in (201, 202)
    assert created.headers["Location"] == "/api/clusters/night"
    await server.until("night", running)
    found = await server.get("/api/clusters/night")
    assert (found["address"], found["client"]) == ("cml://night", 'Client("cml://night")')
    assert (found["threads"], found["memory"], found["kept"]) == (2, 2**30, True)
    assert [each["role"] for each in found["sessions"]] == ["scheduler", "worker"]
    assert {each["id"] for each in found["sessions"]} == {*store.read("night").sessions}
    assert found["usage"]["total"]["sessions"] == 2
    assert (await server.ask("DELETE", "/api/clusters/night")).status == 200
    assert (await server.get("/api/clusters"))["clusters"] == []
    assert (await server.ask("GET", "/api/clusters/night")).status == 404


async def test_cluster_of_the_page_is_used_from_another_process(server):
    await server.post("/api/clusters", name="night", n_workers=1)
    await server.until("night", running)
    code = 'from distributed import Client; print(Client("cml://night").submit(sum, [1, 2]).result())'
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    assert out.decode().strip() == "3"
    await server.until("night", lambda cluster: cluster["tasks_per_second"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cpu": -1}, "invalid cpu=-1: expected a number above 0"),
        ({"cpus": 1}, "invalid option 'cpus': expected one of n_workers, cpu, "),
        ({"shutdown_on_close": False}, "invalid option 'shutdown_on_close': expected one of "),
        ({"name": "../x"}, "invalid name='../x': expected "),
        (["cpu"], "invalid body: expected a JSON object"),
    ],
)
async def test_bad_options_are_refused_in_words(server, platform, options, words):
    answer = await server.ask("POST", "/api/clusters", options)
    assert answer.status == 400
    assert answer.json["error"].startswith(words)
    assert platform.sessions() == []


async def test_refused_cluster_is_told_in_the_platforms_words_and_leaves_nothing(server, platform):
    platform.configure(quota={"cpu": 2})
    answer = await server.post("/api/clusters", name="big", n_workers=2, cpu=2)
    assert answer.status == 503
    assert "exceeded quota" in answer.json["error"]
    assert (await server.get("/api/clusters"))["clusters"] == []
    platform.configure(quota={})


async def test_cluster_that_fails_later_is_listed_with_the_reason_until_it_is_dismissed(
    server, platform, monkeypatch
):
    monkeypatch.setattr(board_module, "_PATIENCE", 0.0)
    platform.configure(quota={"cpu": 2})
    assert (await server.post("/api/clusters", name="big", n_workers=2, cpu=2)).status == 202
    failed = await server.until("big", lambda cluster: cluster["status"] == "failed")
    assert "exceeded quota" in failed["problem"]
    assert (await server.get("/api/clusters/big"))["sessions"] == []
    platform.configure(quota={})
    assert (await server.ask("DELETE", "/api/clusters/big")).status == 200
    assert (await server.get("/api/clusters"))["clusters"] == []


async def test_taken_name_is_refused(server):
    await server.post("/api/clusters", name="night")
    await made_elsewhere("day")
    for name in ("night", "day"):
        answer = await server.post("/api/clusters", name=name)
        assert (answer.status, "already" in answer.json["error"]) == (409, True)
    await server.until("day", running)
    assert (await server.ask("DELETE", "/api/clusters/day")).status == 200


async def test_cluster_shuts_down_when_idle_unless_told_otherwise(server):
    await server.post("/api/clusters", name="night")
    await server.post("/api/clusters", name="day", idle_timeout="never")
    assert store.read("night").options["idle_timeout"] == 3600
    assert store.read("day").options.get("idle_timeout") is None


async def test_cluster_that_is_deleted_while_it_starts_leaves_nothing(server, platform, monkeypatch):
    monkeypatch.setattr(board_module, "_PATIENCE", 0.0)
    platform.configure(start_delay=60)
    await server.post("/api/clusters", name="night", n_workers=1)
    assert (await server.ask("DELETE", "/api/clusters/night")).status == 200
    assert (await server.get("/api/clusters"))["clusters"] == []


async def test_workers_are_scaled_and_adapted_by_group(server):
    await server.post("/api/clusters", name="night", n_workers=1, worker_groups={"big": {"cpu": 2}})
    await server.until("night", running)
    assert (await server.post("/api/clusters/night/scale", n=1, worker_group="big")).status == 200
    await server.until("night", lambda each: running(each) and each["n_workers"] == 2)
    answer = await server.post("/api/clusters/night/adapt", minimum=0, maximum=3, worker_group="big")
    limits = {group["name"]: group["adapts"] for group in answer.json["groups"]}
    assert limits == {"default": None, "big": {"minimum": 0, "maximum": 3}}
    await server.until("night", lambda each: running(each) and each["n_workers"] == 1)
    answer = await server.ask("DELETE", "/api/clusters/night/adapt?worker_group=big")
    assert [group["adapts"] for group in answer.json["groups"]] == [None, None]


BAD_NUMBERS = [
    ("scale", {}, "invalid body: expected n, a whole number"),
    ("scale", {"n": -1}, "invalid n=-1: expected "),
    ("scale", {"n": "2"}, "invalid n='2': expected a whole number"),
    ("scale", {"n": True}, "invalid n=True: expected a whole number"),
    ("scale", {"n": 1, "worker_group": "gpu"}, "invalid worker_group='gpu': expected one of 'default'"),
    ("scale", {"n": 1, "group": "gpu"}, "invalid 'group' in the body: expected n, worker_group"),
    ("adapt", {"minimum": 3, "maximum": 1}, "invalid m"),
    ("adapt", {"maximum": "many"}, "invalid maximum='many': expected a whole number or null"),
]


async def test_bad_numbers_are_refused_in_words(server):
    await server.post("/api/clusters", name="night")
    await server.until("night", running)
    for path, body, words in BAD_NUMBERS:
        answer = await server.ask("POST", f"/api/clusters/night/{path}", body)
        assert answer.status == 400, body
        assert answer.json["error"].startswith(words)
    assert (await server.cluster("night"))["n_workers"] == 0


async def test_what_does_not_run_is_not_scaled(server):
    assert (await server.post("/api/clusters/nosuch/scale", n=1)).status == 404
    assert (await server.ask("DELETE", "/api/clusters/nosuch")).status == 404


async def test_log_is_read_on_from_where_it_was(server):
    await server.post("/api/clusters", name="night")
    await server.until("night", running)
    assert (await server.get("/api/clusters/night/logs"))["sessions"] == ["Scheduler"]
    log = "/api/clusters/night/logs?session=Scheduler"
    first = await server.get(log)
    assert "Scheduler at:" in first["text"]
    assert (await server.get(f"{log}&offset={first['offset']}"))["text"] == ""
    async with Client("cml://night", asynchronous=True):
        pass
    assert "client" in (await server.get(f"{log}&offset={first['offset']}"))["text"]
    answer = await server.ask("GET", "/api/clusters/night/logs?session=../../record.json")
    assert (answer.status, answer.json["error"].startswith("invalid session")) == (400, True)


async def test_no_values_of_variables_and_no_keys_are_shown(server):
    await server.post("/api/clusters", name="night", n_workers=1, env={"PASSWORD": SECRET})
    await server.until("night", running)
    key = next(iter(store.read("night").get_security().get_tls_config_for_role("client").values()))
    for path in ("/api/clusters", "/api/clusters/night", "/", "/clusters/night"):
        answer = await server.ask("GET", path)
        assert SECRET not in answer.text
        assert str(key) not in answer.text
        assert "PRIVATE KEY" not in answer.text


# -- clusters of others


async def test_cluster_of_another_process_is_listed_scaled_and_deleted(server):
    await made_elsewhere("day", n_workers=1)
    found = await server.until("day", running)
    assert (found["kept"], found["threads"]) == (False, 1)
    await server.post("/api/clusters/day/scale", n=0)
    await server.until("day", lambda cluster: running(cluster) and cluster["n_workers"] == 0)
    await server.ask("DELETE", "/api/clusters/day")
    assert store.records() == []


async def test_lost_worker_of_a_cluster_without_a_manager_is_replaced(server, platform):
    await made_elsewhere("day", n_workers=1)
    await server.until("day", running)
    [lost] = [session for session, key in store.read("day").sessions.items() if key != "scheduler"]
    platform.stop_workers(lost)
    await server.until("day", lambda cluster: cluster["n_arrived"] == 0)
    await server.until("day", running)
    await server.ask("DELETE", "/api/clusters/day")


@pytest.mark.slow
async def test_cluster_goes_on_to_adapt_when_the_manager_that_did_has_left(server, monkeypatch):
    monkeypatch.setattr(leadership, "_ALONE", 0.0)
    await made_elsewhere("day")
    await server.until("day", running)
    command = [sys.executable, "-m", "dask", "cml", "adapt", "day", "1", "2"]
    with started(command) as adapting:
        await server.until("day", lambda cluster: cluster["n_workers"] == 1)
        cluster = server.board.manager_of("day")
        assert cluster._fleet.group().driver is None
        adapting.send_signal(signal.SIGINT)
        out, _ = await asyncio.to_thread(adapting.communicate, timeout=120)
    assert "continues to adapt" in out
    found = await server.until("day", lambda _: cluster._fleet.group().driver)
    assert found["groups"][0]["adapts"] == {"minimum": 1, "maximum": 2}
    async with Client("cml://day", asynchronous=True) as client:
        futures = client.map(lambda n: __import__("time").sleep(0.5), range(60), pure=False)
        await server.until("day", lambda cluster: cluster["n_arrived"] == 2)
        await client.cancel(futures)
    await server.ask("DELETE", "/api/clusters/day")


@pytest.mark.slow
async def test_orphan_is_not_kept_alive_by_looking(server, platform):
    code = (
        "import os, signal; from dask_cml import CMLCluster; "
        "cluster = CMLCluster(name='day', orphan_timeout=1, quiet=True); print('here', flush=True); "
        "signal.pause()"
    )
    with started([sys.executable, "-c", code]) as creator:
        assert await asyncio.to_thread(creator.stdout.readline) == "here\n"
        await server.until("day", running)
        creator.kill()
    await asyncio.wait_for(gone(server, "day"), 120)
    assert not [each for each in platform.sessions() if each["status"] == "running"]


async def gone(server, name):
    while any(each["name"] == name for each in server.board.clusters()):
        await asyncio.sleep(0.05)


async def test_cluster_whose_scheduler_does_not_answer_is_described_by_its_record(server):
    await made_elsewhere("day", n_workers=1)
    await server.until("day", running)
    [observed] = server.board.observed.values()
    observed.cluster, cluster = None, observed.cluster
    observed.not_before = float("inf")
    found = await server.get("/api/clusters/day")
    assert (found["threads"], len(found["sessions"])) == (None, 2)
    assert (await server.post("/api/clusters/day/scale", n=1)).status == 503
    observed.cluster = cluster
    await server.ask("DELETE", "/api/clusters/day")


# -- users


async def test_nobody_gets_in_without_the_token(server):
    for headers in ({}, {"Authorization": "Bearer x"}, {"Cookie": f"{server.access.cookie}=x"}):
        for method, path in (("GET", "/api/clusters"), ("GET", "/"), ("GET", "/clusters/x/dashboard/status")):
            answer = await server.ask(method, path, token=False, **headers)
            assert answer.status == 401
            assert server.access.token not in answer.text


async def test_link_with_the_token_signs_in_by_a_cookie(server):
    answer = await server.ask("GET", f"/?token={server.access.token}", token=False)
    assert (answer.status, answer.headers["Location"]) == (302, "?")
    [cookie] = [each for each in answer.headers.get_list("Set-Cookie") if server.access.token in each]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    cookie = cookie.partition(";")[0]
    assert (await server.ask("GET", "/api/clusters", token=False, Cookie=cookie)).status == 200
    # A form of another page would send the cookie, too.
    answer = await server.ask("POST", "/api/clusters", {"name": "night"}, token=False, Cookie=cookie)
    assert (answer.status, "_xsrf" in answer.json["error"]) == (403, True)


async def test_headers_of_the_platform_count_in_its_sessions_only(server, monkeypatch):
    writer = {"REMOTE-USER": "alice", "REMOTE-USER-PERM": "RW"}
    assert (await server.ask("GET", "/api/clusters", token=False, **writer)).status == 401
    monkeypatch.setenv("CDSW_ENGINE_ID", "eng1ne0000000000")
    monkeypatch.setenv("CDSW_APP_PORT", str(server.access.port))
    server.access.__post_init__()
    answer = await server.ask("GET", "/api/clusters", token=False, **writer)
    assert answer.json["user"] == {"name": "alice", "may_change": True}


@pytest.mark.parametrize("permission", [{"REMOTE-USER-PERM": "RO"}, {"REMOTE-USER-PERM": ""}, {}])
async def test_user_who_may_not_write_may_only_look(server, permission):
    server.access.behind_entry = True
    reader = {"REMOTE-USER": "bob", **permission}
    answer = await server.ask("GET", "/api/clusters", token=False, **reader)
    assert answer.json["user"] == {"name": "bob", "may_change": False}
    for method, path in (("POST", "/api/clusters"), ("DELETE", "/api/clusters/x")):
        answer = await server.ask(method, path, {}, token=False, **reader)
        assert (answer.status, answer.json["error"][:12]) == (403, "you may look")


async def test_cluster_belongs_to_the_user_who_asked(server):
    server.access.behind_entry = True
    writer = {"REMOTE-USER": "alice", "REMOTE-USER-PERM": "RW"}
    more = await xsrf(server, writer)
    answer = await server.ask("POST", "/api/clusters", {"name": "night"}, token=False, **writer, **more)
    assert answer.status in (201, 202)
    assert (await server.cluster("night"))["owner"] == "alice"
    assert store.read("night").maker.user == "alice"


async def xsrf(server, headers):
    """Return the headers by which the page proves that it sent a change."""
    answer = await server.ask("GET", "/", token=False, **headers)
    [cookie] = [each for each in answer.headers.get_list("Set-Cookie") if "xsrf" in each]
    name, _, value = cookie.partition(";")[0].partition("=")
    return {"Cookie": f"{name}={value}", "X-XSRFToken": value}


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Host": "evil.example"}, "The page refuses requests for host 'evil.example'"),
        ({"Origin": "https://evil.example"}, "The page refuses requests from pages of 'https://evil"),
        ({"Origin": "https://100%"}, "The page refuses requests from pages of 'https://100%'"),
        ({"Origin": "null"}, "The page refuses requests from pages of 'null'"),
    ],
)
async def test_foreign_host_and_origin_are_refused(server, headers, words):
    answer = await server.ask("POST", "/api/clusters", {"name": "night"}, **headers)
    assert (answer.status, answer.json["error"][: len(words)]) == (403, words)
    assert store.records() == []


def test_token_is_not_that_of_another_start(monkeypatch):
    assert Access(1).token != Access(1).token
    monkeypatch.setenv("DASK_CML_SERVE_TOKEN", SECRET)
    assert Access(1).token == SECRET


# -- the process


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_clusters_of_the_page_end_with_it_and_the_others_stay(local_clusters, tmp_path, number):
    with PageServer(tmp_path) as page:
        asyncio.run(made_elsewhere("day"))
        page.create("night", n_workers=1)
        page.until_runs("day", 0)
        page.process.send_signal(number)
        assert page.process.wait(PATIENCE) == 0
    assert [record.name for record in store.records()] == ["day"]
    CMLCluster.from_name("day", quiet=True).close()


def test_killed_page_takes_its_clusters_up_when_it_starts_again(local_clusters, tmp_path):
    with PageServer(tmp_path) as page:
        page.create("night", n_workers=1)
        page.process.kill()
    with PageServer(tmp_path) as page:
        page.until_runs("night", 1)
        assert page.clusters["night"]["kept"]
        with Client("cml://night") as client:
            assert client.submit(sum, [1, 2]).result() == 3
    assert store.records() == []


async def test_page_of_a_machine_without_a_platform_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("DASK_CML__STATE_DIRECTORY", str(tmp_path))
    with dask.config.set({"cml.platform": "auto"}):
        board = Board()
    assert "not in a CML session" in board.problem


async def test_page_with_an_invalid_platform_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("DASK_CML__STATE_DIRECTORY", str(tmp_path))
    with dask.config.set({"cml.platform": "kubernetes"}):
        board = Board()
    assert board.problem.startswith("invalid cml.platform='kubernetes': expected one of 'auto', 'local', in ")


def test_tasks_a_second_are_those_of_the_last_seconds():
    rate = TaskRate()
    assert rate.per_second is None
    for now in range(0, 101, 5):
        rate.count(10 * now if now < 50 else 500, now=float(now))
    assert rate.per_second == 0
    rate.count(3, now=105.0)  # the scheduler has been restarted
    rate.count(13, now=110.0)
    assert rate.per_second == 2
