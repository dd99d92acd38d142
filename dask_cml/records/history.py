"""The history of clusters: a small file and the logs remain of a cluster that has ended.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypedDict, cast

from dask_cml.errors import NoSuchCluster
from dask_cml.layout import HISTORY_FOLDER, log_folder
from dask_cml.options import setting, state_directory
from dask_cml.output import get_logger
from dask_cml.private_files import make_folder, open_regular, read_file, report_ignored, write_file
from dask_cml.records import liveness, store
from dask_cml.records.record import Record
from dask_cml.records.usage import Amount, SessionHours, Usage, usage_of
from dask_cml.sessions.session_logs import SessionLogs
from dask_cml.validation import validate
from dask_cml.words import first_line, printable

logger = get_logger(__name__)

_SUFFIX = ".json"
#: Maximum number of bytes of one log, and of workers whose logs are kept.
_MOST_OF_A_LOG, _MOST_LOGS = 2**20, 100
#: The reason if no process has seen the end.
UNSEEN = "its scheduler's session ended"


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
    silence = liveness.silence(record)
    if silence is not None or record.maker.lives():
        return time.time() - (silence or 0.0)
    launches = {**record.launches, **record.ended}.values()
    times = [launch.ended or launch.started or launch.launched for launch in launches]
    return max([record.created.timestamp(), *times])


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


def why_ended(record_id: str) -> str | None:
    """Return why a cluster has ended, by the id of its record. None: the history does not have it. Blocks."""
    ended = find_ended(record_id)
    return ended.why if ended is not None else None


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
