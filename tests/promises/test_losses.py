"""Lost workers are replaced, and what they held is computed again."""

from __future__ import annotations

import pytest
from clusters import arrived, connected, log_of, simulate
from distributed import Client
from simulated.testing import eventually, simulated


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        ("fails", "lost: it never connected; the platform says failed"),
        ("silent", "lost: it did not connect within 20 s"),
        ("evicted", "lost: evicted or killed by the platform, which says failed"),
        ("closed", "closed"),
    ],
)
@simulated
async def test_a_lost_session_is_replaced_and_the_cause_is_reported(it, fate, words):
    if fate in ("fails", "silent"):
        it.platform.doom(fate, key="-0")
    async with simulate(name="mine", n_workers=1, worker_timeout=20) as cluster:
        if fate in ("evicted", "closed"):
            await eventually(lambda: arrived(cluster) == 1)
        if fate == "evicted":
            it.platform.evict(it.platform.running["mine-0"])
        if fate == "closed":
            async with Client(cluster, asynchronous=True) as client:
                await client.retire_workers(names=["mine-0"])
        await eventually(lambda: connected(cluster) == {"mine-1"})
        assert log_of(cluster) == f"Worker mine-0 {words}; launching a replacement"
