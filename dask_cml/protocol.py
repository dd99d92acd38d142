"""The protocol of the scheduler's plugin: its version, its messages, and calls with the keys of a cluster.

The *board* in the plugin is the mail and the last report. The keeper alone decides what is wanted. Whoever
else changes a cluster posts a request, which stays in the mail until a report says that it is carried out.

A call has a time limit that covers the connection and Dask's handshake, too. Dask's own handshake has none:
behind a mesh of the platform, every connection succeeds, and nothing answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from distributed.comm.addressing import parse_address
from distributed.comm.core import Comm, connect
from distributed.core import send_recv
from distributed.security import Security

from dask_cml.cancellation import files_in_time, within
from dask_cml.checks import choice, message, validate
from dask_cml.errors import CMLError
from dask_cml.naming import DEFAULT_GROUP

#: Watchers and plugins of another version leave each other alone.
PROTOCOL = 14

#: Asks which cluster a scheduler belongs to.
HELLO = "cml_hello"
#: Returns the board when it changes. The comm's end is the watcher's end.
WATCH = "cml_watch"
#: Posts what a user asks for, see :class:`Request`.
POST = "cml_post"
#: Lets the cluster run on without a user.
LIVE_ON = "cml_live_on"
#: Tells what the keeper says of the cluster.
REPORT = "cml_report"
#: Asks for the known work and the workers.
DEMAND = "cml_demand"
#: Asks when the scheduler heard of Dask workers last, and what they hold.
HELD = "cml_held"
#: Asks what was known last of Dask workers that have left.
LAST = "cml_last"
#: Asks which Dask workers have left for good: their nannies do not answer either.
ABANDONED = "cml_abandoned"
#: Tells the scheduler that the platform is about to stop the session of some Dask workers.
NOTICE = "cml_notice"
#: Asks for the dashboard. After the answer ``{"status": "OK"}``, the connection carries HTTP.
FORWARD = "cml_forward"
#: Those of the plugin itself. Its methods have these names without their first part.
HANDLERS = (HELLO, WATCH, POST, LIVE_ON, REPORT, DEMAND, NOTICE, FORWARD)

#: The topic of the event that a Dask worker's process has ended, and that its nanny starts it again.
EXITED = "cml-exited"
#: The topic of the cluster's events in ``Client.get_events``.
TOPIC = "cml"
#: The topic of the lines that the keeper tells its user, for clients in other processes.
LINES = "cml-lines"
#: The topic of the event that the cluster ends, with the reason: clients do not wait for another scheduler.
END = "cml-end"

#: Errors of a scheduler that does not answer.
NO_ANSWER = (OSError, asyncio.TimeoutError)
#: Schemes of addresses with encryption.
_ENCRYPTED = ("tls", "wss")


class Rank(enum.IntEnum):
    """Whether a watcher counts as a user, and may keep the cluster: the lower its rank, the rather."""

    #: A user's process in the session that owns the cluster's sessions. CML lists them to it.
    OWNER = 1
    #: The process in the scheduler's session.
    RESIDENT = 2
    #: Any other process of a user. It keeps the cluster only if the resident cannot launch.
    USER = 3
    #: A command of a user. It asks, and never keeps.
    COMMAND = 4
    #: What only shows clusters, or runs in the cluster's own sessions.
    OBSERVER = 5


#: The ranks of users.
USERS = (Rank.OWNER, Rank.USER, Rank.COMMAND)


@dataclass(frozen=True)
class Request:
    """What a user asks for of a cluster.

    Parameters
    ----------
    kind : str
        What to do.
    group : str
        The worker group.
    n : int
        Number of worker sessions, to scale a group or of a new one.
    limits : mapping or None
        The limits and options of adaptive scaling, see :attr:`dask_cml.core.groups.CMLAdaptive.limits`.
    options : mapping
        The options of a new group, as in ``CMLCluster.add_worker_group``.
    names : collection of str
        The workers to close without a replacement.
    """

    kind: Literal["scale", "resize", "adapt", "stop adapting", "add group", "delete group", "close"]
    group: str = DEFAULT_GROUP
    n: int = 0
    limits: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    names: Collection[str] = ()


@dataclass(frozen=True)
class WantedGroup:
    """What is wanted of a worker group.

    Parameters
    ----------
    options : mapping
        The group's own arguments, as in ``CMLCluster.add_worker_group``. Empty for the default group.
    target : int
        Number of requested worker sessions.
    adapt : mapping or None
        The limits and options of adaptive scaling. None: the group has a fixed size.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    target: int = 0
    adapt: Mapping[str, Any] | None = None


