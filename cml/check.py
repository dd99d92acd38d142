"""Check dask-cml in this project: its doctor finds nothing wrong, and a cluster of one worker computes.

CML runs this script in IPython, in the project's root.
"""

import subprocess
import sys
import time

from dask.distributed import Client

from dask_cml import CMLCluster

# CML may have to add a node for the worker's session.
TIMEOUT = 900  # seconds


def main():
    doctor = subprocess.run([sys.executable, "-m", "dask", "cml", "doctor"])
    if doctor.returncode:
        return doctor.returncode
    start = time.monotonic()
    print("Starting a cluster of one worker ...", flush=True)
    # With this script's session, this is 2 vCPU and 6 GiB: within 2 vCPU and 8 GiB, the default on premises.
    with (
        CMLCluster(n_workers=1, cpu=1, memory=2, scheduler_cpu=0.5, scheduler_memory=2) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(1, timeout=TIMEOUT)
        total = sum(client.gather(client.map(square, range(100))))
        assert total == 328350, total
    seconds = time.monotonic() - start
    print(f"dask-cml works: a cluster of one worker started, computed and shut down in {seconds:.0f} s.")
    return 0


def square(number):
    return number**2


if status := main():
    sys.exit(status)
