"""What clusters use, how they end, and their history: a small file and the logs remain of a cluster.

The file, and the folder with the logs, are named after the id of the cluster's record. The process that
removes the record writes them first. No process changes them.

Functions block while they wait for the file system.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast

from msgspec import Meta

from dask_cml.cancellation import block_within
from dask_cml.checks import validate
from dask_cml.errors import CallFailed, CMLError, NoAnswer, NoSuchCluster
from dask_cml.layout import HISTORY_FOLDER, SCHEDULER, log_folder
from dask_cml.naming import DEFAULT_GROUP
from dask_cml.options import SessionSize, setting, state_directory
from dask_cml.output import get_logger
from dask_cml.private_files import make_folder, open_regular, read_file, report_ignored, write_file
from dask_cml.records import store
from dask_cml.records.store import Record, end_file
from dask_cml.sessions.entry import Launch
from dask_cml.sessions.session_logs import SessionLogs
from dask_cml.sessions.workers_api import WorkersAPI
from dask_cml.timing import timing
from dask_cml.words import command, first_line, printable, table

logger = get_logger(__name__)

_SUFFIX = ".json"
#: Maximum number of bytes of one log, and of workers whose logs are kept.
_MOST_OF_A_LOG, _MOST_LOGS = 2**20, 100
#: The reason if no process has seen the end.
UNSEEN = "its scheduler's session ended"

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


#: The columns of a table of usages, and their cells.
_COLUMNS: dict[str, Callable[[SessionHours], str]] = {
    "sessions": lambda used: str(used.sessions),
    "hours": lambda used: f"{used.hours:.2f}",
    "vCPU hours": lambda used: f"{used.vcpu_hours:.2f}",
    "GiB hours": lambda used: f"{used.gib_hours:.2f}",
    "GPU hours": lambda used: f"{used.gpu_hours:.2f}",
    "cost": lambda used: f"{used.cost:.2f}",
    "lost": lambda used: ", ".join(f"{n} {cause}" for cause, n in sorted(used.lost.items())) or "-",
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


class _Written(TypedDict):
    groups: dict[str, SessionHours]


@dataclass(frozen=True)
class EndedCluster:
    """A cluster that has ended.

    Parameters
    ----------
    name, id : str
        The cluster's name, and the id of its record.
    user, session : str or None
        The user and the session that created it.
    created, ended : float
        When it was created and when it ended, in seconds since 1970.
    why : str
        Why it ended.
    usage : Usage
        The hours of its sessions.
    tasks_done, tasks_failed : float
        Number of tasks that it has completed, and of failed tasks among them.
    failures : sequence of str
        The last failed tasks, with their errors.
    most_workers : float
        The largest number of worker sessions that were connected at once.
    log_directory : str or None
        Its option. None: the history keeps its logs.
    """

    name: str
    id: str
    user: str | None
    session: str | None
    created: Amount
    ended: Amount
    why: str
    usage: Usage
    tasks_done: Amount = 0
    tasks_failed: Amount = 0
    failures: Sequence[str] = ()
    most_workers: Amount = 0
    log_directory: str | None = None

    @classmethod
    def of(cls, record: Record, why: str = UNSEEN) -> EndedCluster:
        """Return the history of a cluster that does not run any more.

        Parameters
        ----------
        record : Record
            Its record, with its ended sessions.
        why : str
            Why it ended, if the scheduler has written no reason, or that reason and more.
        """
        ended, closed = end_of(record), record.scheduler.closed or why
        content = {
            "name": record.name,
            "id": record.id,
            "user": record.maker.user,
            "session": record.maker.session,
            "created": record.created.timestamp(),
            "ended": ended,
            "why": first_line(why if why.startswith(closed) else closed),
            "usage": usage_of(record, ended).to_json(),
            "log_directory": record.options.get("log_directory"),
        }
        return cls.from_json({**record.scheduler.activity, **content})

    @classmethod
    def from_json(cls, content: Any) -> EndedCluster:
        """Return what :meth:`to_json` describes, and check it.

        Raises
        ------
        ValueError
            If it describes no cluster.
        """
        content = validate(content, dict[str, Any], "history")
        usage = Usage(validate(content.get("usage"), _Written, "usage")["groups"])
        cluster = validate({**content, "usage": usage}, cls, "history")
        texts = {name: printable(text) for name, text in vars(cluster).items() if isinstance(text, str)}
        return replace(cluster, **cast(Any, texts))

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**vars(self), "usage": self.usage.to_json()}

    def describe(self) -> dict[str, Any]:
        """Describe it for programs."""
        times = {name: _iso(getattr(self, name)) for name in ("created", "ended")}
        return {**self.to_json(), **times, "duration": self.duration, "cost": self.usage.total.cost}

    def logs(self) -> SessionLogs:
        """Return what is left of its logs."""
        kept = state_directory() / HISTORY_FOLDER / self.id
        return SessionLogs(self.name, Path(self.log_directory, self.name) if self.log_directory else kept)

    @property
    def duration(self) -> float:
        """Seconds from its creation to its end."""
        return max(0.0, self.ended - self.created)

    @property
    def task_words(self) -> str:
        """The text for the numbers of tasks."""
        failed = f", {self.tasks_failed:,} failed" if self.tasks_failed else ""
        return f"{self.tasks_done - self.tasks_failed:,} done{failed}"


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


def where_logs_are(cluster: EndedCluster) -> str | None:
    """Return the command that prints what is left of a cluster's logs. Blocks.

    If another cluster has its name by now, return their folder. Return None if no log is left.
    """
    paths = cluster.logs().paths()
    if not paths:
        return None
    record = store.find(cluster.name)
    namesakes = (other.id for other in ended_clusters() if other.name == cluster.name)
    newest = next(namesakes, cluster.id) if record is None else record.id
    if newest == cluster.id:
        return f"dask cml logs {shlex.quote(cluster.name)}"
    return str(next(iter(paths.values())).parent)


def end_of(record: Record) -> float:
    """Return the time of a cluster's last sign of life, as far as its files say. Blocks."""
    silence = store.silence(record)
    if silence is not None or record.maker.lives():
        return time.time() - (silence or 0.0)
    launches = {**record.launches, **record.ended}.values()
    times = [launch.ended or launch.started or launch.launched for launch in launches]
    return max([record.created.timestamp(), *times])


