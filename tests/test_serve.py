"""The JSON API of `dask cml serve`: its answers, its users, and the clusters that it shows and keeps."""

import asyncio
import email
import errno
import functools
import json
import os
import sys
import time
from http.cookiejar import CookieJar
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote, urljoin
from urllib.request import Request

import dask
import psutil
import pytest
import tornado
from click.testing import CliRunner
from clusters import LAUNCHED, NOTEBOOK, create_elsewhere, sessions, sign_of, simulate, write_record
from conftest import PATIENCE
from distributed import Client
from ports import free_port
from served import PageServer
from simulated.faults import HTTPError
from simulated.testing import eventually
from tornado import httputil
from tornado.httpclient import AsyncHTTPClient
from tornado.httputil import HTTPHeaders, HTTPServerRequest, RequestStartLine
from web_ui import first_result, leave, on_page, running, serving

from dask_cml import cli
from dask_cml.cancellation import cancel
from dask_cml.cli import create
from dask_cml.dashboard.http_server import local_socket
from dask_cml.errors import CMLError
from dask_cml.layout import LOGS_FOLDER
from dask_cml.options import state_directory
from dask_cml.records import operations, store
from dask_cml.records.store import Maker, Record, SchedulerState
from dask_cml.serve import clusters as clusters_module
from dask_cml.serve.access import Access, User
from dask_cml.serve.clusters import ProjectClusters
from dask_cml.serve.servers import Dashboards, serve, serve_dashboards
from dask_cml.sessions.here import this_user
from dask_cml.sessions.session_logs import SessionLogs

SECRET = "correct-horse-battery"


@pytest.fixture
async def server(locally, light):
    async with serving() as server:
        yield server


@pytest.mark.slow
@on_page
async def test_the_history_names_the_users_who_created_and_deleted_a_cluster_on_the_page(server):
    server.access.behind_entry = True
    writer = {"REMOTE-USER": "alice", "REMOTE-USER-PERM": "RW"}
    more = await xsrf(server, writer)
    answer = await server.request(
        "POST", "/api/clusters", {"name": "night", "n_workers": 1}, token=False, **writer, **more
    )
    assert (answer.status, answer.json["n_workers"]) == (201, 1)
    assert (await server.cluster("night"))["by"] == store.read("night").maker.user == "alice"
    await leave("day")
    server.access.user = lambda request: User("ann", may_change=True)
    for name in ("night", "day"):
        await server.until(name, running)
        assert (await server.request("DELETE", f"/api/clusters/{name}")).status == 200
    found = (await server.get("/api/history"))["clusters"]
    assert [(cluster["name"], cluster["why"]) for cluster in found] == [
        ("day", "deleted by ann"),
        ("night", "deleted by ann"),
    ]
    one = await server.get(f"/api/history/{found[0]['id']}")
    assert one["usage"]["total"]["sessions"] == 1
    gone = await server.request("GET", "/api/history/none")
    assert (gone.status, gone.json["error"]) == (404, "The history has no cluster with the id 'none'")


async def test_a_takeover_that_fails_in_any_way_is_tried_again(server, monkeypatch):
    async def fail(_):
        raise RuntimeError("of Dask")

    monkeypatch.setattr(clusters_module.ServedCluster, "_start", fail)
    monkeypatch.setattr(clusters_module, "may_connect", lambda *_: True)
    monkeypatch.setattr(Maker, "lives", lambda _: False)
    clusters = ProjectClusters()
    clusters.records = {"id": Record("night", id="id", maker=Maker("elsewhere", 1, 1.0, "gone", serves=True))}
    clusters.findings = {"id": None}
    for _ in range(2):
        await clusters.polled()
        [cluster] = clusters.kept.values()
        clusters.records, known = {}, clusters.records  # another process deletes it meanwhile
        assert clusters.find("night").id == "id"
        clusters.records = known
        await cluster.task
        assert clusters.kept == {}