def after(groups: Mapping[str, WantedGroup], request: Request) -> dict[str, WantedGroup]:
    """Return what is wanted of the groups after a request.

    Raises
    ------
    ValueError
        If a group does not exist, or a new one exists already.
    """
    name = request.group
    if request.kind == "close":
        return {**groups}
    if request.kind == "add group":
        if name in groups:
            raise ValueError(message("name", name, "a name that no worker group of the cluster has"))
        return {**groups, name: WantedGroup(request.options, request.n)}
    if request.kind == "delete group":
        added = [group for group in groups if group != DEFAULT_GROUP]
        if name not in added:
            names = ", ".join(map(repr, added)) or "none"
            words = f"an added group ({names}); the default group cannot be deleted, scale it to 0"
            raise ValueError(message("name", name, words))
        return {other: group for other, group in groups.items() if other != name}
    known = groups[choice("worker_group", name, [*groups])]
    if request.kind == "scale":
        known = replace(known, target=request.n, adapt=None)
    elif request.kind == "resize":  # by hand, or by an Adaptive of another class: CMLAdaptive goes on
        known = known if known.adapt else replace(known, target=request.n)
    elif request.kind == "stop adapting":
        known = replace(known, adapt=None)
    else:
        limits = request.limits or {}
        # At once: the keeper adapts to the work later.
        target = min(max(known.target, limits["minimum"]), limits["maximum"])
        known = replace(known, target=target, adapt=limits)
    return {**groups, name: known}


@dataclass(frozen=True)
class View:
    """What is wrong with the sessions of a cluster, as its keeper knows it.

    Parameters
    ----------
    problem : str or None
        The present problem, as a clause.
    gave_up : mapping of str to str
        Why no more workers of some groups are launched, until a user scales them.
    shortages : mapping of str to str
        Why the platform has launched only some workers of some groups, since users scaled them last.
    staying : sequence of str
        Workers that cannot be stopped now, because no other worker can take their data.
    not_stopped : str or None
        Why the platform does not stop sessions, as a sentence.
    """

    problem: str | None = None
    gave_up: Mapping[str, str] = field(default_factory=dict)
    shortages: Mapping[str, str] = field(default_factory=dict)
    staying: Sequence[str] = ()
    not_stopped: str | None = None


@dataclass(frozen=True)
class Letter:
    """A request in the mail, which the scheduler keeps until a report says that it is carried out.

    Parameters
    ----------
    number : int
        Counts the requests of the cluster.
    request : Request
        The request.
    sender : str
        The id of the process whose user asks.
    asked : int
        Counts the requests of that process.
    """

    number: int
    request: Request
    sender: str = ""
    asked: int = 0


def after_mail(reported: Any, mail: Iterable[Letter]) -> dict[str, WantedGroup]:
    """Return the worker groups as they are after the mail is carried out.

    Parameters
    ----------
    reported : mapping of str to WantedGroup
        The groups in the last report of a keeper, also as JSON.
    mail : iterable of Letter
        What that keeper has not carried out.

    Raises
    ------
    ValueError
        If the groups are invalid.
    """
    groups = {DEFAULT_GROUP: WantedGroup(), **validate(reported, dict[str, WantedGroup], "worker groups")}
    for letter in mail:
        # The keeper has deleted its group meanwhile, or it is odd.
        with contextlib.suppress(ValueError, TypeError, LookupError):
            groups = after(groups, letter.request)
    return groups


