"""Adaptive scaling of two worker groups: tasks of which a tenth needs GPUs."""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
import sys
import tempfile
import time
from collections import Counter
from typing import Any

import dask

from benchmarks.cases import run_cases
from benchmarks.report import Report, figure, save_figure
from benchmarks.sessions import Platform, seconds_of

#: By worker group, sessions of one thread, and sessions of two threads and a GPU.
MAXIMUM = {"default": 20, "gpu": 4}
_SIZES: dict[str, dict[str, int]] = {"default": {}, "gpu": {"cpu": 2, "nvidia_gpu": 1}}
TASK = 1.0  # seconds
START_DELAYS = (5, 20)
LATENCY = 0.05
#: By workload, the times at which the tasks are submitted, in seconds.
WORKLOADS = {"burst": [0.0] * 600, "stream": [i / 5 for i in range(600)]}
POLICIES = ("best", "Dask", "dask-cml")
_GPU = {"GPU": 1}


def group_of(i: int) -> str:
    """Return the worker group that the i-th task needs."""
    return "gpu" if i % 10 == 5 else "default"


def one_run(workload: str, start_delay: float, policy: str) -> dict[str, Any]:
    """Run a workload under a policy, in this process."""
    from distributed import Client, wait
    from distributed.deploy.adaptive import Adaptive

    from dask_cml import CMLCluster

    logging.disable(logging.ERROR)
    platform = Platform(latency=LATENCY, start_delay=start_delay, workers=True)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        configuration = {"cml.state-directory": folder, "distributed.worker.profile.enabled": False}
        stack.enter_context(dask.config.set(configuration))
        stack.enter_context(platform.installed())
        clusters: dict[str, CMLCluster]
        if policy == "Dask":
            clusters = {
                group: stack.enter_context(CMLCluster(name=group, quiet=True, **size))
                for group, size in _SIZES.items()
            }
        else:
            groups = {"gpu": _SIZES["gpu"]}
            one = stack.enter_context(CMLCluster(name="default", worker_groups=groups, quiet=True))
            clusters = dict.fromkeys(MAXIMUM, one)
        clients = {group: stack.enter_context(Client(cluster)) for group, cluster in clusters.items()}
        begin = time.monotonic()
        for group, maximum in MAXIMUM.items():
            if policy == "best":
                clusters[group].scale(maximum, worker_group=group)
            elif policy == "Dask":
                clusters[group].adapt(0, maximum, Adaptive=Adaptive)
            else:
                clusters[group].adapt(0, maximum, worker_group=group)
        futures: dict[str, list[Any]] = {group: [] for group in MAXIMUM}
        for i, moment in enumerate(WORKLOADS[workload]):
            time.sleep(max(0.0, begin + moment - time.monotonic()))
            group = group_of(i)
            needs = _GPU if group == "gpu" else None
            key = f"{group}-{i}"
            futures[group].append(clients[group].submit(time.sleep, TASK, key=key, resources=needs))
        wait(futures["gpu"])
        gpu_seconds = time.monotonic() - begin
        wait(futures["default"])
        seconds = time.monotonic() - begin
        futures.clear()
        if policy == "best":
            for group in MAXIMUM:
                clusters[group].scale(0, worker_group=group)
        schedulers = len({*clusters.values()})
        platform.wait_until_only(schedulers)
        used: Counter[str] = Counter()
        launched: Counter[str] = Counter()
        for session in platform.all.values():
            if session.key != "scheduler":
                group = "gpu" if "gpu" in session.key else "default"
                launched[group] += 1
                used[group] += seconds_of(session)
        left = len(platform.live) - schedulers
    return {
        "seconds": round(seconds, 2),
        "seconds of GPU tasks": round(gpu_seconds, 2),
        "launched": dict(launched),
        "session seconds": {group: round(session_seconds) for group, session_seconds in used.items()},
        "left": left,
    }


def run(repeats: int = 1, at_once: int = 4) -> Report:
    """Run every workload at every start delay under every policy, some at once, and report."""
    report = Report(
        "mixed",
        f"A tenth of the tasks needs a GPU; at most {MAXIMUM['default']} and {MAXIMUM['gpu']} sessions",
        [
            "workload",
            "start s",
            "policy",
            "seconds",
            "seconds of GPU tasks",
            "launched",
            "launched with GPU",
            "session seconds",
            "GPU session seconds",
        ],
    )
    # The last workload takes longest, so it runs first.
    results = run_cases(
        "benchmarks.mixed", WORKLOADS, START_DELAYS, POLICIES, repeats=repeats, at_once=at_once
    )
    figures = []
    for workload in WORKLOADS:
        for delay in START_DELAYS:
            for policy in POLICIES:
                runs = results[workload, delay, policy]
                middle = {
                    key: statistics.median(run[key] for run in runs)
                    for key in ("seconds", "seconds of GPU tasks")
                }
                by_group = {
                    (key, group): statistics.median(run[key].get(group, 0) for run in runs)
                    for key in ("launched", "session seconds")
                    for group in MAXIMUM
                }
                figures.append(
                    {
                        "workload": workload,
                        "start delay": delay,
                        "policy": policy,
                        **{f"{key}, {group}": n for (key, group), n in by_group.items()},
                        "runs": runs,
                    }
                )
                report.rows.append(
                    (
                        workload,
                        str(delay),
                        policy,
                        *(f"{n:.1f}" for n in middle.values()),
                        *(f"{n:.0f}" for n in by_group.values()),
                    )
                )
    report.figures = {"maximum": MAXIMUM, "latency": LATENCY, "at once": at_once, "cases": figures}
    return report


def plot(report: Report) -> None:
    """Draw the session seconds of every case, by worker group."""
    fig, drawn = figure(8, 5, rows=2)
    colours = {"best": "tab:grey", "Dask": "tab:orange", "dask-cml": "tab:blue"}
    for axes, group in zip(drawn, MAXIMUM, strict=True):
        for i, policy in enumerate(POLICIES):
            chosen = [case for case in report.figures["cases"] if case["policy"] == policy]
            positions = [x + 0.27 * (i - 1) for x in range(len(chosen))]
            used = [case[f"session seconds, {group}"] for case in chosen]
            axes.bar(positions, used, 0.25, color=colours[policy], label=policy)
        axes.set_ylabel("session seconds" + (" with GPU" if group == "gpu" else ""))
        axes.set_xticks([])
    labels = [f"{case['workload']}\n{case['start delay']} s" for case in chosen]
    drawn[-1].set_xticks(range(len(labels)), labels, fontsize=8)
    drawn[-1].set_xlabel("workload; time that a session takes to start")
    drawn[0].legend(loc="upper left")
    save_figure(fig, report.name)


if __name__ == "__main__":
    print(json.dumps(one_run(sys.argv[1], float(sys.argv[2]), sys.argv[3])), flush=True)
