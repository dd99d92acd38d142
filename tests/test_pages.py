"""The pages of ``dask cml serve``, drawn from a stand-in of the board."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import dask
import pytest
from pages_samples import StandInBoard, cluster, group, many, several
from tornado.httpclient import AsyncHTTPClient, HTTPResponse
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets

from dask_cml.serve import form
from dask_cml.serve.access import Access, User
from dask_cml.serve.application import make_application

Ask = Callable[..., Any]
PAGES = ["", "new", *(f"clusters/{each['name']}" for each in several())]


@asynccontextmanager
async def served(board: StandInBoard, **user: Any) -> AsyncIterator[Ask]:
    """Serve the pages to a user, or to whoever sends the token."""
    [socket] = bind_sockets(0, "127.0.0.1")
    access = Access(socket.getsockname()[1])
    if user:
        access.user = lambda request: User(**user)
    server = HTTPServer(make_application(board, access))
    server.add_sockets([socket])

    async def ask(path: str = "", token: bool = True, **request: Any) -> HTTPResponse:
        headers = {"Authorization": f"Bearer {access.token}"} if token else {}
        url = f"http://127.0.0.1:{access.port}/{path}"
        return await AsyncHTTPClient().fetch(
            url, raise_error=False, follow_redirects=False, headers=headers, **request
        )

    yield ask
    server.stop()
    await server.close_all_connections()


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    async with served(StandInBoard(several())) as ask:
        yield ask


async def text_of(answer: Any) -> str:
    """The words of a page, without tags."""
    html = re.sub(r"<[^>]+>", " ", (await answer).body.decode())
    return " ".join(html.split())


async def test_the_list_says_of_each_cluster_how_it_is(ask):
    text = await text_of(ask())
    assert "6 clusters · 30 of 35 workers · 120 threads · 480 GiB" in text
    assert "churn-model running, 1 waiting for room, 3 min 3 default adapts, 0 to 10" in text
    assert "1 of 2 gpu" in text
    assert "16 64 GiB 128 25 h 61.75 alice" in text
    assert "2 of 4 workers launched: exceeded quota: cpu=4, used: 14, limited: 16" in text
    assert "night failed" in text


async def test_an_empty_list_says_how_to_begin():
    async with served(StandInBoard([])) as ask:
        text = await text_of(ask())
    assert "No cluster runs in this project New cluster" in text
    assert "CMLCluster(n_workers=2" in text


async def test_what_the_platform_lacks_stands_above_the_list():
    board = StandInBoard([])
    board.problem = "CML does not answer"
    async with served(board) as ask:
        assert "CML does not answer" in await text_of(ask())
        assert "CML does not answer" not in await text_of(ask(token=False))


async def test_a_cluster_s_page_has_its_sessions_groups_logs_and_usage(ask):
    text = await text_of(ask("clusters/churn-model"))
    assert "Client( &#34;cml://churn-model&#34;)".replace(" ", "") in text.replace(" ", "")
    assert "worker waiting for room, 3 min 8 CPU · 64 GiB · 1 GPU 3 min" in text
    assert "gpu 1 of 2 8 CPU · 64 GiB · 1 GPU 8 1 GPU=1" in text
    assert "churn-model-90 (ended)" in text
    assert "churn-model-0 (ended)" not in text
    assert "gpu 2 4.00 32.00 256.00 4.00" in text
    assert "Total 7 41.50 107.00 506.00 4.00" in text
    assert "This page's server created the cluster" in text.replace("&#39;", "'")


async def test_a_failed_cluster_s_page_says_why_and_offers_to_delete_it(ask):
    text = await text_of(ask("clusters/night"))
    assert "exceeded quota: memory=64Gi" in text
    assert "Delete…" in text
    assert "Client(" not in text


async def test_only_the_first_of_many_sessions_are_drawn_those_on_their_way_before_others():
    board = StandInBoard([cluster("big", group(wanted=1000, arrived=999))])
    async with served(board) as ask:
        text = await text_of(ask("clusters/big"))
    assert "801 more sessions run" in text
    assert "waiting for room" in text


@pytest.mark.parametrize("name", ["<b>", "a b", "100%", 'x"y', "ü", "a?b#c"])
async def test_any_name_of_a_cluster_is_shown_and_leads_to_its_page(name):
    async with served(StandInBoard([cluster(name, group())])) as ask:
        html = (await ask()).body.decode()
        [link] = re.findall(r'class="name" href="([^"]+)"', html)
        page = await ask(link)
    assert page.code == 200
    assert "<b>" not in html + page.body.decode()


@pytest.mark.parametrize("path", [*PAGES, "clusters/none"])
async def test_a_page_loads_nothing_from_elsewhere_and_has_no_code_or_style_in_it(ask, path):
    html = (await ask(path)).body.decode()
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?! src=)|javascript:", html) == []
    links = re.findall(r'\s(?:src|action|data-action|data-url)="([^"]*)"', html)
    links += re.findall(r'<(?:link|a)[^>]* href="([^"]*)"', html)
    foreign = [link for link in links if link.startswith(("/", "http"))]
    # CML's own pages of sessions
    assert [link for link in foreign if not link.startswith("https://ml.example.com/")] == []


@pytest.mark.parametrize("path", PAGES)
async def test_ids_are_unique_and_labels_name_fields(ask, path):
    html = (await ask(path)).body.decode()
    ids = re.findall(r'\sid="([^"]+)"', html)
    assert len(ids) == len({*ids})
    named = re.findall(r'\s(?:for|aria-labelledby|aria-describedby|data-opens|data-copies)="([^"]+)"', html)
    assert {*named} <= {*ids}


@pytest.mark.parametrize("path", PAGES)
async def test_who_may_only_read_sees_no_forms_and_why(path):
    async with served(StandInBoard(several()), name="eve", may_change=False) as ask:
        html = (await ask(path)).body.decode()
    assert "<form" not in html
    assert "data-opens" not in html
    assert "xsrf-token" not in html
    assert "your role in the project allows reading only" in html


async def test_pages_are_for_users(ask):
    for path in PAGES:
        answer = await ask(path, token=False)
        assert answer.code == 401
        assert "churn-model" not in answer.body.decode().replace(path, "")
    assert "open the link that dask cml serve has printed" in await text_of(ask(token=False))


async def test_what_is_not_there_has_a_page_that_says_so(ask):
    unknown = await ask("clusters/none")
    assert unknown.code == 404
    assert "no cluster named &#39;none&#39;" in unknown.body.decode()
    other = await ask("nowhere/at/all")
    assert other.code == 404
    assert "The page has no such address" in other.body.decode()


async def test_what_pages_load_is_served(ask):
    for name in ("serve.css", "serve.js", "favicon.svg"):
        answer = await ask(f"static/{name}")
        assert answer.code == 200
        assert answer.body


async def test_a_list_of_fifty_clusters_is_drawn_whole():
    async with served(StandInBoard(many())) as ask:
        assert (await ask()).body.decode().count('class="name"') == 50


# -- the form of a new cluster


def test_the_form_asks_for_what_the_command_line_asks_for():
    from dask_cml.cli.create import create

    fields = [each for fields in form.sections().values() for each in fields]
    context = create.make_context("create", [])
    options = {each.name for each in create.get_params(context) if each.opts[0] not in ("spec", "--help")}
    assert sorted(each.argument for each in fields) == sorted(options)


def test_the_usual_fields_stand_first_and_others_as_the_configuration_groups_them():
    sections = form.sections()
    assert [each.argument for each in sections[""]][:3] == ["name", "n_workers", "cpu"]
    assert [*sections][:3] == ["", "One worker session", "The scheduler's session"]


def test_the_form_says_what_holds_where_a_field_stays_empty():
    with dask.config.set({"cml.cpu": 3, "cml.security": False}):
        fields = {each.argument: each for group in form.sections().values() for each in group}
    assert fields["cpu"].default == 3
    assert fields["idle_timeout"].default == "1 hour"
    assert 'By default 1 hour; "never"' in fields["idle_timeout"].description
    assert fields["security"].default is False


async def test_no_page_shows_environment_variables(ask):
    secret = {"cml.env": {"TOKEN": "s3cr3t"}, "cml.worker-args": ["--key", "s3cr3t"]}
    with dask.config.set(secret):
        for path in PAGES:
            html = (await ask(path)).body.decode()
            assert "s3cr3t" not in html
            assert "TOKEN" not in html


def test_a_filled_form_is_read_as_arguments():
    texts = {
        "name": " night ",
        "n_workers": "3",
        "cpu": "1.5",
        "memory": "16 GiB",
        "nvidia_gpu": "",
        "security": "on",
        "env": "A=1=2\n\n B=\n",
        "resources": "GPU=2",
        "worker_args": "--preload 'a b'",
        "worker_groups": 'gpu={"n-workers": 2}',
    }
    assert form.arguments(texts) == {
        "name": "night",
        "n_workers": 3,
        "cpu": 1.5,
        "memory": "16 GiB",
        "security": True,
        "env": {"A": "1=2", "B": ""},
        "resources": {"GPU": 2},
        "worker_args": ["--preload", "a b"],
        "worker_groups": {"gpu": {"n-workers": 2}},
    }
    assert form.arguments({}) == {"security": False}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"env": "s3cr3t"}, "invalid env: expected NAME=VALUE"),
        ({"worker_args": "'s3cr3t"}, "invalid worker_args: expected a command line"),
        ({"create_mode": "connect"}, "invalid option 'create_mode'"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_without_being_repeated(texts, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        form.arguments(texts)
    assert "s3cr3t" not in str(error.value)


async def test_the_form_creates_a_cluster_for_its_user():
    board = StandInBoard([])
    async with served(board, name="alice", may_change=True) as ask:
        answer = await ask("new", method="POST", body=json.dumps({"name": "day", "n_workers": "3"}))
    assert json.loads(answer.body)["name"] == "day"
    assert board.created == [({"name": "day", "n_workers": 3, "security": False}, "alice")]


@pytest.mark.parametrize(
    ("texts", "status", "words"),
    [
        ({"n_workers": "many"}, 400, "invalid n_workers='many'"),
        ({"env": "A"}, 400, "invalid env: expected NAME=VALUE"),
        ({"name": "etl"}, 409, "a cluster named 'etl' exists already"),
        ({"nvidia_gpu": "1"}, 503, "exceeded quota"),
    ],
)
async def test_a_form_that_is_refused_answers_with_the_words(ask, texts, status, words):
    answer = await ask("new", method="POST", body=json.dumps(texts))
    assert answer.code == status, answer.body
    assert words in json.loads(answer.body)["error"]


async def test_a_form_of_another_page_is_refused():
    board = StandInBoard([])
    async with served(board, name="alice", may_change=True) as ask:
        answer = await ask("new", token=False, method="POST", body="{}")
    assert answer.code == 403
    assert board.created == []
