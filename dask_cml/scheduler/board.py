"""The board of a cluster: the mail of its users, the last report of its keeper, and who keeps it.

The scheduler's plugin holds it. The keeper alone decides what is wanted. Whoever else changes a cluster posts
a request, which stays until a report says that it is carried out. There is no I/O and no clock in it. All
that travels over it is here, too: letters, reports, and the board as its watchers get it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dask_cml.naming import DEFAULT_GROUP
from dask_cml.protocol import Request, View, WantedGroup, after
from dask_cml.validation import validate

#: Maximum number of requests that no keeper has carried out, and of processes whose last one is remembered.
_MOST_LETTERS = _MOST_SENDERS = 1000


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
    """

    number: int
    request: Request
    sender: str = ""


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
        The sessions, the scheduler's first, see :meth:`Session.to_json`.
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
    """The board of a cluster, as a watcher knows it; see :class:`Board`.

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


class Board:
    """The board of one cluster.

    Parameters
    ----------
    report : mapping
        The last report of a keeper, see :class:`Report`.
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
        return after_mail(self.report.get("groups", {}), self.mail)

    def to_json(self) -> dict[str, Any]:
        """Return the whole board, for JSON and for messages."""
        return {
            "keeper": self.keeper,
            "term": self.term,
            "mail": [asdict(letter) for letter in self.mail],
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
        self.mail.append(Letter(last + 1, request, sender))
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
