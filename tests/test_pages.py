"""The pages of ``dask cml serve``, with stand-ins for clusters."""

import json
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import dask
import pytest
from pages_samples import StandInClusters, cluster, ended, group, several
from prometheus_client.parser import text_string_to_metric_families
from tornado.httpclient import AsyncHTTPClient, HTTPResponse

from dask_cml.dashboard.http_server import LocalServer, local_socket
from dask_cml.serve import pages
from dask_cml.serve.access import Access, User
from dask_cml.serve.servers import Dashboards, make_application

Ask = Callable[..., Any]
PAGES = ["", "new", *(f"clusters/{cluster['name']}" for cluster in several())]
PAGES += ["history", *(f"history/{cluster.id}" for cluster in ended())]


@asynccontextmanager
async def served(clusters: StandInClusters, has_dashboards: bool = True, **user: Any) -> AsyncIterator[Ask]:
    """Serve the pages to a user of CML, or without one, to requests with the token."""
    listener = local_socket(0)
    access = Access(listener.getsockname()[1])
    if user:
        access.user = lambda request: User(**user)
    dashboards = Dashboards(clusters, access) if has_dashboards else None
    server = LocalServer(make_application(clusters, access, dashboards), listener)

    async def ask(path: str = "", token: bool = True, **request: Any) -> HTTPResponse:
        headers = {"Authorization": f"Bearer {access.token}"} if token else {}
        url = f"http://127.0.0.1:{access.port}/{path}"
        return await AsyncHTTPClient().fetch(
            url, raise_error=False, follow_redirects=False, headers=headers, **request
        )

    yield ask
    await server.close()
    if dashboards is not None:
        await dashboards.close()


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    async with served(StandInClusters(several())) as ask:
        yield ask


async def text_of(answer: Any) -> str:
    html = re.sub(r"<[^>]+>", " ", (await answer).body.decode())
    return " ".join(html.split())


async def test_the_list_shows_the_status_of_each_cluster(ask):
    text = await text_of(ask())
    assert "6 clusters · 30 of 35 workers · 120 threads · 480 GiB" in text
    assert "churn-model running, 1 queued for 3 min 3 default adapts, 0 to 10" in text
    assert "1 of 2 gpu" in text
    assert "16 64 GiB 12,840 25.0 of 48 h 61.75 alice" in text
    assert "2 of 4 workers launched: exceeded quota: cpu=4, used: 14, limited: 16" in text
    assert "night failed" in text


async def test_an_empty_list_shows_how_to_create_a_cluster_and_the_problem_of_the_platform():
    clusters = StandInClusters([])
    clusters.problem = "CML does not answer"
    async with served(clusters) as ask:
        text = await text_of(ask())
        assert "No cluster runs in this project New cluster" in text
        assert "CMLCluster(n_workers=2" in text
        assert "CML does not answer" in text
        assert "CML does not answer" not in await text_of(ask(token=False))


async def test_the_page_of_a_cluster_shows_its_sessions_groups_logs_and_usage(ask):
    text = await text_of(ask("clusters/churn-model"))
    assert "Client( &#34;cml://churn-model&#34;)".replace(" ", "") in text.replace(" ", "")
    assert "worker queued for 3 min 8 CPU · 64 GiB · 1 GPU 3 min" in text
    assert "gpu 1 of 2 8 CPU · 64 GiB · 1 GPU 8 1 GPU=1" in text
    assert "churn-model-90 (ended)" in text
    assert "churn-model-0 (ended)" not in text
    assert "gpu 2 4.00 32.00 256.00 4.00" in text
    assert "Total 7 41.50 107.00 506.00 4.00" in text
    assert "The web UI created this cluster" in text
    failed = await text_of(ask("clusters/night"))
    assert "exceeded quota: memory=64Gi" in failed
    assert "Delete…" in failed
    assert "Client(" not in failed


async def test_without_a_port_for_dashboards_the_page_has_no_links_to_them():
    for has_dashboards in (True, False):
        async with served(StandInClusters(several()), has_dashboards) as ask:
            found = json.loads((await ask("api/clusters/etl")).body)
            page = await ask("clusters/etl")
        assert (found["dashboard"] is not None) is has_dashboards
        assert ("frame-src 'none'" not in page.headers["Content-Security-Policy"]) is has_dashboards


async def test_the_page_shows_the_first_of_many_sessions_and_starting_ones_before_connected_ones():
    clusters = StandInClusters([cluster("big", group(wanted=1000, arrived=999))])
    async with served(clusters) as ask:
        text = await text_of(ask("clusters/big"))
    assert "801 more sessions run" in text
    assert "queued" in text


async def test_a_name_of_any_characters_links_to_the_page_of_the_cluster():
    for name in "<b>", "a b", "100%", 'x"y', "ü", "a?b#c":
        async with served(StandInClusters([cluster(name, group())])) as ask:
            html = (await ask()).body.decode()
            [link] = re.findall(r'class="name" href="([^"]+)"', html)
            page = await ask(link)
        assert page.code == 200
        assert "<b>" not in html + page.body.decode()


