"""The state that the managers of one cluster share, in its scheduler.

Dask's scheduler sends changes of its workers to one manager only, and managers do not know each other's
targets. So one of them leads: only the leader launches and stops sessions. For each worker group, it uses
the number that was requested last, from any manager. The others follow. A manager that is asked to scale
becomes the leader. If the leader disconnects, the next manager that sends a heartbeat takes over. The limits
of adaptive scaling are kept when their manager disconnects, so that another one can continue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dask_cml.scheduler import messages


@dataclass
class SharedState:
    """The state of one cluster that its managers share.

    Parameters
    ----------
    is_here : callable
        Returns whether the manager with an id is connected.
    """

    is_here: Callable[[str], bool]
    leader: str | None = None
    asked: dict[str, str] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)
    adapts: dict[str, Mapping[str, float]] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)

    def sync(
        self,
        manager: str,
        wanted: Mapping[str, int | None] | None = None,
        launched: Mapping[str, str] | None = None,
        gone: Sequence[str] = (),
        owners: Mapping[str, str] | None = None,
        adapts: Mapping[str, Mapping[str, float]] | None = None,
    ) -> dict[str, Any]:
        """Take a manager's changes, and return the current state.

        Parameters
        ----------
        manager : str
            The manager's id.
        wanted : mapping of str to int, optional
            For worker groups that this manager was asked to scale, the number of sessions. The manager leads
            from now on. None: the group was removed.
        launched : mapping of str to str, optional
            For the name of each worker that it launched, the id of its session.
        gone : sequence of str
            The names of workers whose sessions it has stopped.
        owners : mapping of str to str, optional
            For the name of each worker that it launched, the owner of its session.
        adapts : mapping of str to mapping, optional
            The ``minimum`` and ``maximum`` of the groups in `wanted` that it scales adaptively.

        Returns
        -------
        dict
            The current ``leader``, ``wanted``, ``sessions`` and ``owners``. ``asked`` contains for each
            group the manager that was asked last to scale it; the leader may have changed since then.
            ``adapts`` contains the limits of each adaptive group, with ``attended``: whether the manager
            that scales it is connected.

        Raises
        ------
        ValueError
            If the message is invalid, or its manager is not connected. Nothing changes then.
        """
        messages.check_manager(manager)
        messages.check_launched(launched or {})
        messages.check_owners(owners or {})
        messages.check_names("gone", gone)
        messages.check_wanted(wanted or {})
        messages.check_adapts(adapts or {})
        if not self.is_here(manager):
            raise ValueError(f"invalid manager={manager!r}: expected a manager that sends heartbeats")
        self.sessions.update(launched or {})
        self.owners.update(owners or {})
        for name in gone:
            self.sessions.pop(name, None)
            self.owners.pop(name, None)
        if wanted:
            self.leader = manager
            for group, n in wanted.items():
                self.adapts.pop(group, None)
                if n is None:
                    self.wanted.pop(group, None)
                    self.asked.pop(group, None)
                else:
                    self.wanted[group], self.asked[group] = n, manager
                    if limits := (adapts or {}).get(group):
                        self.adapts[group] = limits
        elif self.leader is None or not self.is_here(self.leader):
            self.leader = manager
        return {
            "leader": self.leader,
            "asked": dict(self.asked),
            "wanted": dict(self.wanted),
            "sessions": dict(self.sessions),
            "owners": dict(self.owners),
            "adapts": {
                group: {**limits, "attended": self.is_here(self.asked[group])}
                for group, limits in self.adapts.items()
            },
        }
