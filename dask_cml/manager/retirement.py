"""Retirement of workers: they move their data to others before their sessions are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Any

from dask_cml.aio import cancel
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.options import setting

logger = logging.getLogger(__name__)

#: Seconds. Most workers move their data in less. Until then nothing is launched, to free their quota first.
_USUAL = 2.0
#: Seconds after which the user is informed of the wait.
_LONG = 10.0


class Retirements(Collection[str]):
    """Retires workers in tasks, so that a worker that does not answer blocks nothing else.

    Contains the keys of the worker sessions that are being retired. Dask cannot reverse a retirement, so
    these sessions are no longer wanted.

    Parameters
    ----------
    fleet : Fleet
        The cluster's workers.
    client : SchedulerClient
        Retires the workers.
    leads : callable
        Returns whether this manager leads. The leader decides which workers are kept.
    log : callable
        Gets each line for the user.
    poke : callable
        Called after workers are retired.
    """

    def __init__(
        self,
        fleet: Fleet[Any],
        client: SchedulerClient,
        leads: Callable[[], bool],
        log: Callable[[str], None],
        poke: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._leads = leads
        self._log = log
        self._poke = poke
        self._limit: float = setting("retire-timeout")
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._since: dict[str, float] = {}
        self._over: set[str] = set()
        #: The kept sessions, and for each the Dask workers that were there when none could take its data.
        self._stay: dict[str, frozenset[str]] = {}
        #: What moves the data of kept sessions that are wanted all the same.
        self._retries: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def __contains__(self, key: object) -> bool:
        return key in self._tasks

    def __iter__(self) -> Iterator[str]:
        return iter([*self._tasks])

    def __len__(self) -> int:
        return len(self._tasks)

    def here(self, keys: Collection[str]) -> set[str]:
        """Return the sessions whose Dask workers are all connected. For a kept session, one is enough."""
        return self._whole(keys) | (self._stay.keys() & {*self._present(keys)})

    @property
    def words(self) -> str | None:
        """The workers whose retirement takes long. None if there are none."""
        now = time.monotonic()
        late = [key for key in self._present(self) if now - self._since.get(key, now) > _LONG]
        return f"waiting for the data of {', '.join(late)}" if late else None

    async def carry_on(self, unwanted: Collection[str]) -> set[str]:
        """Start to retire unwanted workers, and return those whose sessions can be stopped.

        Parameters
        ----------
        unwanted : collection of str
            The keys of all worker sessions that are not wanted.
        """
        self._over &= set(unwanted)
        begin = {key for key in self._present(unwanted) if key not in self._over and key not in self}
        if begin and not self._closed:
            await cancel(*(self._retries[key] for key in begin & self._retries.keys()))
            task = asyncio.create_task(self._carry_out(begin, self._tasks, self._retire))
            self._tasks.update(dict.fromkeys(begin, task))
            self._since.update(dict.fromkeys(begin, time.monotonic()))
            await asyncio.wait([task], timeout=_USUAL)
        if (again := self._incomplete() - set(unwanted)) and not self._closed:
            task = asyncio.create_task(self._carry_out(again, self._retries, self._retry))
            self._retries.update(dict.fromkeys(again, task))
        waiting = self._present(self)
        return {key for key in unwanted if key in self._over or key not in waiting}

    def _incomplete(self) -> set[str]:
        """Return the kept sessions that lack a Dask worker, if other workers have connected since."""
        observed = self._client.observed
        return {
            key
            for key in self._present(self._stay)
            if not (key in self or key in self._retries or observed <= self._stay[key] or self._whole([key]))
        }

    async def close(self) -> None:
        """Stop waiting for workers."""
        self._closed = True
        await cancel(*self._tasks.values(), *self._retries.values())

    def _whole(self, keys: Collection[str]) -> set[str]:
        """Return the sessions whose Dask workers are all connected."""
        observed = self._client.observed
        return {key for key in keys if observed.issuperset(self._fleet.dask_names(key))}

    def _present(self, keys: Collection[str]) -> list[str]:
        """Return the keys of sessions with a Dask worker that is connected to the scheduler."""
        observed = self._client.observed
        return sorted(key for key in keys if not observed.isdisjoint(self._fleet.dask_names(key)))

    async def _carry_out(
        self,
        keys: set[str],
        tasks: dict[str, asyncio.Task[None]],
        work: Callable[[set[str]], Awaitable[None]],
    ) -> None:
        try:
            await work(keys)
        except OSError as error:
            # The next step tries again, because the data may still be in these workers.
            logger.info("Workers %s not retired yet: %r", sorted(keys), error)
        except Exception:
            logger.exception("Workers %s not retired yet", sorted(keys))
        finally:
            for key in keys:
                tasks.pop(key, None)
                self._since.pop(key, None)

    async def _retire(self, keys: set[str]) -> None:
        left = await self._hand_over(keys)
        if not self._leads():
            return
        # With scale(0), the last worker stops even if its data is lost. If others are wanted, one of
        # them may connect later and take the data.
        stays = left if self._fleet.keys else set()
        self._note(keys, stays & self._fleet.workers.keys())
        for key in stays & self._stay.keys():
            self._fleet.keep(key)
            self._log(f"Worker {key} kept: no other worker can take its data")
        self._over |= keys - stays
        self._poke()

    async def _retry(self, keys: set[str]) -> None:
        """Move the data of incomplete sessions, so that whole ones replace them."""
        self._note(keys, await self._hand_over(keys))
        self._poke()

    def _note(self, keys: set[str], stays: set[str]) -> None:
        """Note which of these sessions hold data that no worker can take now."""
        for key in keys - stays:
            self._stay.pop(key, None)
        self._stay.update(dict.fromkeys(stays, frozenset(self._client.observed)))

    async def _hand_over(self, keys: set[str]) -> set[str]:
        """Move the data of sessions to others. Return the keys of those whose data no other can take."""
        names = {name: key for key in keys for name in self._fleet.dask_names(key)}
        asked = names.keys() & self._client.observed
        asking = asyncio.ensure_future(self._client.retire(asked))
        try:
            heard = await self._client.last_heard(names)
            if not await _is_done(asking, min(_LONG, self._limit)):
                late = ", ".join(self._present(set(names.values())))
                self._log(f"Cluster {self._fleet.name} waiting for other workers to copy the data of {late}")
            while not await _is_done(asking, self._limit):
                before, heard = heard, await self._client.last_heard(names)
                # Wait for a slow worker as long as it answers. The data of a frozen worker is out of reach,
                # and its session uses quota: two minutes of silence are enough, also of the scheduler. Dask
                # itself would wait for five.
                silent = {name for name in heard if heard[name] == before.get(name)}
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    await self._client.drop(silent)
                    for key in sorted({names[name] for name in silent}):
                        self._log(f"Worker {key} abandoned: no answer for {self._limit:g} s")
            retired = asking.result()
        finally:
            await cancel(asking)
        return {names[name] for name in (asked - retired) & self._client.observed}


async def _is_done(future: asyncio.Future[Any], timeout: float) -> bool:
    done, _ = await asyncio.wait([future], timeout=timeout)
    return bool(done)