async def test_clusters_of_dead_and_silent_schedulers_are_described_by_their_records(server):
    maker, launches = Maker("elsewhere", 1, 1.0, "gone"), sessions(ssss="scheduler", wwww="day-0")
    dead = SchedulerState(address="tcp://127.0.0.1:1", closed="idle for 60 s")
    write_record(Record("dead", maker=maker, scheduler=dead, options={"idle_timeout": 60}))
    silent = SchedulerState(address="tls://127.0.0.1:1", session="ssss", app_url="javascript:alert(1)")
    keys = {"tls_ca_file": "/no/such/file"}
    write_record(Record("day", maker=maker, scheduler=silent, launches=launches, security=keys))
    os.utime(sign_of("day"), (LAUNCHED + 3600,) * 2)
    assert (await server.until("dead", lambda cluster: cluster["status"] == "stale"))["ends"] == []
    [found] = (await server.get("/api/history"))["clusters"]
    assert (found["name"], found["why"]) == ("dead", "idle for 60 s")
    await server.until("day", lambda cluster: cluster["status"] == "not answering")
    found = await server.get("/api/clusters/day")
    assert (found["threads"], round(found["session_hours"], 3)) == (None, 2.0)
    assert [session["link"] for session in found["sessions"]] == [None, None]
    answer = await server.post("/api/clusters/day/scale", n=1)
    assert (answer.status, answer.json["error"]) == (503, "cluster 'day' is not answering: try again later")


@on_page
async def test_workers_are_counted_if_the_creator_is_killed_before_it_reports_them(server, it):
    async def create():
        await simulate(name="night", n_workers=1)

    creator = it.process("creator", NOTEBOOK)
    creator.start(create())
    await eventually(lambda: "night-scheduler" in it.platform.running)
    creator.kill()
    await server.until("night", lambda cluster: cluster["n_arrived"] == 1)
    sessions = (await server.get("/api/clusters/night"))["sessions"]
    assert [session["status"] for session in sessions] == ["running", "connected"]
    await operations.end_all(store.records())


LIMIT = "expected at most 1, because cml.limits.sessions is 2, in Dask's configuration"
CREATE, SCALE, ADAPT = "/api/clusters", "/api/clusters/night/scale", "/api/clusters/night/adapt"
INVALID = [
    (CREATE, {"cpu": -1}, "invalid cpu=-1: expected a number above 0"),
    (CREATE, {"cpus": 1}, "invalid option 'cpus': expected one of n_workers, cpu, "),
    (CREATE, {"shutdown_on_close": False}, "invalid option 'shutdown_on_close': expected one of "),
    (CREATE, {"name": "../x"}, "invalid name='../x': expected "),
    (CREATE, ["cpu"], "invalid body: expected a JSON object"),
    (CREATE, {"name": "big", "n_workers": 2}, f"invalid n_workers=2: {LIMIT}"),
    ("/api/form", {"n_workers": "2"}, f"invalid n_workers=2: {LIMIT}"),
    (SCALE, {}, "invalid body: expected n, a whole number"),
    (SCALE, {"n": -1}, "invalid n=-1: expected "),
    (SCALE, {"n": "2"}, "invalid n='2': expected a whole number"),
    (SCALE, {"n": True}, "invalid n=True: expected a whole number"),
    (SCALE, {"n": 2}, f"invalid n=2: {LIMIT}"),
    (SCALE, {"n": 1, "worker_group": "gpu"}, "invalid worker_group='gpu': expected one of 'default'"),
    (SCALE, {"n": 1, "group": "gpu"}, "invalid 'group' in the body: expected n, worker_group"),
    (SCALE, b"[" * 60_000, "invalid body: expected a JSON object"),
    (SCALE, b'{"n": NaN}', "invalid n=nan: expected a whole number"),
    (SCALE, b'{"n": 1e999}', "invalid n=inf: expected a whole number"),
    (SCALE, b"\xff", "invalid body: expected a JSON object"),
    (ADAPT, {"minimum": 3, "maximum": 1}, "invalid m"),
    (ADAPT, {"maximum": "many"}, "invalid maximum='many': expected a whole number"),
]


