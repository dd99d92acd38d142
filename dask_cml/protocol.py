"""The protocol of the scheduler's plugin: its version, its handlers, what users ask for, and how to call one.

A call has a time limit that covers the connection and Dask's handshake, too. Dask's own handshake has none:
behind a mesh of the platform, every connection succeeds, and nothing answers.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from distributed.comm.core import Comm, connect
from distributed.core import send_recv

from dask_cml.cancellation import within
from dask_cml.checks import choice, message
from dask_cml.errors import CMLError
from dask_cml.naming import DEFAULT_GROUP

#: Watchers and plugins of another version leave each other alone.
PROTOCOL = 13

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
#: Asks one cluster's scheduler: a handler, a time limit if it is another one than usually, and its arguments.
Ask = Callable[..., Awaitable[Any]]


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
        The limits and options of adaptive scaling, see :attr:`dask_cml.core.adaptive.CMLAdaptive.limits`.
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
        choice("name", name, [group for group in groups if group != DEFAULT_GROUP])
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


async def ask(
    address: str, connection_args: Mapping[str, Any], op: str, timeout: float, /, **arguments: Any
) -> Any:
    """Call a handler of a scheduler over a connection of its own, and return its answer.

    Parameters
    ----------
    address : str
        The scheduler's address.
    connection_args : mapping
        The result of ``Security.get_connection_args("client")``.
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
        comm = await connect(address, timeout=timeout, **connection_args)
        try:
            return await call(comm, op, **arguments)
        finally:
            comm.abort()

    return await within(timeout, answer())


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
