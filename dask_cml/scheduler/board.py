"""The board of a cluster: what is wanted of its workers, who keeps it, and what its keeper reports.

The scheduler's plugin holds it. Whoever changes a cluster writes on the board, and whoever watches a cluster
reads the whole board. There is no I/O and no clock in it: the order of the calls alone decides, and the last
call wins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from dask_cml.naming import DEFAULT_GROUP
from dask_cml.scheduler.messages import Count, Group, Number, Options, Seconds, Text


class Limits(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The limits and options of a worker group's adaptive scaling."""

    minimum: Count
    maximum: Count
    interval: Seconds
    wait_count: Number
    target_duration: Seconds


class GroupChange(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What to change of a worker group. Fields that are not set stay as they are.

    Attributes
    ----------
    target : int
        Number of requested worker sessions.
    adapt : Limits or None
        The limits of adaptive scaling. None: the group does not adapt.
    options : mapping
        The options of a new group.
    own : mapping
        Workers to add, with the options that differ from the group's, by their names. With `request`: all
        workers with options of their own.
    request : int
        Change the group only if users have asked for as many changes so far.
    """

    target: Count | UnsetType = UNSET
    adapt: Limits | UnsetType | None = UNSET
    options: Options | UnsetType = UNSET
    own: Mapping[Text, Options] | UnsetType = UNSET
    request: Number | UnsetType = UNSET


#: Maximum number of processes whose last change is remembered.
_MOST_WRITERS = 1000

#: The most bytes of all groups, as JSON. The rest of the scheduler's file is for what becomes of them, see
#: dask_cml.private_files.MOST_BYTES.
_MOST_BYTES = 500_000

#: Changes of groups by their names. None: delete the group.
GroupChanges = Mapping[Group, GroupChange | None]


def are_equal(own: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether options are equal. Messages make tuples of lists, and the scheduler's file lists."""
    return json.dumps(own, sort_keys=True) == json.dumps(other, sort_keys=True)


@dataclass
class BoardGroup:
    """A worker group on the board.

    Parameters
    ----------
    options : mapping
        The group's own arguments, as in ``CMLCluster.add_worker_group``. Empty for the default group.
    target : int
        Number of requested worker sessions.
    adapt : mapping or None
        The :class:`Limits` of adaptive scaling. None: the group has a fixed size.
    request : int
        How many changes users have asked for.
    created : int
        The revision of the board at which it was added. A group that is deleted and added again has another.
    writer : str
        The id of the process whose user has asked for the last change. Empty: none has.
    number : int
        The number of that change in its process.
    own : mapping
        The options of workers that differ from the group's, by their names.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    target: int = 0
    adapt: Mapping[str, Any] | None = None
    request: int = 0
    created: int = 0
    writer: str = ""
    number: int = 0
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Board:
    """The board of one cluster.

    Parameters
    ----------
    groups : mapping of str to mapping
        The worker groups, see :class:`BoardGroup`.
    keeper : str, optional
        The id of the process that keeps the cluster at first.
    writers : mapping of str to int, optional
        The numbers of the last changes of processes, by their ids, from the last scheduler.

    Attributes
    ----------
    revision : int
        Counts the changes.
    writers : dict of str to int
        The numbers of the last changes of processes, by their ids.
    last_keeper : str or None
        The id of the process that keeps the cluster, or has kept it last.
    closing : list of str
        The names of workers that users have asked to close, until the keeper has done so.
    report : mapping
        What the keeper says of the sessions.

    Examples
    --------
    >>> board = Board({"default": {"target": 2}}, keeper="me")
    >>> board.change({"default": GroupChange(target=3)})
    >>> board.to_json()["groups"]["default"]["target"]
    3
    """

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, Any]],
        keeper: str | None = None,
        writers: Mapping[str, int] | None = None,
    ) -> None:
        self.groups = {name: BoardGroup(**group) for name, group in groups.items()}
        self.groups.setdefault(DEFAULT_GROUP, BoardGroup())
        self.revision = 1 + max(group.created for group in self.groups.values())
        self.keeper = self.last_keeper = keeper
        self.writers: dict[str, int] = dict(writers or {})
        self.closing: list[str] = []
        self.report: Mapping[str, Any] = {}

    def to_json(self) -> dict[str, Any]:
        """Return the whole board, for JSON and for messages."""
        return {
            "revision": self.revision,
            "keeper": self.keeper,
            "last_keeper": self.last_keeper,
            "groups": self.groups_to_json(),
            "closing": [*self.closing],
            "report": dict(self.report),
        }

    def groups_to_json(self) -> dict[str, dict[str, Any]]:
        """Return the groups, with which another scheduler can begin."""
        return {name: asdict(group) for name, group in self.groups.items()}

    def touch(self) -> None:
        """Record a change."""
        self.revision += 1

    def has(self, writer: str, number: int) -> bool:
        """Return whether a process has written this change before."""
        return number <= self.writers.get(writer, 0)

    def note(self, writer: str, number: int) -> None:
        """Remember the last change of a process. A process writes its changes in their order."""
        self.writers.pop(writer, None)
        self.writers[writer] = number
        if len(self.writers) > _MOST_WRITERS:
            del self.writers[next(iter(self.writers))]

    def change(self, groups: GroupChanges, writer: str = "", number: int = 0) -> None:
        """Change worker groups. If one change is invalid, change nothing.

        Parameters
        ----------
        groups : mapping
            The changes.
        writer : str
            The id of the process whose user asks for them.
        number : int
            The number of the change in that process.

        Raises
        ------
        ValueError
            If a group does not exist, or a new one exists already.
        """
        for name, change in groups.items():
            self._check(name, change)
        for name, change in groups.items():
            if change is None:
                del self.groups[name]
            else:
                self._change(name, change)
                if change.request is UNSET:
                    self.groups[name].writer, self.groups[name].number = writer, number
        self.touch()

    def _check(self, name: str, change: GroupChange | None) -> None:
        is_new = change is not None and change.options is not UNSET
        if is_new and name in self.groups:
            raise ValueError(
                f"invalid name={name!r}: expected a name that no worker group of the cluster has"
            )
        if is_new:
            self._check_size(name, change)
        if not is_new and name not in self.groups:
            known = ", ".join(map(repr, self.groups))
            raise ValueError(f"invalid worker_group={name!r}: expected one of {known}")
        if change is None and name == DEFAULT_GROUP:
            raise ValueError(f"invalid name={name!r}: expected a worker group other than {DEFAULT_GROUP!r}")
        if change is not None and change.own is not UNSET and change.request is UNSET and not is_new:
            known_workers = self.groups[name].own
            for worker, options in change.own.items():
                if not are_equal(known_workers.get(worker, options), options):
                    raise ValueError(
                        f"invalid worker name {worker!r}: expected a name that no worker of the cluster has"
                    )

    def _check_size(self, name: str, change: GroupChange | None) -> None:
        """Refuse a group with which the scheduler's file could not be read: it holds all groups."""
        sizes = [len(json.dumps(options)) for options in (self.groups_to_json(), msgspec.to_builtins(change))]
        if sum(sizes) > _MOST_BYTES:
            raise ValueError(
                f"invalid options of worker group {name!r} with {sizes[1]} bytes: expected at most "
                f"{max(0, _MOST_BYTES - sizes[0])} bytes, because all groups of a cluster have {_MOST_BYTES}"
            )

    def _change(self, name: str, change: GroupChange) -> None:
        group = self.groups.setdefault(name, BoardGroup(created=self.revision))
        if change.request is UNSET:  # a user has asked
            group.request += 1
        elif change.request != group.request:
            return
        if change.options is not UNSET:
            group.options = dict(change.options)
        if change.target is not UNSET:
            group.target = change.target
        if change.own is not UNSET:
            group.own = {**(group.own if change.request is UNSET else {}), **change.own}
        if change.adapt is not UNSET:
            group.adapt = None if change.adapt is None else msgspec.structs.asdict(change.adapt)
        if group.adapt is not None and change.request is UNSET:
            # At once: the keeper adapts to the work later.
            group.target = min(max(group.target, group.adapt["minimum"]), group.adapt["maximum"])

    def close_workers(self, names: Iterable[str]) -> None:
        """Ask the keeper to close workers without a replacement."""
        new = [name for name in names if name not in self.closing]
        if new:
            self.closing += new
            self.touch()

    def keep(self, keeper: str | None) -> None:
        """Give the lease to a keeper, or to nobody."""
        if keeper != self.keeper:
            self.keeper, self.last_keeper = keeper, keeper or self.last_keeper
            self.touch()

    def take_report(self, report: Mapping[str, Any], closed: Iterable[str]) -> None:
        """Take what the keeper says of the sessions, and the workers whose closing it has taken over."""
        closed = {*closed} & {*self.closing}
        if report != self.report or closed:
            self.report = report
            self.closing = [name for name in self.closing if name not in closed]
            self.touch()
