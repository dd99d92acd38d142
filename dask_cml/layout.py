"""The names of the files on the project file system, most of them in a cluster's folder.

Each file has one writer: ``record.json`` the cluster's creator, once; ``wanted-<n>.json`` the manager that
launches scheduler number n, once; ``scheduler-<n>.json`` that scheduler. In the folders, each file's name
describes a session.
"""

from __future__ import annotations

import re

RECORD_FILE = "record.json"
#: The name of the record while a process removes the cluster's folder.
REMOVED_FILE = ".removed.json"
#: The folder in the state directory for what remains of ended clusters. No cluster can have this name.
HISTORY_FOLDER = ".history"
#: The files of sessions, and the names that sessions have taken.
SESSIONS_FOLDER, STARTED_FOLDER = "sessions", "started"
#: The name of the scheduler's session in these files. The other names are those of worker sessions.
SCHEDULER = "scheduler"
#: The environment variables of a scheduler's session: the cluster's folder, and the number of the scheduler.
FOLDER, NUMBER = "DASK_CML_FOLDER", "DASK_CML_SCHEDULER_NUMBER"
#: The environment variable with the bytes that a worker's process may reserve after its start. 0: no limit.
ALLOCATION_LIMIT = "DASK_CML_ALLOCATION_LIMIT"

_NUMBERED_FILE = re.compile(r"(wanted|scheduler)-([0-9]{1,9})\.json", re.ASCII)


def wanted_file(number: int) -> str:
    """Return the name of the file from which a scheduler begins."""
    return f"wanted-{number}.json"


def scheduler_file(number: int) -> str:
    """Return the name of the file in which a scheduler says how to reach it, and what is wanted."""
    return f"scheduler-{number}.json"


def scheduler_number(name: str, wanted: bool = False) -> int | None:
    """Return the number of the scheduler whose file has this name. Return None for other files.

    Parameters
    ----------
    name : str
        The name of the file.
    wanted : bool
        Whether files from which schedulers begin count, too.
    """
    match = _NUMBERED_FILE.fullmatch(name)
    return int(match[2]) if match is not None and (wanted or match[1] == "scheduler") else None
