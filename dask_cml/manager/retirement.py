"""Workers that hand over what they hold before their sessions are stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from dask_cml.aio import cancel
from dask_cml.checks import seconds
from dask_cml.manager.fleet import Fleet
from dask_cml.manager.scheduler_client import SchedulerClient
from dask_cml.options import setting

logger = logging.getLogger(__name__)

#: Most workers hand over in less. Until then nothing is launched, so that their room in a quota is free.
_USUAL = 2.0
#: From then on the user is told what is waited for.
_LONG = 10.0


class Retirements(Collection[str]):
    """Retire workers in tasks of their own, so that a worker which does not answer holds up nobody.

    It contains the keys of the worker sessions that are being retired. Dask takes no worker back that is
    being retired, so these are not wanted workers any more.

    Parameters
    ----------
    fleet : Fleet
        The cluster's workers.
    client : SchedulerClient
        Retires them.
    leads : callable
        Returns whether this manager leads: the one that does decides which workers stay.
    log : callable
        Gets each line for the user.
    poke : callable
        Called when workers are retired.
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
        self._limit: float = setting("retire-timeout", seconds)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._since: dict[str, float] = {}
        self._over: set[str] = set()
        self._stay: set[str] = set()
        self._closed = False

    def __contains__(self, key: object) -> bool:
        return key in self._tasks

    def __iter__(self) -> Iterator[str]:
        return iter([*self._tasks])

    def __len__(self) -> int:
        return len(self._tasks)

    def here(self, keys: Collection[str]) -> set[str]:
        """Return the sessions whose Dask workers are all connected; of one that stays, one is enough."""
        observed = self._client.observed
        whole = {key for key in keys if observed.issuperset(self._fleet.dask_names(key))}
        return whole | (self._stay & {*self._present(keys)})

    @property
    def words(self) -> str | None:
        """What is waited for, if that takes long."""
        now = time.monotonic()
        late = [key for key in self._present(self) if now - self._since.get(key, now) > _LONG]
        return f"waiting for the data of {', '.join(late)}" if late else None

    async def carry_on(self, unwanted: Collection[str]) -> set[str]:
        """Begin to retire unwanted workers, and return those whose sessions can be stopped.

        Parameters
        ----------
        unwanted : collection of str
            The keys of all worker sessions that are not wanted.
        """
        self._over &= set(unwanted)
        begin = {key for key in self._present(unwanted) if key not in self._over and key not in self}
        if begin and not self._closed:
            task = asyncio.create_task(self._retire(begin))
            self._tasks.update(dict.fromkeys(begin, task))
            self._since.update(dict.fromkeys(begin, time.monotonic()))
            await asyncio.wait([task], timeout=_USUAL)
        waiting = self._present(self)
        return {key for key in unwanted if key in self._over or key not in waiting}

    async def close(self) -> None:
        """Wait for no worker any more."""
        self._closed = True
        await cancel(*self._tasks.values())

    def _present(self, keys: Collection[str]) -> list[str]:
        """Return those of which the scheduler has a Dask worker."""
        observed = self._client.observed
        return sorted(key for key in keys if not observed.isdisjoint(self._fleet.dask_names(key)))

    async def _retire(self, keys: set[str]) -> None:
        names = {name: key for key in keys for name in self._fleet.dask_names(key)}
        try:
            left = await self._hand_over(names)
            if not self._leads():
                return
            # If no other is wanted, an order to close the last worker is all that is left to obey. Another
            # one that is wanted may connect later.
            stays = left if self._fleet.keys else set()
            self._stay = (self._stay - keys) | (stays & self._fleet.workers.keys())
            for key in stays & self._stay:
                self._fleet.keep(key)
                self._log(f"The worker {key} stays: no other worker can take its data")
            self._over |= keys - stays
            self._poke()
        except OSError as error:
            # The next step tries again: nothing says that the data is elsewhere.
            logger.info("The workers %s are not retired yet: %r", sorted(keys), error)
        except Exception:
            logger.exception("The workers %s are not retired yet", sorted(keys))
        finally:
            for key in keys:
                self._tasks.pop(key, None)
                self._since.pop(key, None)

    async def _hand_over(self, names: dict[str, str]) -> set[str]:
        """Have workers hand over what they hold; return the keys of those that hold what no other can take.

        Parameters
        ----------
        names : dict
            The keys of the sessions by the names of the Dask workers in them.
        """
        asked = names.keys() & self._client.observed
        asking = asyncio.ensure_future(self._client.retire(asked))
        try:
            heard = await self._client.last_heard(names)
            if not await _is_done(asking, min(_LONG, self._limit)):
                late = ", ".join(self._present(set(names.values())))
                self._log(f"The cluster {self._fleet.name} waits until other workers have the data of {late}")
            while not await _is_done(asking, self._limit):
                before, heard = heard, await self._client.last_heard(names)
                # A slow worker is waited for, as long as it answers. What a frozen one holds can be had from
                # nobody, and its session costs: two minutes are silence enough, of a scheduler, too. Dask
                # itself would wait for five.
                silent = {name for name in heard if heard[name] == before.get(name)}
                with contextlib.suppress(OSError, asyncio.TimeoutError):
                    await self._client.drop(silent)
                    for key in sorted({names[name] for name in silent}):
                        self._log(f"The worker {key} is given up: it has not answered for {self._limit:g} s")
            retired = asking.result()
        finally:
            await cancel(asking)
        return {names[name] for name in (asked - retired) & self._client.observed}


async def _is_done(future: asyncio.Future[Any], timeout: float) -> bool:
    done, _ = await asyncio.wait([future], timeout=timeout)
    return bool(done)
