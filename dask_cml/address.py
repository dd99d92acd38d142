"""Addresses ``cml://<name>``, by which Dask's clients connect to a cluster by its name.

An entry point of the package names this module. Dask imports it at the first such address, so programs need
not import dask-cml.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import unquote

from distributed.client import Client, FutureState
from distributed.comm.addressing import get_address_host, parse_address
from distributed.comm.core import Comm, Connector, FatalCommClosedError
from distributed.comm.registry import Backend, get_backend
from distributed.security import Security

from dask_cml import compat, errors, output, protocol
from dask_cml.core.ending import unclosed
from dask_cml.options import state_directory
from dask_cml.output import get_logger
from dask_cml.protocol import END, LINES
from dask_cml.records import store
from dask_cml.records.history import find_ended
from dask_cml.records.store import SCHEME, Record
from dask_cml.sessions import here
from dask_cml.words import command

logger = get_logger(__name__)

T = TypeVar("T")

_POLL_INTERVAL = 0.5
#: Seconds for which a client waits at least for another scheduler, besides the time in which it starts, and
#: before it tries again.
RECONNECT_TIMEOUT, _RETRY = 300.0, 0.1
#: Seconds before the first search for the client that connects, and before the last search. Pauses double.
_FIRST_PAUSE, _LAST_PAUSE = 0.005, 1.5
#: Whether Dask's errors of cancelled futures have a reason.
_CANCELS_WITH_REASON = "reason" in inspect.signature(FutureState.cancel).parameters
#: What the last successful connection to a cluster has read, by the cluster's address.
_records: dict[str, Record] = {}
#: When the last line of a cluster was logged by its scheduler, by the scheduler's address.
_last_lines: dict[str, float] = {}


class NoSuchCluster(errors.NoSuchCluster, FatalCommClosedError):
    """No cluster has this name. Unlike after other errors, Dask does not try to connect again.

    Parameters
    ----------
    message : str
        The complete error message. Dask raises a second such error with a message of its own.
    name : str
        The name of the cluster.
    known : tuple of str
        The names of the existing clusters.
    """

    def __init__(self, message: str, name: str = "", known: tuple[str, ...] = ()) -> None:
        super().__init__(name, known)
        self.args = (message,)


class ClusterEnded(ImportError):
    """The cluster of a client that connects again has ended.

    After errors of a connection, Dask's client tries again until its long time-out, and after an ImportError
    it closes without words: Client._reconnect (client.py:1539).
    """


class CMLConnector(Connector):
    """Connects to the scheduler in a cluster's record, with the cluster's keys."""

    async def connect(self, address: str, deserialize: bool = True, **connection_args: Any) -> Comm:
        """Connect to a cluster. If it is starting, wait.

        Parameters
        ----------
        address : str
            The cluster's name, percent-encoded.
        deserialize : bool
            As in all connectors.
        **connection_args
            Used if the cluster has no keys.

        Raises
        ------
        NoSuchCluster
            If no cluster has this name, it has ended, or its creator ended before its scheduler answered.
        OSError
            If the scheduler cannot be reached, or the record cannot be read now.
        """
        record = await _running(unquote(address))
        scheduler = record.scheduler.address
        assert scheduler is not None
        security = record.get_security()
        if security is not None:
            connection_args |= await _in_thread(protocol.connection_args, security, scheduler)
        scheme, location = parse_address(scheduler)
        why = record.out_of_reach
        connector = compat.LimitedConnector(get_backend(scheme).get_connector(), why)
        unreachable = f"cannot reach the scheduler of cluster {record.name!r} at {scheduler}"
        try:
            comm = await connector.connect(location, deserialize=deserialize, **connection_args)
            _prepare_clients(address, record, security, connection_args)
            return comm
        except FatalCommClosedError:
            raise
        except (OSError, ValueError) as error:  # tornado's, if it closes before TLS begins
            await _warn_of_end(record)
            raise OSError("; ".join(filter(None, (f"{unreachable}: {error}", why)))) from error
        except asyncio.CancelledError as error:  # perhaps by Dask's time limit, whose error does not say why
            if why is not None:
                error.__cause__ = OSError(f"{unreachable}: {why}")
                output.warn_once(logger, record.id, str(error.__cause__))
            raise


async def _warn_of_end(record: Record) -> None:
    """Log once that the cluster of a scheduler that was not reached has ended. Dask's error does not say so.

    A notebook may still replace the scheduler, so Dask tries again.
    """
    finding = await _in_thread(store.seen, record, await store.listed([record]))
    if finding.state is store.State.DEAD:
        text = f"Cluster {record.name} not connected: {finding.why}; run {command('delete', record.name)}"
        output.warn_once(logger, f"{record.id} {record.scheduler.address}", text)


async def _in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that reads files in a thread.

    Raises
    ------
    OSError
        If the interpreter exits. After any other error, Dask's client would not end its attempts to connect
        (client.py:1531), and would delay the exit by its long time-out.
    """
    try:
        return await asyncio.to_thread(function, *arguments)
    except errors.CMLError:
        raise
    except RuntimeError as error:
        raise OSError(f"not connected: {error}") from error


