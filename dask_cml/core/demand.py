"""The question for the work that the scheduler knows, which all groups that adapt share."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from dask_cml import protocol
from dask_cml.core.interface import Cluster
from dask_cml.core.policy import Snapshot, Supply


class Demand:
    """What the scheduler knows of the work, and what the groups can do.

    Parameters
    ----------
    cluster : Cluster
        The cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._question: asyncio.Task[dict[str, Any]] | None = None
        self._asked = 0.0

    async def snapshot(self, max_age: float = 0.0) -> Snapshot:
        """Return the work and the groups. Callers that wait for each other share one question.

        Parameters
        ----------
        max_age : float
            Maximum age of a question whose answer is used again, in seconds.

        Raises
        ------
        OSError, asyncio.TimeoutError, CMLError
            If the scheduler does not answer.
        """
        question = self._question
        if question is not None and question.done():
            failed = question.cancelled() or question.exception() is not None
            if failed or time.monotonic() - self._asked >= max_age:
                question = None
        if question is None:
            self._asked = time.monotonic()
            question = asyncio.ensure_future(self._cluster.ask(protocol.DEMAND))
            self._question = question
        answer = await asyncio.shield(question)
        return Snapshot.of(answer, [self._supply(group) for group in self._cluster.groups.names])

    def _supply(self, group: str) -> Supply:
        groups = self._cluster.groups
        options = groups.options(group)
        return Supply(
            name=group,
            processes=options.processes,
            nthreads=options.nthreads,
            resources=options.resources,
            adapts=groups.adapts(group),
            target=groups.target(group),
        )

    @property
    def question(self) -> asyncio.Task[dict[str, Any]] | None:
        """The last question, which may wait for its answer."""
        return self._question
