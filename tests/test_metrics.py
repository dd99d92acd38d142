"""`/metrics` of the web UI, read by Prometheus' own parser, and the Grafana dashboard of these metrics."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from pages_samples import StandInClusters, several
from prometheus_client.parser import text_string_to_metric_families
from test_pages import served

DASHBOARD = Path(__file__).parents[1] / "docs" / "_static" / "grafana.json"
LABELS = {"cluster", "group", "state", "status", "cause", "le"}


def families(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family, *labels):
    """Return the values of a family's samples by some of their labels."""
    return {tuple(sample.labels[label] for label in labels): sample.value for sample in family.samples}


@pytest.fixture
async def found():
    async with served(StandInClusters(several())) as ask:
        answer = await ask("metrics")
    assert answer.code == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    return families(answer.body.decode())


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
    assert answer.code == 501
    assert (
        answer.body.decode()
        == "/metrics needs a package that is not installed: run `pip install prometheus-client`."
    )


# -- the dashboard


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
