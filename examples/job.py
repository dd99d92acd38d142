"""Simulate the price of a share on a Dask cluster, as a CML Job.

An error ends the script with an exit status other than 0, and the Job fails.
The cluster is closed even so.
"""

import json
import os
import random
from pathlib import Path

from dask.distributed import Client

from dask_cml import CMLCluster

PLATFORM = "auto" if "CDSW_ENGINE_ID" in os.environ else "local"
RESULT = Path("prices.json")


def main():
    with (
        CMLCluster(n_workers=2, cpu=1, memory=2, platform=PLATFORM) as cluster,
        Client(cluster) as client,
    ):
        # If no worker gets room, the Job fails. Without this limit, it would be queued.
        client.wait_for_workers(1, timeout="30 minutes")
        prices = client.gather(client.map(simulate, range(100)))
    RESULT.write_text(json.dumps(prices))
    low, high = min(prices), max(prices)
    print(f"{len(prices)} prices between {low:.2f} and {high:.2f} in {RESULT}")


def simulate(seed):
    """Return a price after 250 days, on a worker."""
    days = random.Random(seed)
    price = 100.0
    for _ in range(250):
        price *= 1 + days.gauss(0.0002, 0.01)
    return price


if __name__ == "__main__":
    main()
