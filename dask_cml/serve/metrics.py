"""The metrics of the project's clusters, for Prometheus. They need no requests to clusters."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from tornado.web import HTTPError

from dask_cml.cluster import CMLCluster
from dask_cml.layout import SCHEDULER
from dask_cml.records.usage import Usage
from dask_cml.serve.access import Handler

#: The families of metrics by name: the type, the help and the labels.
_FAMILIES = {
    "clusters": ("gauge", "Number of clusters.", "status"),
    "wanted_workers": ("gauge", "Number of requested worker sessions.", "cluster", "group"),
    "sessions": ("gauge", "Number of sessions.", "cluster", "group", "state"),
    "launches": ("counter", "Number of sessions launched so far.", "cluster", "group"),
    "losses": ("counter", "Number of sessions lost so far.", "cluster", "group", "cause"),
    "session_seconds": ("counter", "Sum of the times of all sessions so far.", "cluster", "group"),
}
#: The upper limits of start times, in seconds.
_BUCKETS = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, math.inf)


class StartTimes:
    """Counts how long worker sessions took from their launch until they were connected."""

    def __init__(self) -> None:
        self._starting: set[str] = set()
        self._counts = [0] * len(_BUCKETS)
        self.total = 0.0

    def look(self, clusters: Iterable[CMLCluster]) -> None:
        """Count the sessions that have connected since the last look."""
        before, self._starting = self._starting, set()
        for cluster in clusters:
            connected = cluster.manager.fleet.arrived()
            for each in cluster.sessions:
                if each.role == "worker" and each.name not in connected:
                    self._starting.add(each.id)
                elif each.id in before:
                    took = each.age
                    self._counts[bisect_left(_BUCKETS, took)] += 1
                    self.total += took

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """Upper limits, each with the number of sessions that took no longer."""
        limits = ["+Inf" if math.isinf(each) else f"{each:g}" for each in _BUCKETS]
        return [*zip(limits, accumulate(self._counts), strict=True)]


class Metrics(Handler):
    """``/metrics``."""

    def get(self) -> None:
        """Answer in Prometheus' text format."""
        try:
            from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
        except ImportError:
            words = "/metrics needs a package that is not installed: run `pip install prometheus-client`."
            raise HTTPError(501, words) from None
        self.set_header("Content-Type", CONTENT_TYPE_LATEST)
        self.finish(generate_latest(self))  # which calls the following method

    def collect(self) -> Iterator[Any]:
        """Describe the clusters as families of metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        families = {
            name: kinds[kind](f"dask_cml_{name}", words, labels=labels)
            for name, (kind, words, *labels) in _FAMILIES.items()
        }
        for name, labels, value in _samples(self.clusters.describe(), self.clusters.usages):
            families[name].add_metric(labels, value)
        yield from families.values()
        words = "Time from the launch of a worker session to its connection."
        times = HistogramMetricFamily("dask_cml_start_seconds", words)
        times.add_metric([], self.clusters.starts.buckets, self.clusters.starts.total)
        yield times

    def answer_error(self, words: str) -> None:
        """Answer with the reason of an error."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(words)


def _samples(
    described: Sequence[Mapping[str, Any]], usages: Mapping[str, Usage]
) -> Iterator[tuple[str, list[str], float]]:
    """Yield families of metrics, each with the values of its labels, and its value."""
    for status, n in Counter(each["status"] for each in described).items():
        yield "clusters", [status], n
    for cluster in described:
        name, status = cluster["name"], cluster["status"]
        if status in ("running", "starting"):
            state = "connected" if status == "running" else "starting"
            yield "sessions", [name, SCHEDULER, state], 1
        for group in cluster["groups"]:
            wanted, waiting, connected = group["n_workers"], group["n_waiting"], group["n_arrived"]
            states = {"waiting": waiting, "connected": connected, "starting": wanted - waiting - connected}
            yield "wanted_workers", [name, group["name"]], wanted
            yield from (("sessions", [name, group["name"], each], max(0, n)) for each, n in states.items())
    for name, usage in usages.items():
        for label, used in usage.items():
            yield "launches", [name, label], used.sessions
            yield "session_seconds", [name, label], used.hours * 3600
            yield from (("losses", [name, label, cause], n) for cause, n in used.lost.items())


ROUTES: list[Any] = [(r"/metrics", Metrics)]
