"""The core alone: a cluster that no other process finds, without a record, a board and a lease."""

from __future__ import annotations

import functools

import pytest
from simulated.testing import eventually, simulated
from test_traps import SCENARIOS, play

from dask_cml import CMLCluster
from dask_cml.core.alone import Alone
from dask_cml.records import store

pytestmark = pytest.mark.usefixtures("light")


class AloneCluster(CMLCluster):
    """A cluster that is not shared."""

    def _share(self, given):
        return Alone(self)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@simulated
async def test_it_holds_without_a_record(it, scenario):
    async def played(make, it, holds):
        await scenario(make, it, holds)
        assert store.records() == []

    await play(played, functools.partial(AloneCluster, asynchronous=True, quiet=True), it, eventually)
