"""Addresses ``cml://<name>``: Dask's clients connect to a cluster by its name.

An entry point of the package names this module. Dask imports it when it first meets such an address, so the
process itself need not import dask-cml.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from typing import Any
from urllib.parse import unquote

from distributed.comm.addressing import get_address_host, parse_address
from distributed.comm.core import Comm, Connector, FatalCommClosedError
from distributed.comm.registry import Backend, get_backend
from distributed.security import Security

from dask_cml import errors
from dask_cml.options import state_directory
from dask_cml.records import store
from dask_cml.records.record import SCHEME, Record

logger = logging.getLogger(__name__)

_LOOK_INTERVAL = 0.5
_told: set[str] = set()
#: By the clusters' addresses, where their schedulers were at the last connection.
_schedulers: dict[str, str] = {}


class NoSuchCluster(errors.NoSuchCluster, FatalCommClosedError):
    """No cluster has this name. Dask does not try to connect again, as it does after other errors.

    Parameters
    ----------
    message : str
        What is wrong. It must be enough by itself: Dask makes another such error, with words of its own.
    name : str
        What was looked for.
    known : tuple of str
        The names of the clusters that are there.
    """

    def __init__(self, message: str, name: str = "", known: tuple[str, ...] = ()) -> None:
        super().__init__(name, known)
        self.args = (message,)


class CMLConnector(Connector):
    """Connects to the scheduler that a cluster's record names, with the cluster's keys."""

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Comm:
        """Connect to a cluster; wait, if it is starting.

        Parameters
        ----------
        address : str
            The cluster's name, percent-encoded.
        deserialize : bool
            As for each connector.
        **connection_args
            Used if the cluster has no keys of its own.

        Raises
        ------
        NoSuchCluster
            If there is no cluster of this name, or it ended before its scheduler answered.
        OSError
            If its scheduler cannot be reached.
        """
        record = await _running(unquote(address))
        scheduler = record.scheduler_address
        assert scheduler is not None
        _schedulers[address] = scheduler
        if (security := record.get_security()) is not None:  # which reads the files of the keys
            connection_args |= await asyncio.to_thread(security.get_connection_args, "client")
        scheme, location = parse_address(scheduler)
        connector = get_backend(scheme).get_connector()
        try:
            return await connector.connect(location, deserialize=deserialize, **connection_args)
        except FatalCommClosedError:
            raise
        except OSError as error:
            raise OSError(
                f"the scheduler of the cluster {record.name!r} cannot be reached at {scheduler}: {error}"
            ) from error


async def _running(name: str) -> Record:
    """Return the record of a cluster as soon as it has the scheduler's address."""
    while True:
        record = await asyncio.to_thread(_read, name)
        if record.scheduler_address is not None:
            return record
        if record.id not in _told:  # Dask's error after the time-out does not say why
            _told.add(record.id)
            logger.warning("The cluster %s is starting: its scheduler has no address yet", name)
        await asyncio.sleep(_LOOK_INTERVAL)


def _read(name: str) -> Record:
    try:
        record = store.read(name)
    except errors.NoSuchCluster as error:
        where = f"{error}; they are looked for in {state_directory()}"
        raise NoSuchCluster(where, error.name, error.known) from None
    if record.scheduler_address is None and record.maker.lives() is False:
        why = f"the process that made the cluster {name!r} ended before the scheduler answered"
        raise NoSuchCluster(f"{why}; run `dask cml delete {shlex.quote(name)}`", name)
    return record


class CMLBackend(Backend):
    """The comm backend for addresses ``cml://<name>``."""

    def get_connector(self) -> CMLConnector:
        """Return a new connector."""
        return CMLConnector()

    def get_listener(self, loc: str, *_: Any, **connection_args: Any) -> Any:
        """Refuse to listen: these addresses are for clients."""
        raise ValueError(f"cannot listen at {SCHEME}://{loc}: expected an address tcp:// or tls://")

    def get_address_host(self, loc: str) -> str:
        """Return the host to which the last connection led; the name, before there was one."""
        # XGBoost asks for it, to have its own connections meet there.
        scheduler = _schedulers.get(loc)
        return loc if scheduler is None else get_address_host(scheduler)

    def resolve_address(self, loc: str) -> str:
        """Return the name: each connection reads anew where the scheduler is."""
        return loc

    def get_local_address_for(self, loc: str) -> str:
        """Refuse as `get_listener` does."""
        return self.get_listener(loc)


def load_security(info: dict[str, Any]) -> Security | None:
    """Find the keys of a cluster by its address, for ``distributed.client.security-loader``.

    Parameters
    ----------
    info : dict
        As Dask calls it: the ``"address"`` that a client was given.

    Returns
    -------
    Security or None
        None, if no cluster of the project with keys of its own has this address.
    """
    scheme, location = parse_address(info["address"])
    if scheme not in ("tls", SCHEME):  # others need no keys, so the files are not read for them
        return None
    try:
        if scheme == SCHEME:
            records = [store.read(unquote(location))]
        else:
            records = [each for each in store.records() if each.scheduler_address == info["address"]]
    except errors.NoSuchCluster:
        return None  # connecting raises the error
    except (OSError, ValueError, TypeError) as error:
        logger.warning("Cannot look up keys for %s: %s", info["address"], error)
        return None
    # Another cluster may have had the address before. The files of the keys are written before the address.
    found = [record for record in records if record.security and record.scheduler_address]
    return max(found, key=lambda record: record.created).get_security() if found else None