@on_page
async def test_invalid_requests_are_refused_with_a_reason(server, it):
    with dask.config.set({"cml.limits": {**dask.config.get("cml.limits"), "sessions": 2, "hours": 48}}):
        await server.post("/api/clusters", name="night")
        await server.until("night", lambda found: running(found) and found["most_age"] == 48 * 3600)
        for path, body, words in INVALID:
            raw = body if isinstance(body, bytes) else json.dumps(body)
            answer = await server.request("POST", path, raw=raw)
            assert answer.status == 400, body
            assert answer.json["error"].startswith(words)
        assert len(it.platform.all) == 1
        assert (await server.cluster("night"))["n_workers"] == 0
        answer = await server.post(ADAPT)
        assert answer.json["groups"][0]["adapts"] == {"minimum": 0, "maximum": 1}


@on_page
async def test_a_file_that_cannot_be_used_is_an_answer_with_the_reason(server, monkeypatch, caplog):
    def fail(code, path, *_):
        raise OSError(code, os.strerror(code), path)

    with monkeypatch.context() as patch:
        patch.setattr(store, "claim", functools.partial(fail, errno.ENOSPC, "/home/cdsw/night"))
        for path in "/api/clusters", "/api/form":
            answer = await server.post(path, name="night")
            words = "cannot use /home/cdsw/night: No space left on device"
            assert (answer.status, answer.json) == (503, {"error": words})
            assert (await server.get("/api/clusters"))["clusters"] == []
    await server.post("/api/clusters", name="night", n_workers=1)
    await server.until("night", running)
    with monkeypatch.context() as patch:
        broken = functools.partial(fail, errno.EIO, "/home/cdsw/.dask-cml")
        patch.setattr(SessionLogs, "paths", broken)
        patch.setattr(clusters_module, "ended_clusters", broken)
        pages = [f"{root}{page}" for root in ("", "/api") for page in ("/clusters/night", "/history")]
        for path in (*pages, "/api/clusters/night/logs"):
            answer = await server.request("GET", path)
            assert answer.status == 503
            assert "cannot use /home/cdsw/.dask-cml: Input/output error" in answer.text
        gone = state_directory() / "night" / LOGS_FOLDER / "night-0.log"
        patch.setattr(SessionLogs, "paths", lambda _: {"night-0": gone})
        answer = await server.request("GET", "/api/clusters/night/logs?session=night-0")
        assert (answer.status, answer.json["error"]) == (503, f"cannot use {gone}: No such file or directory")
        patch.setattr(store, "records", broken)
        await eventually(lambda: "Input/output error" in (server.clusters.problem or ""))
    await eventually(lambda: server.clusters.problem is None)
    assert "Traceback" not in caplog.text
    metrics = (await server.request("GET", "/metrics")).text
    assert 'dask_cml_sessions{cluster="night",group="default",state="connected"} 1.0' in metrics
    assert 'dask_cml_launches_total{cluster="night",group="default"} 1.0' in metrics
    assert 'dask_cml_start_seconds_bucket{cluster="night",le="+Inf"} 1.0' in metrics


@pytest.mark.slow
@on_page
async def test_a_cluster_that_fails_later_stays_listed_until_it_is_deleted_or_its_name_is_used_again(
    server, it, monkeypatch
):
    monkeypatch.setattr(clusters_module, "_PATIENCE", 0.0)

    async def fail():
        it.platform.configure({"cpu": 2})
        assert (await server.post("/api/clusters", name="big", n_workers=2, cpu=2)).status == 202
        failed = await server.until("big", lambda cluster: cluster["status"] == "failed")
        assert "exceeded quota" in failed["problem"]
        # The page may have read the record while the cluster started: the next poll forgets it.
        await eventually(lambda: all(record.name != "big" for record in server.clusters.records.values()))
        assert (await server.get("/api/clusters/big"))["sessions"] == []
        it.platform.configure()

    await fail()
    assert (await server.request("DELETE", "/api/clusters/big")).status == 200
    assert (await server.get("/api/clusters"))["clusters"] == []
    await fail()
    assert (await server.post("/api/clusters", name="big")).status == 202
    await server.until("big", running)
    assert (await server.request("DELETE", "/api/clusters/big")).status == 200
    assert (await server.get("/api/clusters"))["clusters"] == []


@on_page
async def test_a_cluster_that_is_gone_is_shown_without_sessions_before_the_next_look(server):
    await leave("day")
    await server.until("day", running)
    await cancel(server.clusters._polling)
    await operations.end_all([store.read("day")])
    assert (await server.get("/api/clusters/day"))["sessions"] == []