def _log_end(client: Client, name: str, why: str) -> None:
    """Log why the cluster of a client has ended. A client of a cluster object leaves it to that object."""
    if client.cluster is None:
        logger.warning("Client disconnected from cluster %s, which has ended: %s", name, why)


def _prepare_clients(
    address: str, record: Record, security: Security | None, connection_args: dict[str, Any]
) -> None:
    """Give this process's clients of an address the keys for workers, and let them hear of the cluster.

    Dask registers a client after its first connection. So search for it repeatedly for some seconds.
    """
    _records[address] = record
    prepared: set[str] = set()

    def search(pause: float) -> None:
        if _records[address] is not record:  # a later connection has its own search
            return
        for client in _clients(address):
            if security is not None and not client.connection_args.get("ssl_context"):
                compat.give_keys(client, security, connection_args)
            if client.id not in prepared and client.status == "running":
                prepared.add(client.id)
                _close_at_end(client, record.name)
                _log_lines(client, record)
        if pause <= _LAST_PAUSE:
            asyncio.get_running_loop().call_later(pause, search, 2 * pause)

    search(_FIRST_PAUSE)


def _close_at_end(client: Client, name: str) -> None:
    """Close a client when its scheduler says that the cluster ends. It would try to connect again."""

    async def close(event: tuple[float, Mapping[str, Any]]) -> None:
        _, message = event
        why = str(message.get("reason"))
        _log_end(client, name, why)
        _cancel_futures(client, f"cluster {name} has ended: {why}")
        await client._close()

    client.subscribe_topic(END, close)


def _log_lines(client: Client, record: Record) -> None:
    """Log in a client's process what the keeper, such as the Jupyter server, tells its own user."""
    scheduler = str(record.scheduler.address)
    output.follow_cells()

    def log(event: tuple[float, Mapping[str, Any]]) -> None:
        logged_at, message = event
        if logged_at <= _last_lines.get(scheduler, 0.0):  # to another client of this process
            return
        _last_lines[scheduler] = logged_at
        objects = [cluster for cluster in unclosed() if cluster.options.name == record.name]
        # An object of the cluster says it itself, or is to be quiet. In a session of the cluster is no user.
        is_told = any(cluster.sharing.is_keeper or cluster.quiet for cluster in objects)
        if not (is_told or here.is_inside(record.id)):
            logger.warning("%s", message.get("text"))

    client.subscribe_topic(LINES, log)


def _cancel_futures(client: Client, why: str) -> None:
    """Cancel all futures of a client with a reason, as Client._reconnect (client.py:1518) does."""
    reason = {"reason": why} if _CANCELS_WITH_REASON else {}
    for future in [*client.futures.values()]:
        future.cancel(**reason)
    client.futures.clear()


async def _ensure_connected(client: Client, timeout: float | None = None) -> None:
    """Connect a client. If it was connected before, wait longer for its cluster's next scheduler.

    If the cluster has ended meanwhile, let the client close.

    Client._reconnect (client.py:1529) has the time limit of the client, which is also that of scatter(),
    close() and restart().
    """
    # Client._handle_report_task (client.py:1508) is there after the first connection.
    has_begun, address = client._handle_report_task is not None, str(getattr(client.scheduler, "address", ""))
    if not (has_begun and address.startswith(f"{SCHEME}://")):
        await _dask_ensure_connected(client, timeout)
        return
    location, number, patience, deadline = address.partition("://")[2], None, 0.0, math.inf
    name = unquote(location)
    while client.status == "connecting":  # it may be closed meanwhile
        record = await _in_thread(store.find, name)
        if number is None or (record is not None and record.scheduler.number > number):
            # The next one has the whole time again, as for the processes that launch it.
            number = -1 if record is None else record.scheduler.number
            start = 0.0 if record is None else record.start_timeout
            patience = max(client._timeout, RECONNECT_TIMEOUT + start)
            deadline = time.monotonic() + patience
        time_left = deadline - time.monotonic()
        if time_left <= 0:
            compat.name_time_limit(client, patience)
            raise OSError(f"no other scheduler at {address} within {patience:g} s")
        try:
            await _dask_ensure_connected(client, min(time_left, RECONNECT_TIMEOUT))
            return
        except NoSuchCluster as error:
            ended = await _in_thread(find_ended, _records[location].id)
            _log_end(client, name, str(error) if ended is None else ended.why)
            raise ClusterEnded(str(error)) from error
        except (OSError, asyncio.TimeoutError):
            await asyncio.sleep(_RETRY)


