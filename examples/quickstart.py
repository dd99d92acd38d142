"""Tune a classifier of two spirals on a Dask cluster of CML sessions.

Inside a CML session, CML launches the scheduler and every worker as a session. Anywhere
else, dask-cml's local platform starts them as processes of this computer.
"""

import os
import time

import numpy as np
from dask.distributed import Client, as_completed

from dask_cml import CMLCluster

PLATFORM = "auto" if "CDSW_ENGINE_ID" in os.environ else "local"
POINTS = 900
WIDTHS = [0.03, 0.1, 0.2, 0.5, 1]
PENALTIES = [0.01, 0.1, 1, 10]
GRID = [(penalty, width) for penalty in PENALTIES for width in WIDTHS]
START = time.monotonic()


def main():
    say("Starting a scheduler and 2 workers ...")
    with (
        CMLCluster(n_workers=2, cpu=1, memory=1, platform=PLATFORM) as cluster,
        Client(cluster) as client,
    ):
        wait_for(cluster, 2)
        for session in cluster.sessions:
            print(f"         {session.role:9} in session {session.id}")
        say(f"Dashboard: {cluster.dashboard_link}")

        say(f"Cross-validating {len(GRID)} classifiers of {POINTS} points ...")
        print_table(dict(zip(GRID, client.gather(client.map(accuracy, GRID)), strict=True)))

        say("Scaling to 3 workers ...")
        cluster.scale(3)
        wait_for(cluster, 3)

        say("Adapting between 1 and 3 workers. Nothing to do, so the cluster shrinks ...")
        cluster.adapt(minimum=1, maximum=3)
        wait_for(cluster, 1)

        say("Five times the work, so it grows ...")
        watch(cluster, client.map(accuracy, 5 * GRID, pure=False))

    say("Closed: every session is told to stop.")


def accuracy(setting):
    """Return what share of points a classifier puts on their spiral, on a worker."""
    penalty, width = setting
    points, spirals = two_spirals()
    squares = ((points[:, None] - points) ** 2).sum(axis=2)
    kernel = np.exp(-squares / width**2)
    right = []
    for fold in range(3):
        test = np.arange(POINTS) % 3 == fold
        learnt = kernel[~test][:, ~test] + penalty * np.eye((~test).sum())
        weights = np.linalg.solve(learnt, spirals[~test])
        right.append(np.sign(kernel[test][:, ~test] @ weights) == spirals[test])
    return np.concatenate(right).mean()


def two_spirals():
    """Return points on two spirals with noise, and for each the spiral, 1 or -1."""
    random = np.random.default_rng(0)
    spirals = np.where(np.arange(POINTS) % 2, 1, -1)
    angles = 10 * np.sqrt(random.random(POINTS))
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1) * (spirals * angles / 10)[:, None]
    return points + random.normal(0, 0.12, points.shape), spirals


def print_table(accuracies):
    best = max(accuracies, key=accuracies.get)
    print("\n     accuracy" + "".join(f"{f'width={width}':>12}" for width in WIDTHS))
    for penalty in PENALTIES:
        cells = (f"{accuracies[penalty, width]:.1%}" for width in WIDTHS)
        print(f"{f'penalty={penalty}':>13}" + "".join(f"{cell:>12}" for cell in cells))
    print(f"\n  best: penalty={best[0]}, width={best[1]} with {accuracies[best]:.1%}\n")


def wait_for(cluster, n, timeout=600):
    """Wait until the cluster has exactly n workers."""
    deadline = time.monotonic() + timeout
    while n_workers(cluster) != n:
        if time.monotonic() > deadline:
            found = n_workers(cluster)
            raise TimeoutError(f"{found} workers instead of {n} after {timeout} s")
        time.sleep(0.1)
    say(f"Workers: {n}")


def watch(cluster, futures):
    """Wait for the results, and print whenever the number of workers has changed."""
    before = n_workers(cluster)
    for done, _ in enumerate(as_completed(futures), start=1):
        if n_workers(cluster) != before or done == len(futures):
            before = n_workers(cluster)
            say(f"Workers: {before}, {done} of {len(futures)} done")


def n_workers(cluster):
    return len(cluster.scheduler_info["workers"])


def say(text):
    print(f"{time.monotonic() - START:5.1f} s  {text}", flush=True)


if __name__ == "__main__":
    main()