@pytest.mark.slow
@on_page
async def test_the_page_keeps_its_cluster_while_the_record_cannot_be_read_until_it_ends(server, monkeypatch):
    await server.post("/api/clusters", name="night", idle_timeout="20s")
    await server.until("night", running)
    with monkeypatch.context() as patch:
        patch.setattr(store, "records", list)
        await asyncio.sleep(5)
        assert (await server.cluster("night"))["kept"]
    assert (await server.cluster("night"))["kept"]
    await eventually(lambda: not server.clusters.describe())
    [ended] = (await server.get("/api/history"))["clusters"]
    assert (ended["name"], "idle for 20 s" in ended["why"]) == ("night", True)


@pytest.mark.slow
@on_page
async def test_deleting_a_cluster_that_did_not_start_stops_what_could_not_be_stopped_before(server, it):
    it.platform.doom("silent", key="scheduler")
    it.platform.fail("stop_workers", *[HTTPError(500)] * 50)
    await server.post("/api/clusters", name="night", n_workers=1, scheduler_timeout=30)
    await server.until("night", lambda cluster: cluster["status"] == "failed")
    assert it.platform.live
    it.platform.heal()
    assert (await server.request("DELETE", "/api/clusters/night")).status == 200
    assert not it.platform.live
    assert store.records() == []
    assert (await server.get("/api/clusters"))["clusters"] == []


@pytest.mark.slow
@on_page
async def test_sessions_that_cannot_be_stopped_are_told_and_stopped_by_another_delete_or_close(
    server, it, monkeypatch
):
    # Less than all tries take: another close() waits for the rest of them.
    monkeypatch.setattr(clusters_module, "_GRACE", 5.0)
    await leave("day")
    for name in ("night", "noon"):
        await server.post("/api/clusters", name=name)
    for name in ("day", "night", "noon"):
        await server.until(name, running)
    it.platform.fail("stop_workers", *[HTTPError(500)] * 50)
    assert (await server.request("DELETE", "/api/clusters/night")).status == 503
    night = await server.cluster("night")
    words = "CML did not stop some sessions; delete the cluster again"
    assert (night["status"], night["problem"]) == ("closing", words)
    it.platform.heal()
    assert (await server.request("DELETE", "/api/clusters/night")).status == 200
    it.platform.fail("stop_workers", *[HTTPError(500)] * 500)
    began = time.monotonic()
    with pytest.raises(CMLError, match=r"^some sessions of these clusters were not stopped: noon$"):
        await server.clusters.close()
    assert time.monotonic() - began < 10
    it.platform.heal()
    await server.clusters.close()
    assert [record.name for record in store.records()] == ["day"]
    await operations.end_all(store.records())


@pytest.mark.slow
async def test_logs_are_read_on_and_neither_values_of_variables_nor_keys_are_shown(server):
    await server.post("/api/clusters", name="night", n_workers=1, env={"PASSWORD": SECRET})
    await server.until("night", running)
    log = "/api/clusters/night/logs?session=Scheduler"

    async def has(offset, words):  # what programs print is in their logs a moment later
        part = await server.get(f"{log}&offset={offset}")
        return part["offset"] if words in part["text"] else None

    end = await first_result(functools.partial(has, 0, "Scheduler at:"))
    async with Client("cml://night", asynchronous=True):
        pass
    end = await first_result(functools.partial(has, end, "Remove client"))
    while (part := await server.get(f"{log}&offset={end}"))["text"]:
        end = part["offset"]
    assert part["offset"] == end
    for more in "&offset=-1", "=../../record.json":
        answer = await server.request("GET", log + more)
        assert (answer.status, answer.json["error"][:8]) == (400, "invalid ")
    key = next(iter(store.read("night").get_security().get_tls_config_for_role("client").values()))
    for path in ("/api/clusters", "/api/clusters/night", "/", "/clusters/night"):
        answer = await server.request("GET", path)
        assert SECRET not in answer.text
        assert str(key) not in answer.text
        assert "PRIVATE KEY" not in answer.text