_dask_ensure_connected = compat.connect_clients_by(_ensure_connected)


def _clients(address: str) -> list[Client]:
    """Return the clients of this process whose scheduler has this address."""
    url = f"{SCHEME}://{address}"
    clients = [*Client._instances]  # client.py:1067
    return [client for client in clients if getattr(client.scheduler, "address", None) == url]


async def _running(name: str) -> Record:
    """Return the record of a cluster. Wait until it contains the scheduler's address."""
    while True:
        try:
            record = await _in_thread(store.read, name)
        except errors.NoSuchCluster as error:
            text = f"{error}; searched in {state_directory()}"
            raise NoSuchCluster(text, error.name, error.known) from None
        except store.RecordUnreadable as error:  # which ends no cluster, so Dask tries again
            output.warn_once(logger, str(error), f"Cluster {name} not connected: {error}")
            raise
        if record.scheduler.closed is not None:
            raise NoSuchCluster(f"cluster {name!r} has ended: {record.scheduler.closed}", name)
        if record.scheduler.address is not None:
            return record
        why = await _in_thread(store.why_ended, record)
        if why is not None:
            raise NoSuchCluster(f"cluster {name!r} has ended: {why}; run {command('delete', name)}", name)
        state = "launching another scheduler" if record.scheduler.number else "starting"
        text = f"Cluster {name} is {state}: its scheduler has no address yet"
        # Dask's error does not say why.
        output.warn_once(logger, f"{record.id} {record.scheduler.number}", text)
        await asyncio.sleep(_POLL_INTERVAL)


class CMLBackend(Backend):
    """The comm backend for addresses ``cml://<name>``. Dask creates it at the first such address."""

    def __init__(self) -> None:
        compat.find_keys_by_address()

    def get_connector(self) -> CMLConnector:
        """Return a new connector."""
        return CMLConnector()

    def get_listener(self, loc: str, *_: Any, **connection_args: Any) -> Any:
        """Refuse to listen: these addresses are for clients."""
        raise ValueError(f"invalid address {SCHEME}://{loc} to listen at: expected tcp:// or tls://")

    def get_address_host(self, loc: str) -> str:
        """Return the host of the last connection. Before the first connection, return the name."""
        # XGBoost asks for the host, for connections of its own.
        record = _records.get(loc)
        return loc if record is None else get_address_host(str(record.scheduler.address))

    def resolve_address(self, loc: str) -> str:
        """Return the name, because each connection reads the scheduler's address again."""
        return loc

    def get_local_address_for(self, loc: str) -> str:
        """Refuse to listen, like `get_listener`."""
        return self.get_listener(loc)


def _dashboard_link(client: Client) -> str | None:
    """Return the link to the dashboard of a client's cluster."""
    scheme, _, location = str(getattr(client.scheduler, "address", "")).partition("://")
    if client.cluster is None and scheme == SCHEME:
        record = store.find(unquote(location))  # its URL may be known later than its address
        return None if record is None else record.dashboard_link
    link: str | None = _dask_link(client)
    return link


_dask_link = compat.link_dashboards_by(_dashboard_link)


def load_security(info: dict[str, Any]) -> Security | None:
    """Return the keys of a cluster by its address, for ``distributed.client.security-loader``.

    Parameters
    ----------
    info : dict
        Dask's information on the client, with its ``"address"``.

    Returns
    -------
    Security or None
        None if no cluster of the project has this address and keys.
    """
    scheme, location = parse_address(info["address"])
    if scheme not in ("tls", SCHEME):  # other addresses need no keys, so read no records
        return None
    try:
        if scheme == SCHEME:
            records = [store.find(unquote(location))]  # without a record, connecting raises the error
        else:
            records = [one for one in store.records() if one.scheduler.address == info["address"]]
    except (OSError, ValueError, TypeError) as error:
        logger.warning("Keys for %s not found: %s", info["address"], error)
        return None
    # Another cluster may have had the address before. A cluster's keys are written before its address.
    with_keys = [record for record in records if record and record.security and record.scheduler.address]
    return max(with_keys, key=lambda record: record.created).get_security() if with_keys else None