def stop_and_remove(record: Record, api: WorkersAPI, why: str) -> Record:
    """Stop all sessions in a cluster's record, and remove the record with the cluster's folder. Blocks.

    Return the record as it was at last, see :func:`store.refreshed`.

    Raises
    ------
    CMLError
        If sessions are not stopped. Or if the file system fails or does not answer: the known sessions are
        stopped even so.
    """
    stopped: set[str] = set()

    def stop(sessions: Mapping[str, str]) -> None:
        for session in sessions.keys() - stopped:
            api.adopt(session, sessions[session])
        stopped.update(sessions)
        try:
            api.end()
        except CallFailed:  # of some: the others are not to be listed any more
            ended = [end_file(session, int(time.time())) for session in stopped - api.live.keys()]
            with contextlib.suppress(OSError, CMLError):
                block_within(timing.files, store.write_sessions, record, [], ended)
            raise

    try:
        latest = block_within(timing.files, store.refreshed, record)
        stop({**record.sessions, **latest.sessions})
        if why:  # else an argument was refused, and nothing was launched
            block_within(timing.files, remember, record, why)
        if last_sessions := block_within(timing.files, store.remove, record):
            stop(last_sessions)
        return latest
    except (NoAnswer, OSError) as error:
        stop(record.sessions)
        raise CMLError(
            f"the known sessions of cluster {record.name!r} are stopped, but its folder {record.folder} is "
            f"not removed: {error}. When the file system answers, run {command('delete', record.name)}"
        ) from error