@pytest.fixture
def parsed(monkeypatch):
    """The parsers of forms that Tornado has called. A large form would stop the event loop."""
    forms = []
    for name in "parse_multipart_form_data", "parse_qs_bytes":
        monkeypatch.setattr(
            httputil, name, lambda form, *_, name=name, **__: forms.append(name) if form else {}
        )
    return forms


BODIES = [
    (b"--x\r\n\r\n\r\n--x--\r\n", "Multipart/Form-Data; boundary=x", 415),
    (b'{"name": "' + b"x" * 2**16 + b'"}', "application/json", 413),
    (b"&" * 2**17, "application/x-www-form-urlencoded", 413),
]


@on_page
async def test_forms_with_parts_and_large_bodies_are_refused_and_not_parsed(server, parsed):
    for token in True, False:
        for port in server.access.port, server.dashboards.port:
            for body, kind, status in BODIES:
                headers = {"Content-Type": kind}
                answer = await server.request(
                    "POST", "/api/clusters", raw=body, token=token, port=port, **headers
                )
                assert (answer.status, "expected" in answer.json["error"]) == (status, True)
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl does
    answer = await server.request("POST", "/api/clusters", {"name": "night"}, **headers)
    assert answer.json["name"] == "night"
    assert parsed == []


async def dashboard_of(server, name="night"):
    link = (await server.get(f"/api/clusters/{name}"))["dashboard"]
    assert link.startswith(f"//127.0.0.1:{server.dashboards.port}/")
    return link


@pytest.mark.images
async def test_dashboards_use_a_separate_port_and_need_no_token(server):
    pytest.importorskip("bokeh")
    for name in ("night", "day"):
        await server.post("/api/clusters", name=name, scheduler_args=[])
        await server.until(name, running)
    night, day = await dashboard_of(server), await dashboard_of(server, "day")
    ask = functools.partial(server.request, "GET", token=False, port=server.dashboards.port)
    path = night.removeprefix(f"//127.0.0.1:{server.dashboards.port}")
    page = await ask(f"{path}status", Cookie=f"{server.access.cookie}={server.access.token}")
    assert page.status == 200
    assert "Dask Diagnostic UI" in page.text
    assert page.headers["Content-Security-Policy"].startswith("sandbox ")
    assert page.headers["Referrer-Policy"] == "no-referrer"
    assert not page.headers.get_list("Set-Cookie")
    assert (await ask(path)).headers["Location"] == "status"
    # Neither the web UI's port nor another secret leads to it.
    assert (await server.request("GET", "/clusters/night/dashboard/status")).status == 404
    stranger = day.split("/")[3]
    for secret in (stranger, "x", "\xe9", server.access.token):
        assert (await ask(f"/{quote(secret)}/night/status")).status == 404
    assert (await ask(path.replace("/night/", "/nosuch/"))).status == 404
    assert (await ask(f"{path}proxy/1/localhost/")).status == 404
    assert (await ask(f"{path}status", Host="evil.example")).status == 403
    assert (await server.request("POST", f"{path}status", {}, port=server.dashboards.port)).status == 405
    await server.request("DELETE", "/api/clusters/night")
    assert (await ask(f"{path}status")).status == 404


@on_page
async def test_the_address_of_a_dashboard_says_so_while_its_cluster_has_none(server):
    await server.post("/api/clusters", name="night", scheduler_args=["--no-dashboard"])
    path = f"/{server.dashboards.secret(server.clusters.find('night').id)}/night/status"
    answer = await server.request("GET", path, token=False, port=server.dashboards.port)
    assert (answer.status, answer.text) == (502, "cluster 'night' has no dashboard now: try again later\n")


@pytest.fixture
def session(monkeypatch):
    """A CML session whose second port is free."""
    port = free_port()
    monkeypatch.setenv("CDSW_ENGINE_ID", "eng1ne0000000000")
    monkeypatch.setenv("CDSW_DOMAIN", "ml.example.com")
    monkeypatch.setenv("CDSW_APP_PORT", "8100")
    monkeypatch.setenv("CDSW_READONLY_PORT", str(port))
    return port


