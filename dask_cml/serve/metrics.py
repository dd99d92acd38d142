"""The metrics of the project's clusters, for Prometheus. They need no requests to clusters."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from tornado.web import HTTPError

from dask_cml.layout import SCHEDULER
from dask_cml.records.store import Record
from dask_cml.serve.access import Handler

#: The upper limits of start times, in seconds.
_BUCKETS = (5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, math.inf)


def _buckets(times: list[float]) -> list[tuple[str, int]]:
    """Return upper limits with the numbers of times that are no longer."""
    counts = {limit: sum(seconds <= limit for seconds in times) for limit in _BUCKETS}
    return [(f"{limit:g}".replace("inf", "+Inf"), n) for limit, n in counts.items()]


class Metrics(Handler):
    """``/metrics``."""

    def get(self) -> None:
        """Answer in Prometheus' text format."""
        try:
            from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
        except ImportError:
            message = "/metrics needs a package that is not installed: run `pip install prometheus-client`."
            raise HTTPError(501, message) from None
        self.set_header("Content-Type", CONTENT_TYPE_LATEST)
        self.finish(generate_latest(self))  # which calls the following method

    def collect(self) -> list[Any]:
        """Describe the clusters as families of metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        def gauge(name: str, help: str, *labels: str) -> Any:
            return GaugeMetricFamily(f"dask_cml_{name}", help, labels=labels)

        def counter(name: str, help: str, *labels: str) -> Any:
            return CounterMetricFamily(f"dask_cml_{name}", help, labels=["cluster", "group", *labels])

        clusters = gauge("clusters", "Number of clusters.", "status")
        wanted = gauge("wanted_workers", "Number of requested worker sessions.", "cluster", "group")
        sessions = gauge("sessions", "Number of sessions.", "cluster", "group", "state")
        launches = counter("launches", "Number of sessions launched so far.")
        losses = counter("losses", "Number of sessions lost so far.", "cause")
        seconds = counter("session_seconds", "Sum of the times of all sessions so far.")
        help = "Time from the launch of a worker session until its program starts."
        times = HistogramMetricFamily("dask_cml_start_seconds", help, labels=["cluster"])
        described = self.clusters.describe()
        for status, n in Counter(cluster["status"] for cluster in described).items():
            clusters.add_metric([status], n)
        for cluster in described:
            name, status = cluster["name"], cluster["status"]
            for group in cluster["groups"]:
                requested, waiting, connected = group["n_workers"], group["n_waiting"], group["n_arrived"]
                starting = max(0, requested - waiting - connected)
                wanted.add_metric([name, group["name"]], requested)
                for state, n in {"waiting": waiting, "connected": connected, "starting": starting}.items():
                    sessions.add_metric([name, group["name"], state], n)
            if status not in ("running", "starting"):
                continue
            sessions.add_metric([name, SCHEDULER, "connected" if status == "running" else "starting"], 1)
            for label, used in cluster["usage"]["groups"].items():
                launches.add_metric([name, label], used["sessions"])
                seconds.add_metric([name, label], used["hours"] * 3600)
                for cause, n in used["lost"].items():
                    losses.add_metric([name, label, cause], n)
            if waits := _start_times(self.clusters.find(name)):
                times.add_metric([name], _buckets(waits), sum(waits))
        return [clusters, wanted, sessions, launches, losses, seconds, times]


def _start_times(record: Record) -> list[float]:
    launches = {**record.launches, **record.ended}.values()
    workers = [launch for launch in launches if launch.key != SCHEDULER]
    return [max(0.0, launch.started - launch.launched) for launch in workers if launch.started is not None]


ROUTES: list[Any] = [(r"/metrics", Metrics)]