@dataclass(frozen=True)
class Report(View):
    """What a keeper reports: what is wanted, the sessions, and what the next keeper has to know.

    Parameters
    ----------
    taken : int
        The number of the last request that is carried out.
    groups : mapping of str to WantedGroup
        The worker groups.
    wanted : mapping of str to str
        The groups of the wanted workers by their names.
    sessions : sequence of mapping
        The sessions, the scheduler's first, see ``Session.to_json``.
    failures : mapping of str to int
        The failures in a row of groups, after which the next keeper goes on.
    ceilings : mapping of str to int
        How many sessions of groups the platform had launched when it refused one last.
    told : sequence of str
        The subjects that are told, and still true.
    limited : sequence of str
        The groups that adapt to fewer sessions than they need, by the site's limits, as is told.
    start_times : mapping of str to float
        How long sessions of groups take to start, in seconds.
    is_barred : bool
        Whether the platform has refused all launches of this process, and not because of a quota.
    app_url : str or None
        The URL of the scheduler's session, for processes to which the platform does not list it.
    maker : mapping or None
        The process that reports, see :class:`dask_cml.records.store.Maker`.
    """

    taken: int = 0
    groups: Mapping[str, WantedGroup] = field(default_factory=dict)
    wanted: Mapping[str, str] = field(default_factory=dict)
    sessions: Sequence[Mapping[str, Any]] = ()
    failures: Mapping[str, int] = field(default_factory=dict)
    ceilings: Mapping[str, int] = field(default_factory=dict)
    told: Sequence[str] = ()
    limited: Sequence[str] = ()
    start_times: Mapping[str, float] = field(default_factory=dict)
    is_barred: bool = False
    app_url: str | None = None
    maker: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, content: Any) -> Report:
        """Return the report on a board.

        Raises
        ------
        ValueError
            If it is invalid.
        """
        return validate(content, cls, "report")

    def to_json(self) -> dict[str, Any]:
        """Return it for a message."""
        groups = {name: vars(group) for name, group in self.groups.items()}
        return {**vars(self), "groups": groups}  # asdict() copies all of thousands of sessions

    def since(self, mail: Sequence[Letter]) -> Report:
        """Return the report without what users have asked to change after it."""
        changed = {letter.request.group for letter in mail}
        gave_up = {group: why for group, why in self.gave_up.items() if group not in changed}
        shortages = {group: why for group, why in self.shortages.items() if group not in changed}
        return replace(self, gave_up=gave_up, shortages=shortages)


@dataclass(frozen=True)
class BoardState:
    """The board of a cluster, as a watcher knows it; see :class:`dask_cml.scheduler.plugin.Board`.

    Parameters
    ----------
    revision : int
        Counts the changes of the board.
    keeper : str or None
        The id of the process that keeps the cluster.
    term : int
        Counts the keepers of the cluster.
    mail : sequence of Letter
        What users have asked for, and no keeper has carried out yet.
    posted : int
        The number of the watcher's last request that was ever in the mail or in its own report.
    leaving : sequence of str
        Dask workers whose session the platform is about to stop.
    report : mapping
        What the keeper reports of the sessions, see :class:`Report`.
    moves : int
        Counts the Dask workers that have connected or left.
    problem : str or None
        What is wrong with the Dask workers, or why the scheduler's session does not manage the cluster.
    news : mapping of str to str
        What the keeper tells users of the Dask workers, as clauses by subjects.
    idle : float or None
        Time for which no task has waited or run, in seconds. None: some do, or did a moment ago.
    app_url : str or None
        The URL of the scheduler's session. None if another program answers there.
    serves_dashboard : bool
        Whether the scheduler's dashboard has the port to which that URL leads.
    closed : str or None
        Why the cluster has ended. None if it has not.
    age, most_age : int
        The cluster's age and its limit, in seconds. 0: no limit.
    """

    revision: int = 0
    keeper: str | None = None
    term: int = 0
    mail: Sequence[Letter] = ()
    posted: int = 0
    leaving: Sequence[str] = ()
    report: Mapping[str, Any] = field(default_factory=dict)
    moves: int = 0
    problem: str | None = None
    news: Mapping[str, str] = field(default_factory=dict)
    idle: float | None = None
    app_url: str | None = None
    serves_dashboard: bool = True
    closed: str | None = None
    age: int = 0
    most_age: int = 0