def remember(record: Record, why: str = UNSEEN) -> None:
    """Write the file of a cluster whose record is about to be removed. Log errors.

    Do nothing if another process has written the file, or has removed the record.

    Parameters
    ----------
    record : Record
        Its last known record.
    why : str
        Why it ended, as a clause.
    """
    try:
        keep, folder = setting("history.keep"), record.folder.parent / HISTORY_FOLDER
        if keep:
            with contextlib.suppress(NoSuchCluster):
                ended = EndedCluster.of(store.read_again(record), why)
                make_folder(folder)
                write_file(folder / f"{record.id}{_SUFFIX}", json.dumps(ended.to_json()).encode(), new=True)
                _keep_logs(record, folder / record.id)
        _forget(folder, keep, time.time() - setting("history.days") * 24 * 3600)
    except Exception as error:  # of the file system or an odd record: the cluster must end
        logger.warning("History of cluster %s not written: %r", record.name, error)


def kept_logs(record: Record) -> SessionLogs:
    """Return the logs that the history keeps of a cluster whose record was removed."""
    return SessionLogs(record.name, record.folder.parent / HISTORY_FOLDER / record.id)


def _keep_logs(record: Record, folder: Path) -> None:
    """Move the logs of a cluster whose folder is about to be removed. Keep only the end of a large log."""
    most = int(setting("history.logs") * 2**30)
    paths = [*SessionLogs(record.name, log_folder(record.folder, None)).paths().values()]
    # The first logs are those of the cluster and its scheduler. Each file takes the file server some time.
    paths = paths[:2] + paths[2:][-_MOST_LOGS:]
    if not most or not paths:
        return
    make_folder(folder)
    share = min(_MOST_OF_A_LOG, most // len(paths))
    for path in paths:
        # Another process may end the cluster, too.
        with contextlib.suppress(OSError, ValueError), open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= share:
                os.rename(path, folder / path.name)
            else:
                file.seek(size - share)
                write_file(folder / path.name, file.read(share), new=True)


def _forget(folder: Path, keep: int, oldest: float) -> None:
    """Remove all but the newest clusters and logs, and what crashed processes have left behind."""
    left = setting("history.logs") * 2**30
    with contextlib.suppress(OSError):  # another process removes them, too
        files = sorted(((file.stat().st_mtime, file) for file in folder.glob(f"*{_SUFFIX}*")), reverse=True)
        for n, (written, file) in enumerate(files):
            logs, is_kept = file.with_suffix(""), n < keep and written >= oldest
            left -= sum(log.stat().st_size for log in logs.glob("*"))
            if left < 0 or not is_kept:
                shutil.rmtree(logs, ignore_errors=True)
            if not is_kept:
                file.unlink()


def find_ended(record_id: str) -> EndedCluster | None:
    """Return a cluster that has ended, by the id of its record. None: the history does not have it."""
    return next((cluster for cluster in ended_clusters() if cluster.id == record_id), None)


def ended_clusters(dead: Iterable[Record] = ()) -> list[EndedCluster]:
    """Return the clusters that have ended, the last one first. Ignore damaged files; warn once.

    Parameters
    ----------
    dead : iterable of Record
        The records of dead clusters, which no process has removed yet.
    """
    folder = state_directory() / HISTORY_FOLDER
    clusters: dict[str, EndedCluster] = {}
    for record in dead:
        with contextlib.suppress(ValueError):
            clusters[record.id] = EndedCluster.of(record)
    for file in folder.glob(f"[!.]*{_SUFFIX}"):
        try:
            clusters[file.stem] = _read(file)
        except FileNotFoundError:  # another process has removed it
            continue
        except (OSError, ValueError, RecursionError) as error:
            report_ignored(file, error)
    return sorted(clusters.values(), key=lambda cluster: (cluster.ended, cluster.id), reverse=True)


@functools.lru_cache(maxsize=1000)
def _read(file: Path) -> EndedCluster:
    """Read a file, which no process changes."""
    ended = EndedCluster.from_json(json.loads(read_file(file)))
    if ended.id != file.stem:
        raise ValueError(f"it is the history of another cluster, {ended.id!r}")
    return ended
