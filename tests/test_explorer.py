"""Random schedules of requests, crashes and faults: in the end, what was asked for runs, and nothing else.

Each episode has its seed, so a failure names how to repeat it: ``DASK_CML_SEED=<seed> DASK_CML_EPISODES=1``.
"""

import os

import pytest
from explorer.play import play_quietly

EPISODES = int(os.environ.get("DASK_CML_EPISODES", 2))
SEED = int(os.environ.get("DASK_CML_SEED", 40003))


@pytest.mark.parametrize("seed", range(SEED, SEED + EPISODES))
def test_an_episode_ends_well(seed):
    outcome = play_quietly(seed)[1]
    print(f"DASK_CML_SEED={seed} DASK_CML_EPISODES=1", *outcome.story, sep="\n")
    assert outcome.violations == []
