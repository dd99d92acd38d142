"""A programming error in what a cluster does by itself is its problem, and is logged once."""

from __future__ import annotations

import contextlib

import pytest
from clusters import cut_off, simulate, step_in, step_out
from distributed.core import Status
from simulated.testing import eventually, simulated

from dask_cml import output
from dask_cml.observers import Observers

pytestmark = pytest.mark.usefixtures("light")


@pytest.mark.parametrize("moment", ["looks for losses", "takes the board", "checks the scheduler"])
@simulated
async def test_a_programming_error_is_logged_once_and_is_a_problem_until_it_passes(it, moment, caplog):
    async with simulate(n_workers=1) as cluster:
        calls = []

        async def fail(*_, **__):
            calls.append(1)
            raise AttributeError("no such part")

        step_in(cluster, moment, fail)
        with contextlib.ExitStack() as stack:
            if moment == "checks the scheduler":
                stack.callback(cut_off(cluster))
            await eventually(lambda: len(calls) > 3)
            assert "AttributeError('no such part')" in cluster.problem
            assert "AttributeError('no such part')" in repr(cluster)
        step_out(cluster, moment)
        await eventually(lambda: cluster.problem is None)
    assert output.flush(60)
    logged = [record for record in caplog.records if "no such part" in (record.exc_text or "")]
    assert len(logged) == 1


@simulated
async def test_an_error_of_a_poll_of_all_clusters_is_logged_once(it, caplog):
    class Broken(Observers):
        polls = 0

        async def polled(self):
            self.polls += 1
            raise AttributeError("no such list")

    observers = Broken(interval=0.01)
    observers.start()
    await eventually(lambda: observers.polls > 3)
    await observers.close()
    assert output.flush(60)
    logged = [record for record in caplog.records if "no such list" in (record.exc_text or "")]
    assert len(logged) == 1


@simulated
async def test_close_tries_again_after_an_error_of_dask(it):
    async def fail():
        del cluster._close_dask
        raise AttributeError("comm")

    cluster = await simulate()
    cluster._close_dask = fail
    with pytest.raises(AttributeError):
        await cluster.close()
    await cluster.close()
    assert cluster.status == Status.closed
    assert it.platform.live == []