async def test_pages_have_labels_and_unique_ids_and_no_code_foreign_content_or_environment_variables(ask):
    secret = {"cml.env": {"TOKEN": "s3cr3t"}, "cml.worker-args": ["--key", "s3cr3t"]}
    for path in [*PAGES, "clusters/none"]:
        with dask.config.set(secret):
            page = await ask(path)
        assert page.headers["X-Frame-Options"] == "SAMEORIGIN"
        html = page.body.decode()
        assert re.findall("s3cr3t|TOKEN", html) == []
        assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?! src=)|javascript:", html) == []
        links = re.findall(r'\s(?:src|action|data-action|data-url)="([^"]*)"', html)
        links += re.findall(r'<(?:link|a)[^>]* href="([^"]*)"', html)
        foreign = [link for link in links if link.startswith(("/", "http"))]
        # CML's own pages of sessions, and dashboards, which are in a sandbox
        known = ("https://ml.example.com/", "//127.0.0.1:")
        assert [link for link in foreign if not link.startswith(known)] == []
        ids = re.findall(r'\sid="([^"]+)"', html)
        assert len(ids) == len({*ids})
        named = r'\s(?:for|aria-labelledby|aria-describedby|data-opens|data-copies)="([^"]+)"'
        assert {*re.findall(named, html)} <= {*ids}


async def test_a_read_only_user_sees_the_reason_instead_of_forms_and_strangers_see_nothing(ask):
    async with served(StandInClusters(several()), name="eve", may_change=False) as reader:
        for path in PAGES:
            html = (await reader(path)).body.decode()
            assert "<form" not in html
            assert "data-opens" not in html
            assert "xsrf-token" not in html
            assert "your role in the project is read-only" in html
        for path in "api/history", "metrics":
            assert (await reader(path)).code == 200
    for path in [*PAGES, "api/history", "metrics"]:
        answer = await ask(path, token=False)
        assert answer.code == 401
        assert "churn-model" not in answer.body.decode().replace(path, "")
    assert "Open the link that dask cml serve printed" in await text_of(ask(token=False))


async def test_an_unknown_cluster_or_address_shows_an_error_page(ask):
    unknown = await ask("clusters/none")
    assert unknown.code == 404
    assert "<h1>No such cluster</h1>" in unknown.body.decode()
    assert "no cluster named &#39;none&#39;" in unknown.body.decode()
    other = await ask("nowhere/at/all")
    assert other.code == 404
    assert "<h1>No such page</h1>" in other.body.decode()
    assert "No page is at this address" in other.body.decode()
    assert 'href="../../static/serve.css"' in other.body.decode()
    of_the_api = await ask("api/nothing")
    assert (of_the_api.code, of_the_api.body) == (404, b'{"error": "No page is at this address"}')


def test_the_form_offers_the_options_of_the_command_line():
    from dask_cml.cli.create import create

    fields = [field for fields in pages.form_sections().values() for field in fields]
    context = create.make_context("create", [])
    parameters = [
        parameter for parameter in create.get_params(context) if isinstance(parameter, click.Option)
    ]
    options = {parameter.name for parameter in parameters if "--help" not in parameter.opts}
    assert {field.name for field in fields} == options - {"inherit", "limits_hours"}


async def test_the_form_shows_the_default_of_each_field(ask):
    for security in True, False:
        with dask.config.set({"cml.cpu": 3, "cml.security": security}):
            html = (await ask("new")).body.decode()
        assert 'name="cpu" placeholder="3"' in html
        assert 'name="idle_timeout" placeholder="1 hour"' in html
        assert "By default 1 hour; &#34;never&#34; is allowed" in html
        [checkbox] = re.findall('<input type="checkbox"[^>]*name="security"[^>]*>', html)
        assert ("checked" in checkbox) is security