async def test_in_a_cml_session_dashboards_use_the_second_port_if_it_is_free(session, caplog):
    dashboards = Dashboards(ProjectClusters(), Access(8100))
    assert dashboards.port == session
    assert dashboards.host(None) == "read-only-eng1ne0000000000.ml.example.com"
    await dashboards.close()
    assert serve_dashboards(ProjectClusters(), Access(session)) is None
    with local_socket(session):
        assert serve_dashboards(ProjectClusters(), Access(8100)) is None
    assert caplog.text.count("Dashboards not served") == 2


PORTS_IN_USE = [
    ((), "8101", "run it as a CML Application, or run `dask cml serve --port $CDSW_READONLY_PORT`"),
    ((), "", "run it as a CML Application, or run `dask cml serve --port 0`"),
    (("--port", None), "8101", "choose another one with --port, or 0 for a free one"),
    (("--port", 0, "--dashboard-port", None), "", "choose another one with --dashboard-port, or 0 for"),
]


def test_a_port_in_use_is_named_with_the_next_command(session, monkeypatch):
    with local_socket(0) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setenv("CDSW_APP_PORT", port)
        for arguments, second, words in PORTS_IN_USE:
            monkeypatch.setenv("CDSW_READONLY_PORT", second)
            given = (port if text is None else str(text) for text in arguments)
            result = CliRunner().invoke(cli.cml, ["serve", *given])
            assert result.exit_code == 1
            assert f"cannot listen at port {port}, because another program" in result.output
            assert words in result.output


async def test_on_cml_the_link_is_of_cml_and_no_text_asks_for_a_printed_token_and_holes_are_told(
    session, monkeypatch, capsys, caplog
):
    monkeypatch.setattr(tornado, "version_info", (6, 5, 4, 0))
    monkeypatch.setenv("CDSW_APP_PORT", "")
    listens = asyncio.Event()

    def started(*link):
        create._print_link(*link)
        listens.set()

    serving = asyncio.create_task(serve(session, started))
    await asyncio.wait_for(listens.wait(), PATIENCE)
    printed = capsys.readouterr().out
    assert "Open the web UI: https://read-only-eng1ne0000000000.ml.example.com/\n" in printed
    assert "It needs no token" in printed
    assert "6.5.5" in caplog.text  # the first Tornado without known holes
    answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{session}/api/clusters", raise_error=False)
    assert answer.code == 401
    assert "open the web UI by its link in CML" in answer.body.decode()
    assert "printed" not in answer.body.decode()
    await cancel(serving)


def sent(method, headers):
    return HTTPServerRequest(
        start_line=RequestStartLine(method, "/", "HTTP/1.1"), headers=HTTPHeaders(headers)
    )


async def test_the_pages_of_a_dashboard_cannot_change_clusters(session):
    """CML's ingress may change the Host header, so only the Origin header names the web UI."""
    for port, own in ((8100, ""), (session, "read-only-")):
        guard = Access(port).guard
        for prefix in ("", "read-only-"):
            origin = f"https://{prefix}eng1ne0000000000.ml.example.com"
            request = sent("POST", {"Host": f"127.0.0.1:{port}", "Origin": origin})
            assert (guard.why_refused(request) is None) is (prefix == own)


@pytest.mark.slow
@on_page
async def test_a_change_reaches_the_next_scheduler_or_is_refused_with_the_reason(server, it):
    creator = await create_elsewhere(it, name="day", security=True)
    await server.until("day", running)
    it.sessions.freeze(it.platform.running["day-scheduler"])
    assert (await server.post("/api/clusters/day/scale", n=0)).status == 200
    it.sessions.processes[it.platform.running["day-scheduler"]].pause(600.0)
    answer = await server.post("/api/clusters/day/scale", n=1)
    assert answer.status == 503
    assert "the scheduler of cluster 'day' does not answer at tls://" in answer.json["error"]
    [cluster] = creator.clusters
    await creator.start(cluster.close())


async def test_requests_without_the_token_are_refused(server):
    for headers in ({}, {"Authorization": "Bearer x"}, {"Cookie": f"{server.access.cookie}=x"}):
        for method, path in (("GET", "/api/clusters"), ("GET", "/"), ("GET", "/clusters/x")):
            answer = await server.request(method, path, token=False, **headers)
            assert answer.status == 401
            assert server.access.token not in answer.text


