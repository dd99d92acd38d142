"""Tune a classifier of handwritten digits on a Dask cluster of CML sessions.

Inside a CML session the cluster's scheduler and workers are CML worker sessions. Anywhere
else they are processes of this computer, started by dask-cml's local platform. Needs
scikit-learn.
"""

import os
import time

from dask.distributed import Client, as_completed
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.svm import SVC

from dask_cml import CMLCluster

PLATFORM = "auto" if "CDSW_ENGINE_ID" in os.environ else "local"
C = [0.1, 1, 10, 100]
GAMMA = [0.0001, 0.0003, 0.001, 0.003, 0.01]
GRID = [(c, gamma) for c in C for gamma in GAMMA]
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

        say(f"Cross-validating {len(GRID)} support vector machines on 1797 images ...")
        print_table(dict(zip(GRID, client.gather(client.map(accuracy, GRID)), strict=True)))

        say("Scaling to 3 workers ...")
        cluster.scale(3)
        wait_for(cluster, 3)

        say("Adapting between 1 and 3 workers. Nothing to do, so the cluster shrinks ...")
        cluster.adapt(minimum=1, maximum=3)
        wait_for(cluster, 1)

        say("Three times the work, so it grows ...")
        watch(cluster, client.map(accuracy, 3 * GRID, pure=False))

    say("Closed: every session has been stopped.")


def accuracy(setting):
    """Return what share of digits an SVM of these parameters recognises, on a worker."""
    c, gamma = setting
    images, digits = load_digits(return_X_y=True)
    return cross_val_score(SVC(C=c, gamma=gamma), images, digits, cv=3).mean()


def print_table(accuracies):
    best = max(accuracies, key=accuracies.get)
    print("\n  accuracy" + "".join(f"{f'gamma={gamma}':>14}" for gamma in GAMMA))
    for c in C:
        cells = (f"{accuracies[c, gamma]:.1%}" for gamma in GAMMA)
        print(f"{f'C={c}':>10}" + "".join(f"{cell:>14}" for cell in cells))
    print(f"\n  best: C={best[0]}, gamma={best[1]} with {accuracies[best]:.1%}\n")


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