def test_the_texts_of_a_form_become_arguments():
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
    assert pages.form_arguments(texts) == {
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
    assert pages.form_arguments({}) == {"security": False}
    deep = "[" * 100_000
    assert pages.form_arguments({"n_workers": deep})["n_workers"] == deep  # CMLCluster refuses it


def test_an_invalid_text_is_refused_without_repeating_it():
    for texts, words in (
        ({"env": "s3cr3t"}, "invalid env: expected NAME=VALUE"),
        ({"worker_args": "'s3cr3t"}, "invalid worker_args: expected a command line"),
        ({"create_mode": "connect"}, "invalid option 'create_mode'"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            pages.form_arguments(texts)
        assert "s3cr3t" not in str(error.value)


async def test_ended_clusters_are_listed_with_escaped_texts_and_with_sums_by_day_and_user(ask):
    for path in ("history", "history/00000000000000bb"):
        html = (await ask(path)).body.decode()
        assert "&lt;img src=x&gt;&#39;&#34;" in html
        for tag in ("<img src=x", "<script>alert", "<b>bob"):
            assert tag not in html
    text = await text_of(ask("history"))
    assert "churn-model idle for 1800 s alice 2026-11-23 02:30 6 h 7 107.00 506.00 4.00" in text
    assert "By day of the end" in text
    assert "2026-11-22 7 41.50 107.00 506.00 4.00" in text
    assert "alice 7 41.50 107.00 506.00 4.00" in text


async def test_the_page_of_an_ended_cluster_shows_what_it_has_done_and_where_its_logs_are(ask, monkeypatch):
    text = await text_of(ask("history/00000000000000aa"))
    assert "Ended 2026-11-23 02:30 UTC: idle for 1800 s" in text
    assert "Most workers 12 Tasks 12,840 done Session hours 41.50" in text
    assert "Lost sessions: 2 evicted, 1 out of memory" in text
    assert "No log is left." in text
    assert "Last failed tasks" not in text
    assert (await ask("history/00000000000000ff")).code == 404
    monkeypatch.setattr(pages, "where_logs_are", lambda cluster: f"dask cml logs {cluster.name}")
    text = await text_of(ask("history/00000000000000dd"))
    assert "Tasks 18 done, 1 failed" in text
    assert "Last failed tasks train-17: ValueError(&#39;negative weight&#39;)" in text
    assert "Read them in the project: dask cml logs night" in text


async def test_where_prices_are_set_pages_show_costs(ask):
    priced = {
        "clusters/churn-model": ("Cost 53.50", "Total 7 41.50 107.00 506.00 4.00 53.50"),
        "history/00000000000000aa": ("Cost 53.50", "GPU hours Cost scheduler 1 25.00 25.00 50.00 0.00 12.50"),
        "history": ("Cost churn-model", "alice 7 41.50 107.00 506.00 4.00 53.50"),
    }
    for path, costs in priced.items():
        assert "Cost" not in await text_of(ask(path))
        with dask.config.set({"cml.prices.cpu": 0.5}):
            text = await text_of(ask(path))
        assert [words for words in costs if words not in text] == []


DASHBOARD = Path(__file__).parents[1] / "docs" / "_static" / "grafana.json"
LABELS = {"cluster", "group", "state", "status", "cause", "le"}


def values(family, *labels):
    return {tuple(sample.labels[label] for label in labels): sample.value for sample in family.samples}


@pytest.fixture
async def found():
    async with served(StandInClusters(several())) as ask:
        answer = await ask("metrics")
    assert answer.code == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    return {family.name: family for family in text_string_to_metric_families(answer.body.decode())}


async def test_metrics_count_sessions_launches_losses_and_times_with_few_labels(found):
    sessions = values(found["dask_cml_sessions"], "cluster", "group", "state")
    assert sessions["etl", "default", "connected"] == 24
    assert sessions["churn-model", "gpu", "connected"] == sessions["churn-model", "gpu", "starting"] == 1
    assert sessions["etl", "scheduler", "connected"] == 1
    assert values(found["dask_cml_wanted_workers"], "cluster", "group")["churn-model", "gpu"] == 2
    assert values(found["dask_cml_clusters"], "status")[("running",)] == 3

    assert values(found["dask_cml_launches"], "cluster", "group")["etl", "default"] == 4
    assert values(found["dask_cml_losses"], "cluster", "group", "cause")["etl", "default", "evicted"] == 2
    assert values(found["dask_cml_session_seconds"], "cluster", "group")["etl", "default"] == 12.5 * 3600
    assert {sample.name for sample in found["dask_cml_launches"].samples} == {"dask_cml_launches_total"}

    times = found["dask_cml_start_seconds"]
    buckets = {
        sample.labels["le"]: sample.value for sample in times.samples if sample.name.endswith("_bucket")
    }
    assert times.type == "histogram"
    assert [buckets[limit] for limit in ("5", "10", "60", "1800", "+Inf")] == [0, 1, 2, 2, 3]
    sums = {sample.value for sample in times.samples if sample.name.endswith("_sum")}
    assert sums == {5052}
    used = {label for family in found.values() for sample in family.samples for label in sample.labels}
    assert used == LABELS


async def test_without_prometheus_client_the_page_shows_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.exposition", None)
    async with served(StandInClusters([])) as ask:
        answer = await ask("metrics")
    words = "/metrics needs a package that is not installed: run `pip install prometheus-client`."
    assert (answer.code, answer.body.decode()) == (501, words)


async def test_the_dashboard_uses_existing_metrics_and_labels(found):
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [
        variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"
    ]
    names = {sample.name: {*sample.labels} for family in found.values() for sample in family.samples}
    for query in queries:
        [name] = re.findall(r"\bdask_cml_\w+", query)
        assert name in names, query
        labels = re.findall(r"by \(([^)]*)\)|[{](\w+)=|_sessions, (\w+)", query)
        used = {label.strip() for group in labels for part in group for label in part.split(",") if label}
        assert used <= names[name], query
    shown = {family for family in found if any(family in query for query in queries)}
    assert shown == {*found}