async def test_the_link_with_the_token_sets_a_cookie(server):
    for path in "/", "/history", f"{server.access.path}/history":
        answer = await server.request("GET", f"{path}?token={server.access.token}", token=False)
        assert answer.status == 302
        assert "Set-Cookie" not in answer.headers
        link = urljoin(f"http://host{path}", answer.headers["Location"]).removeprefix("http://host")
        assert link == f"{server.access.path}/?token={server.access.token}"
    answer = await server.request("GET", link, token=False)
    assert (answer.status, answer.headers["Location"]) == (302, "?")
    cookies = answer.headers.get_list("Set-Cookie")
    [cookie] = [cookie for cookie in cookies if server.access.token in cookie]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie
    cookie = cookie.partition(";")[0]
    api = f"{server.access.path}/api/clusters"
    assert (await server.request("GET", api, token=False, Cookie=cookie)).status == 200
    assert (await server.request("GET", "/api/clusters", token=False, Cookie=cookie)).status == 401
    # A form of another page would send the cookie, too.
    answer = await server.request("POST", api, {"name": "night"}, token=False, Cookie=cookie)
    assert (answer.status, "_xsrf" in answer.json["error"]) == (403, True)


async def test_a_server_at_another_port_does_not_get_the_token(server):
    """Cookies ignore ports: another user's program at 127.0.0.1 gets the cookies of the whole host."""
    path = f"{server.access.path}/"
    answer = await server.request("GET", f"{path}?token={server.access.token}", token=False)
    text = "".join(f"{name}: {value}\n" for name, value in answer.headers.get_all())
    message = email.message_from_string(text)
    for prefix in "", "/user/me/proxy/8787":
        jar, own = CookieJar(), Request(f"http://127.0.0.1:1{prefix}{path}")
        jar.extract_cookies(SimpleNamespace(info=lambda: message), own)

        def sent(path, jar=jar):
            request = Request(f"http://127.0.0.1:2{path}")
            jar.add_cookie_header(request)
            return request.get_header("Cookie", "")

        assert server.access.token in sent(f"{prefix}{path}clusters/night")
        for elsewhere in "/", "/clusters/night", f"{prefix}/", path[:-3] + "/":
            assert server.access.token not in sent(elsewhere)


async def test_the_headers_of_cml_identify_users_only_in_cml_sessions(server, monkeypatch):
    writer = {"REMOTE-USER": "alice", "REMOTE-USER-PERM": "RW"}
    assert (await server.request("GET", "/api/clusters", token=False, **writer)).status == 401
    monkeypatch.setenv("CDSW_ENGINE_ID", "eng1ne0000000000")
    monkeypatch.setenv("CDSW_APP_PORT", str(server.access.port))
    server.access.__post_init__()
    answer = await server.request("GET", "/api/clusters", token=False, **writer)
    assert answer.json["user"] == {"name": "alice", "may_change": True}


async def test_a_read_only_user_cannot_change_clusters(server):
    server.access.behind_entry = True
    for permission in {"REMOTE-USER-PERM": "RO"}, {"REMOTE-USER-PERM": ""}, {}:
        reader = {"REMOTE-USER": "bob", **permission}
        answer = await server.request("GET", "/api/clusters", token=False, **reader)
        assert answer.json["user"] == {"name": "bob", "may_change": False}
        for method, path in (("POST", "/api/clusters"), ("DELETE", "/api/clusters/x")):
            answer = await server.request(method, path, {}, token=False, **reader)
            assert (answer.status, answer.json["error"][:26]) == (403, "You cannot change clusters")


async def test_only_the_configured_users_change_clusters(server):
    with dask.config.set({"cml.serve.users": ["ann"]}):
        server.access.__post_init__()
    server.access.behind_entry = True
    for name, may_change in {"ann": True, "bob": False, "ANN": False}.items():
        headers = {"REMOTE-USER": name, "REMOTE-USER-PERM": "RW"}
        more = await xsrf(server, headers) if may_change else {}
        answer = await server.request("DELETE", "/api/clusters/none", token=False, **headers, **more)
        assert answer.status == (404 if may_change else 403)
        assert ("cml.serve.users" in answer.text) is not may_change
        page = await server.request("GET", "/", token=False, **headers)
        assert ("cml.serve.users" in page.text) is not may_change
    refused = pytest.raises(TypeError, match=r"invalid cml\.serve\.users")
    with dask.config.set({"cml.serve.users": "ann"}), refused:
        Access(8100)


