"""Tune a classifier of handwritten digits on a Dask cluster of CML sessions.

Inside a CML session the cluster's scheduler and workers are CML worker sessions; anywhere else
they are processes of this computer, started by dask-cml's local platform. Needs scikit-learn.
"""

import os
import time
from collections import Counter

from dask.distributed import Client, as_completed, get_worker
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.svm import SVC

from dask_cml import CMLCluster

PLATFORM = "auto" if "CDSW_ENGINE_ID" in os.environ else "local"
C = [0.1, 1, 10, 100]
GAMMA = [0.0001, 0.0003, 0.001, 0.003, 0.01]
START = time.monotonic()


def main():
    say("Starting a scheduler and 2 workers ...")
    with (
        CMLCluster(n_workers=2, cpu=1, memory=1, platform=PLATFORM) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2)
        say(f"Ready. Dashboard: {cluster.dashboard_link}")

        say(f"Trying {len(C) * len(GAMMA)} support vector machines on 1797 images of digits ...")
        print_table(search(client))

        say("Scaling to 3 workers ...")
        cluster.scale(3)
        wait_for(client, 3)

        say("Adapting between 1 and 3 workers. There is nothing to do, so it shrinks ...")
        cluster.adapt(minimum=1, maximum=3)
        wait_for(client, 1)

        say("The same search at four times the work, so it grows ...")
        search(client, repeat=4)

    say("Closed: every session has been stopped.")


def search(client, repeat=1):
    """Return the accuracy of each setting, and print how many workers took part."""
    grid = [(c, gamma) for c in C for gamma in GAMMA for _ in range(repeat)]
    futures = client.map(evaluate, grid, pure=False)
    accuracy, done_by = {}, Counter()
    for _, (setting, score, worker) in as_completed(futures, with_results=True):
        accuracy[setting] = score
        done_by[worker] += 1
    shares = ", ".join(f"{name}: {n}" for name, n in sorted(done_by.items()))
    say(f"{len(grid)} cross-validations by {len(done_by)} workers ({shares})")
    return accuracy


def evaluate(setting):
    """Cross-validate one setting; this runs on a worker."""
    c, gamma = setting
    images, digits = load_digits(return_X_y=True)
    score = cross_val_score(SVC(C=c, gamma=gamma), images, digits, cv=5).mean()
    return setting, score, get_worker().name


def print_table(accuracy):
    best = max(accuracy, key=accuracy.get)
    print("\n      accuracy" + "".join(f"{f'gamma={gamma}':>14}" for gamma in GAMMA))
    for c in C:
        cells = [f"{accuracy[c, gamma]:.1%}{'*' * ((c, gamma) == best):1}" for gamma in GAMMA]
        print(f"{f'C={c}':>14}" + "".join(f"{cell:>14}" for cell in cells))
    print(f"\n      * best: C={best[0]}, gamma={best[1]}\n")


def wait_for(client, n, timeout=600):
    """Wait until the cluster has exactly n workers."""
    deadline = time.monotonic() + timeout
    while len(client.nthreads()) != n:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not {n} workers after {timeout} s")
        time.sleep(0.1)
    say(f"Workers now: {n}")


def say(text):
    print(f"{time.monotonic() - START:5.1f} s  {text}", flush=True)


if __name__ == "__main__":
    main()
