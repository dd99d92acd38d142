"""The board of a cluster: the mail of its users, the last report of its keeper, and who keeps it.

The scheduler's plugin holds it. The keeper alone decides what is wanted. Whoever else changes a cluster posts
a request, which stays until a report says that it is carried out. There is no I/O and no clock in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from dask_cml.naming import DEFAULT_GROUP
from dask_cml.validation import validate

#: Maximum number of requests that no keeper has carried out, and of processes whose last one is remembered.
_MOST_LETTERS = _MOST_SENDERS = 1000


class Request(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True, omit_defaults=True):
    """What a user asks for of a cluster.

    Attributes
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

    kind: Literal["scale", "adapt", "stop adapting", "add group", "delete group", "close"]
    group: str = DEFAULT_GROUP
    n: int = 0
    limits: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = msgspec.field(default_factory=dict)
    names: Collection[str] = ()


@dataclass(frozen=True)
class Letter:
    """A request on the board.

    Parameters
    ----------
    number : int
        Counts the requests of the cluster.
    request : Request
        The request.
    """

    number: int
    request: Request


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
    name, known = request.group, groups.get(request.group)
    if request.kind == "close":
        return {**groups}
    if request.kind == "add group":
        if known is not None:
            raise ValueError(
                f"invalid name={name!r}: expected a name that no worker group of the cluster has"
            )
        return {**groups, name: WantedGroup(request.options, request.n)}
    if known is None:
        raise ValueError(f"invalid worker_group={name!r}: expected one of {', '.join(map(repr, groups))}")
    if request.kind == "delete group":
        if name == DEFAULT_GROUP:
            raise ValueError(f"invalid name={name!r}: expected a worker group other than {DEFAULT_GROUP!r}")
        return {other: group for other, group in groups.items() if other != name}
    if request.kind == "scale":
        known = replace(known, target=request.n, adapt=None)
    elif request.kind == "stop adapting":
        known = replace(known, adapt=None)
    else:
        limits = request.limits or {}
        # At once: the keeper adapts to the work later.
        target = min(max(known.target, limits["minimum"]), limits["maximum"])
        known = replace(known, target=target, adapt=limits)
    return {**groups, name: known}


class Board:
    """The board of one cluster.

    Parameters
    ----------
    report : mapping
        The last report of a keeper, see :class:`dask_cml.sharing.report.Report`.
    keeper : str, optional
        The id of the process that keeps the cluster at first.
    term : int
        Counts the keepers of the cluster.
    mail : iterable of mapping
        The requests that no keeper has carried out yet, see :class:`Letter`.
    posted : mapping of str to int
        The numbers of the last requests of processes, by their ids.

    Examples
    --------
    >>> board = Board({"groups": {"default": {"target": 2}}}, keeper="me")
    >>> board.post("you", 1, Request(kind="scale", n=3))
    >>> board.groups["default"].target
    3
    >>> board.take_report({"groups": {"default": {"target": 3}}, "taken": 1})
    >>> board.mail
    []
    """

    def __init__(
        self,
        report: Mapping[str, Any],
        keeper: str | None = None,
        term: int = 1,
        mail: Iterable[Mapping[str, Any]] = (),
        posted: Mapping[str, int] | None = None,
    ) -> None:
        self.keeper, self.term = keeper, term
        self.posted = dict(posted or {})
        self.mail = [validate(letter, Letter, "request on the board") for letter in mail]
        self.take_report(report)

    @property
    def groups(self) -> dict[str, WantedGroup]:
        """The worker groups as they are after the mail is carried out."""
        reported = validate(self.report.get("groups", {}), dict[str, WantedGroup], "groups of a report")
        groups = {DEFAULT_GROUP: WantedGroup(), **reported}
        for letter in self.mail:
            with contextlib.suppress(ValueError):  # the keeper has deleted its group meanwhile
                groups = after(groups, letter.request)
        return groups

    def to_json(self) -> dict[str, Any]:
        """Return the whole board, for JSON and for messages."""
        return {
            "keeper": self.keeper,
            "term": self.term,
            "groups": {name: vars(group) for name, group in self.groups.items()},
            "mail": msgspec.to_builtins(self.mail),
            "report": dict(self.report),
        }

    def post(self, sender: str, number: int, request: Request) -> None:
        """Add a request to the mail. One that a process repeats changes nothing.

        Parameters
        ----------
        sender : str
            The id of the process whose user asks.
        number : int
            Counts the requests of that process.
        request : Request
            The request.

        Raises
        ------
        ValueError
            If it cannot be carried out, or the mail is full.
        """
        if number <= self.posted.get(sender, 0):
            return
        if len(self.mail) >= _MOST_LETTERS:
            raise ValueError(
                f"no process manages the cluster: {len(self.mail)} requests wait to be carried out"
            )
        after(self.groups, request)
        last = self.mail[-1].number if self.mail else self.report.get("taken", 0)
        self.mail.append(Letter(last + 1, request))
        self.note_posted(sender, number)

    def note_posted(self, sender: str, number: int) -> None:
        """Note the number of the last request of a process that is in the mail or in its own report."""
        self.posted[sender] = max(number, self.posted.pop(sender, 0))
        if len(self.posted) > _MOST_SENDERS:
            del self.posted[next(iter(self.posted))]

    def keep(self, keeper: str | None) -> None:
        """Let a process keep the cluster, or nobody, in a new term."""
        self.keeper, self.term = keeper, self.term + 1

    def take_report(self, report: Mapping[str, Any]) -> None:
        """Take what the keeper says, and drop the requests that it has carried out."""
        self.report = report
        self.mail = [letter for letter in self.mail if letter.number > report.get("taken", 0)]