def connection_args(security: Security | None, address: str) -> dict[str, Any]:
    """Return the arguments for a connection to the scheduler at an address. Reads the key files.

    Raises
    ------
    OSError
        If the cluster has keys and the address is one without encryption. Dask itself refuses only ``tcp://``.
        Or if a key file is missing or not a regular file: reading a pipe would never end.
    """
    scheme, _ = parse_address(address)
    if security is not None and scheme not in _ENCRYPTED:
        raise OSError(f"invalid address {address} of a cluster with keys: expected tls://, which encrypts")
    security = security or Security()
    for name in ("tls_ca_file", "tls_client_cert", "tls_client_key"):
        key = getattr(security, name)
        if isinstance(key, str) and not os.path.isfile(key):
            raise FileNotFoundError(errno.ENOENT, "not a regular file", key)
    return security.get_connection_args("client")


async def ask_with_keys(
    address: str, security: Security | None, op: str, timeout: float, /, **arguments: Any
) -> Any:
    """Call a handler of the scheduler at an address with a cluster's keys, see :func:`ask`.

    Raises
    ------
    OSError, asyncio.TimeoutError
        If the scheduler does not answer, or :func:`connection_args` raises it.
    CMLError
        If the handler raises an exception.
    """
    keys = await files_in_time(connection_args, security, address)
    return await ask(address, keys, op, timeout, **arguments)


async def ask(
    address: str, connection_args: Mapping[str, Any], op: str, timeout: float, /, **arguments: Any
) -> Any:
    """Call a handler of a scheduler over a connection of its own, and return its answer.

    Parameters
    ----------
    address : str
        The scheduler's address.
    connection_args : mapping
        The result of :func:`connection_args`.
    op : str
        The handler's name.
    timeout : float
        Time limit for the connection, Dask's handshake and the answer together, in seconds.
    **arguments
        The handler's arguments.

    Raises
    ------
    OSError, asyncio.TimeoutError
        If the scheduler does not answer.
    CMLError
        If the handler raises an exception.
    """

    async def answer() -> Any:
        comm = await connect_to(address, connection_args, timeout)
        try:
            return await call(comm, op, **arguments)
        finally:
            comm.abort()

    return await within(timeout, answer())


async def connect_to(address: str, connection_args: Mapping[str, Any], timeout: float) -> Comm:
    """Connect to a scheduler.

    Raises
    ------
    OSError
        If it does not answer within `timeout` seconds.
    """
    try:
        return await connect(address, timeout=timeout, **connection_args)
    except ValueError as error:  # of tornado, if the connection closes before TLS begins
        raise OSError(f"{address} closes connections: {error}") from error


async def call(comm: Comm, op: str, **arguments: Any) -> Any:
    """Call a handler of a scheduler, and return its answer.

    Raises
    ------
    OSError
        If the connection breaks.
    CMLError
        If the handler refuses the arguments, or raises an exception.
    """
    try:
        answer = await send_recv(comm, op=op, **arguments)
    except (OSError, asyncio.TimeoutError):
        raise
    except Exception as error:  # of the handler
        raise CMLError(f"the scheduler failed at {op}: {error!r}") from error
    if isinstance(answer, dict) and "refused" in answer:  # an exception would be a pickle, and be logged
        raise CMLError(str(answer["refused"]))
    return answer
