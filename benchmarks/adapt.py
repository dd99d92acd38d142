"""Adaptive scaling: sessions launched, time to finish and session seconds, with slow sessions."""

from __future__ import annotations

import heapq
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import dask

from benchmarks.cases import run_cases
from benchmarks.report import Report, figure, save_figure
from benchmarks.sessions import Platform, seconds_of

MAXIMUM = 20  # sessions, of one thread each
TASK = 1.0  # seconds
START_DELAYS = (0, 5, 20)
LATENCY = 0.05
#: Between two bursts, in seconds.
GAP = 60.0
#: By workload, the times at which the tasks of each phase are submitted, in seconds.
WORKLOADS: dict[str, list[list[float]]] = {
    "one burst": [[0.0] * 600],
    "two bursts": [[0.0] * 600, [0.0] * 600],
    "trickle": [[i / 7.5 for i in range(2250)]],
}
POLICIES = ("best", "Dask", "dask-cml")


def sessions_needed(workload: str, start_delay: float) -> int:
    """Return the fewest sessions that could be launched to finish in 1.1 times the best time.

    They are those of somebody who knows the work, and launches them when a phase begins, for that phase.
    """
    total = 0
    for times in WORKLOADS[workload]:
        best = _ideal_seconds(times, MAXIMUM, start_delay)
        total += next(n for n in range(1, MAXIMUM + 1) if _ideal_seconds(times, n, start_delay) <= 1.1 * best)
    return total


def _ideal_seconds(times: Sequence[float], sessions: int, start_delay: float) -> float:
    free = [start_delay] * sessions
    for moment in times:
        heapq.heapreplace(free, max(free[0], moment) + TASK)
    return max(free)


def one_run(workload: str, start_delay: float, policy: str) -> dict[str, Any]:
    """Run a workload under a policy, in this process."""
    from distributed import Client, wait
    from distributed.deploy.adaptive import Adaptive

    from dask_cml import CMLAdaptive, CMLCluster

    logging.disable(logging.ERROR)
    phases = WORKLOADS[workload]
    platform = Platform(latency=LATENCY, start_delay=start_delay, workers=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        # Twenty workers in one process would mostly look at each other's stacks.
        dask.config.set({"cml.state-directory": folder, "distributed.worker.profile.enabled": False}),
        platform.installed(),
        CMLCluster(quiet=True) as cluster,
        Client(cluster) as client,
    ):
        if policy != "best":
            cluster.adapt(Adaptive=Adaptive if policy == "Dask" else CMLAdaptive, minimum=0, maximum=MAXIMUM)
        seconds = []
        for i, times in enumerate(phases):
            if i:
                time.sleep(GAP)
            begin = time.monotonic()
            if policy == "best":
                cluster.scale(MAXIMUM)
            futures = []
            if len({*times}) == 1:
                futures = client.map(time.sleep, [TASK] * len(times), pure=False, key="work")
            else:
                for moment in times:
                    time.sleep(max(0.0, begin + moment - time.monotonic()))
                    futures.append(client.submit(time.sleep, TASK, pure=False))
            wait(futures)
            seconds.append(time.monotonic() - begin)
            del futures
            if policy == "best":
                cluster.scale(0)
        platform.wait_until_only(1)
        sessions = [session for session in platform.all.values() if session.key != "scheduler"]
        used = sum(map(seconds_of, sessions))
        left = len(platform.live) - 1
    return {
        "seconds": round(sum(seconds), 2),
        "launched": len(sessions),
        "session seconds": round(used),
        "left": left,
    }


def run(repeats: int = 1, at_once: int = 6) -> Report:
    """Run every workload at every start delay under every policy, some at once, and report."""
    report = Report(
        "adapt",
        f"Adaptive scaling, at most {MAXIMUM} sessions, tasks of {TASK:g} s",
        [
            "workload",
            "start s",
            "policy",
            "seconds",
            "of best",
            "launched",
            "of needed",
            "session seconds",
            "of least",
        ],
    )
    # The last workload takes longest, so it runs first.
    results = run_cases(
        "benchmarks.adapt", WORKLOADS, START_DELAYS, POLICIES, repeats=repeats, at_once=at_once
    )
    figures = []
    for workload in WORKLOADS:
        for delay in START_DELAYS:
            needed = sessions_needed(workload, delay)
            runs = {policy: results[workload, delay, policy] for policy in POLICIES}
            best = _middle(runs["best"], "seconds")
            least = min(_middle(runs[policy], "session seconds") for policy in POLICIES)
            for policy in POLICIES:
                seconds, launched, used = (
                    _middle(runs[policy], key) for key in ("seconds", "launched", "session seconds")
                )
                figures.append(
                    {
                        "workload": workload,
                        "start delay": delay,
                        "policy": policy,
                        "needed": needed,
                        "of best": round(seconds / best, 3),
                        "of needed": round(launched / needed, 3),
                        "of least": round(used / least, 3),
                        "runs": runs[policy],
                    }
                )
                report.rows.append(
                    (
                        workload,
                        str(delay),
                        policy,
                        f"{seconds:.1f}",
                        f"{seconds / best:.2f}",
                        f"{launched:g} / {needed}",
                        f"{launched / needed:.2f}",
                        f"{used:.0f}",
                        f"{used / least:.2f}",
                    )
                )
    report.figures = {"maximum": MAXIMUM, "latency": LATENCY, "at once": at_once, "cases": figures}
    return report


def _middle(runs: Sequence[dict[str, float]], key: str) -> float:
    values = sorted(run[key] for run in runs)
    return values[len(values) // 2]


def plot(report: Report) -> None:
    """Draw sessions, time and session seconds of every case, each in times of what it could have been."""
    fig, (launched, time_taken, used) = figure(5.5, 6.5, rows=3)
    policies = {"Dask": "tab:orange", "dask-cml": "tab:blue"}
    drawn = (
        (launched, "of needed", 1.2, "sessions / needed"),
        (time_taken, "of best", 1.1, "time / best"),
        (used, "of least", 1.15, "session seconds / least"),
    )
    for axes, key, most, label in drawn:
        for i, (policy, colour) in enumerate(policies.items()):
            chosen = [case for case in report.figures["cases"] if case["policy"] == policy]
            positions = [x + 0.4 * i - 0.2 for x in range(len(chosen))]
            axes.bar(
                positions, [case[key] for case in chosen], 0.38, color=colour, label=f"{policy}'s Adaptive"
            )
        axes.axhline(most, color="tab:grey", linestyle=":", label="acceptance limit")
        axes.set_ylabel(label)
        axes.set_xticks([])
    lines = [[*case["workload"].split(), f"{case['start delay']} s"] for case in chosen]
    labels = ["\n".join(label) for label in lines]
    used.set_xticks(range(len(labels)), labels, fontsize=8)
    used.set_xlabel("workload; time that a session takes to start")
    launched.legend()
    save_figure(fig, report.name)


if __name__ == "__main__":
    print(json.dumps(one_run(sys.argv[1], float(sys.argv[2]), sys.argv[3])), flush=True)
