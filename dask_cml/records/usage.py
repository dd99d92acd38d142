"""The usage of a cluster so far: hours of sessions, by worker group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from dask_cml.layout import SCHEDULER
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.options import SessionSize, setting
from dask_cml.records.record import Record
from dask_cml.sessions.entry import Launch
from dask_cml.words import table

_UNKNOWN = SessionSize(0, 0)
#: As seconds since 1970, the bound is in the year 6325.
_BOUNDS = Meta(ge=0, lt=2**37)
_Count = Annotated[int, _BOUNDS]
#: An amount or a time that another process has written.
Amount = _Count | Annotated[float, _BOUNDS]


@dataclass(frozen=True)
class SessionHours:
    """The usage of some sessions so far.

    Parameters
    ----------
    sessions : int
        Number of sessions, including ended ones.
    hours : float
        Sum of their durations, in hours.
    vcpu_hours : float
        Sum of their durations times their virtual CPUs, in hours.
    gib_hours : float
        Sum of their durations times their memory, in GiB hours.
    gpu_hours : float
        Sum of their durations times their numbers of GPUs, in hours.
    lost : dict of str to int
        Number of sessions that were lost, by cause.
    """

    sessions: _Count = 0
    hours: Amount = 0.0
    vcpu_hours: Amount = 0.0
    gib_hours: Amount = 0.0
    gpu_hours: Amount = 0.0
    lost: Mapping[str, _Count] = field(default_factory=dict)

    @property
    def cost(self) -> float | None:
        """The cost by the prices of the site, ``cml.prices``. None if the site has set none."""
        amounts = {"cpu": self.vcpu_hours, "memory": self.gib_hours, "gpu": self.gpu_hours}
        prices = {name: setting(f"prices.{name}") for name in amounts}
        costs = [price * amounts[name] for name, price in prices.items() if price is not None]
        return sum(costs) if costs else None

    def to_json(self) -> dict[str, Any]:
        """Return it with its cost, for JSON."""
        return {**vars(self), "cost": self.cost}

    def __add__(self, other: SessionHours) -> SessionHours:
        sums = {name: value + getattr(other, name) for name, value in vars(self).items() if name != "lost"}
        return SessionHours(**sums, lost=dict(Counter(self.lost) + Counter(other.lost)))


def _lost(used: SessionHours) -> str:
    return ", ".join(f"{n} {cause}" for cause, n in sorted(used.lost.items())) or "-"


#: The columns of a table of usages, and their cells.
_COLUMNS: dict[str, Callable[[SessionHours], str]] = {
    "sessions": lambda used: str(used.sessions),
    "hours": lambda used: f"{used.hours:.2f}",
    "vCPU hours": lambda used: f"{used.vcpu_hours:.2f}",
    "GiB hours": lambda used: f"{used.gib_hours:.2f}",
    "GPU hours": lambda used: f"{used.gpu_hours:.2f}",
    "cost": lambda used: f"{used.cost:.2f}",
    "lost": _lost,
}


class Usage(dict[str, SessionHours]):
    """The usage of a cluster so far: the hours of each worker group, and of ``"scheduler"``.

    Its ``repr`` is a table, with costs if the site has set prices.

    Examples
    --------
    >>> usage = Usage(scheduler=SessionHours(1, 2, 2, 4), default=SessionHours(3, 4.5, 18, 72))
    >>> usage["default"].vcpu_hours
    18
    >>> usage
    group      sessions  hours  vCPU hours  GiB hours  GPU hours
    scheduler         1   2.00        2.00       4.00       0.00
    default           3   4.50       18.00      72.00       0.00
    total             4   6.50       20.00      76.00       0.00
    """

    def to_json(self) -> dict[str, Any]:
        """Return the hours and costs of each group, and in total, for JSON."""
        groups = {group: used.to_json() for group, used in self.items()}
        return {"groups": groups, "total": self.total.to_json()}

    @property
    def total(self) -> SessionHours:
        """The sum of all groups and the scheduler."""
        return sum(self.values(), SessionHours())

    def __repr__(self) -> str:
        columns = {**_COLUMNS}
        if self.total.cost is None:
            del columns["cost"]
        if not self.total.lost:
            del columns["lost"]
        rows = [("group", *columns)]
        for name, used in [*self.items(), ("total", self.total)]:
            rows.append((name, *(cell(used) for cell in columns.values())))
        return "\n".join(table(rows, str.rjust))


def usage_of(record: Record, now: float) -> Usage:
    """Return the usage of a cluster.

    A session counts from when its program starts until it was stopped or found to have ended. If the record
    still lists it, it counts until now.

    Parameters
    ----------
    record : Record
        The cluster's record, with its ended sessions.
    now : float
        The current time, in seconds since 1970.
    """
    launches: dict[str, list[Launch]] = {}
    for launch in {**record.launches, **record.ended}.values():
        group = SCHEDULER if launch.key == SCHEDULER else launch.worker_group(record.name)
        launches.setdefault(group, []).append(launch)
    used = {group: _sum(of_group, now) for group, of_group in launches.items()}
    order = sorted(used, key=lambda group: (group != SCHEDULER, group != DEFAULT_GROUP, group))
    return Usage({group: used[group] for group in order})


def _sum(launches: list[Launch], now: float) -> SessionHours:
    used = [(max(0.0, launch.seconds(now)) / 3600, launch.size or _UNKNOWN) for launch in launches]
    return SessionHours(
        len(used),
        sum(hours for hours, _ in used),
        sum(hours * size.cpu for hours, size in used),
        sum(hours * size.memory for hours, size in used),
        sum(hours * size.nvidia_gpu for hours, size in used),
        dict(Counter(launch.cause for launch in launches if launch.cause)),
    )