async def test_a_program_sends_the_token_beside_an_api_key_of_cml_unless_cml_names_its_user(server):
    """By an API key, CML's entry lets a program in. The entry may send it on."""
    server.access.behind_entry = True
    key = {"Authorization": "Bearer 0123.abcd"}
    reader, writer = ({"REMOTE-USER": "bob", "REMOTE-USER-PERM": may} for may in ("RO", "RW"))
    with_token = {**key, "Dask-CML-Token": server.access.token}
    for headers in with_token, {**with_token, **reader}, {**key, **writer}:
        answer = await server.request("GET", "/api/clusters", token=False, **headers)
        name = headers.get("REMOTE-USER", this_user())
        assert answer.json["user"] == {"name": name, "may_change": True}
        # It needs no cookie, either.
        assert (await server.request("DELETE", "/api/clusters/none", token=False, **headers)).status == 404
    for headers in key, {"Dask-CML-Token": "x"}:
        answer = await server.request("GET", "/api/clusters", token=False, **headers)
        assert answer.status == 401
        assert "in the header Dask-CML-Token, also with an API key" in answer.json["error"]
        assert "0123.abcd" not in answer.text


def test_a_second_or_unknown_permission_header_grants_nothing(session):
    for permissions in ["RW", "RO"], ["RO", "RW"], ["RW", "RW"], ["rw"]:
        request = sent("GET", {"Host": "localhost", "REMOTE-USER": "bob"})
        for permission in permissions:
            request.headers.add("REMOTE-USER-PERM", permission)
        assert Access(8100).user(request).may_change is False


async def xsrf(server, headers):
    answer = await server.request("GET", "/", token=False, **headers)
    [cookie] = [cookie for cookie in answer.headers.get_list("Set-Cookie") if "xsrf" in cookie]
    name, _, value = cookie.partition(";")[0].partition("=")
    return {"Cookie": f"{name}={value}", "X-XSRFToken": value}


OTHER_HOST = (
    "The web UI refuses requests for host 'evil.example'. If this is your proxy, add it to cml.forward-hosts "
    "in Dask's configuration, before it starts"
)


async def test_requests_for_other_hosts_and_from_other_origins_are_refused(server):
    refused = [({"Host": "evil.example"}, OTHER_HOST)]
    for origin in "https://evil.example", "https://100%", "null":
        refused.append(({"Origin": origin}, f"The web UI refuses requests from pages of {origin!r}"))
    for headers, words in refused:
        answer = await server.request("POST", "/api/clusters", {"name": "night"}, **headers)
        assert (answer.status, answer.json["error"]) == (403, words)
    assert store.records() == []


def test_each_start_has_a_new_token(monkeypatch):
    assert Access(1).token != Access(1).token
    monkeypatch.setenv("DASK_CML_SERVE_TOKEN", SECRET)
    assert Access(1).token == SECRET


@pytest.mark.slow
def test_other_users_cannot_read_the_token_from_a_command_line_or_file(platform, tmp_path, until):
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "path = sys.argv[1].removeprefix('file://')\n"
        f"with open({str(seen)!r} + '.part', 'w') as file:\n"
        "    print(sys.argv[1], oct(os.stat(path).st_mode & 0o777), sep='\\n', file=file)\n"
        "    print(open(path).read(), file=file)\n"
        f"os.rename({str(seen)!r} + '.part', {str(seen)!r})\n"
    )
    browser.chmod(0o700)
    with PageServer(tmp_path, variables={"BROWSER": f"{browser} %s"}, arguments=["--open"]) as page:
        until(seen.exists)
        argument, mode, *content = seen.read_text().splitlines()
        token = page.link.partition("token=")[2]
        assert token
        assert token not in argument
        assert mode == "0o600"
        assert f'content="0; url={page.link}"' in "".join(content)
        assert token not in " ".join(psutil.Process(page.process.pid).cmdline())
    assert not Path(argument.removeprefix("file://")).exists()
