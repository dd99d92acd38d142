"""The names of the files on the project file system, most of them in a cluster's folder.

Each file has one writer: ``record.json`` the cluster's creator, once; ``board-<n>.json`` the process that
launches scheduler number n, or gives that up; ``scheduler-<n>.json`` that scheduler. In the folders, the name
of a file describes a session.

Besides, the names of the environment variables of sessions, and the folder of a program's modules.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

RECORD_FILE = "record.json"
#: The folder in the state directory for what remains of ended clusters. No cluster can have this name.
HISTORY_FOLDER = ".history"
#: The folders with the files of sessions, the names that sessions have taken, and their logs. Only these grow
#: with the number of sessions: sessions and schedulers list the cluster's own folder again and again.
SESSIONS_FOLDER, STARTED_FOLDER, LOGS_FOLDER = "sessions", "started", "logs"
#: The name of the cluster's own log, in place of a session's name, and the ends of the names of logs.
OWN_LOG, LOG_SUFFIX = "cluster", ".log"
#: The name of the scheduler's session in these files. The other names are those of worker sessions.
SCHEDULER = "scheduler"
#: The environment variables of a scheduler's session: the cluster's folder, and the number of the scheduler.
FOLDER, NUMBER = "DASK_CML_FOLDER", "DASK_CML_SCHEDULER_NUMBER"
#: The environment variable of a session with the name of its cluster.
CLUSTER = "DASK_CML_CLUSTER"
#: The environment variable with more hosts whose pages may use the scheduler's dashboard, between commas.
HOSTS = "DASK_CML_DASHBOARD_HOSTS"
#: The environment variable with the port for the scheduler's dashboard, which the platform serves.
DASHBOARD_PORT = "DASK_CML_DASHBOARD_PORT"
#: The environment variable with the folder of the program that created the cluster, where its modules are.
PROGRAM_FOLDER = "DASK_CML_PROGRAM_FOLDER"
#: The environment variable with those of a user, as JSON, whose values contain ``$NAME`` or ``~``.
EXPANDED = "DASK_CML_EXPANDED"
#: The environment variables with the name and the worker group of a session, which its Dask workers repeat.
WORKER, WORKER_GROUP = "DASK_CML_WORKER", "DASK_CML_WORKER_GROUP"
#: The environment variable with the numbers of the GPUs of a session's Dask workers, such as ``0,2 1,3``.
GPUS = "DASK_CML_GPUS"
#: The environment variable of a Dask worker whose session has too few GPUs, such as ``1 of 2``.
FOUND_GPUS = "DASK_CML_FOUND_GPUS"
#: The environment variable with the modules that nannies preload, which Dask reads.
NANNY_PRELOAD = "DASK_DISTRIBUTED__NANNY__PRELOAD"
#: The environment variable with the names of clients in a session of a cluster, which Dask reads.
CLIENT_NAME = "DASK_CLIENT_NAME"

_NUMBERED_FILE = re.compile(r"(board|scheduler)-([0-9]{1,9})\.json", re.ASCII)


def inside_name(record: str) -> str:
    """Return the name of clients in the sessions of a cluster, by the id of its record."""
    return f"cml-{record}"


def board_file(number: int) -> str:
    """Return the name of the file with the board with which a scheduler begins."""
    return f"board-{number}.json"


def scheduler_file(number: int) -> str:
    """Return the name of the file in which a scheduler says how to reach it, and what is wanted."""
    return f"scheduler-{number}.json"


def scheduler_number(name: str, begins: bool = False) -> int | None:
    """Return the number of the scheduler whose file has this name. Return None for other files.

    Parameters
    ----------
    name : str
        The name of the file.
    begins : bool
        Whether files from which schedulers begin count, too.
    """
    match = _NUMBERED_FILE.fullmatch(name)
    return int(match[2]) if match is not None and (begins or match[1] == "scheduler") else None


def program_folder() -> str | None:
    """Return the folder in which this process's program finds its modules.

    That is the folder of a script. Notebooks, consoles and ``python -m`` look in the current folder. Return
    None for programs that pip has installed.
    """
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None or getattr(main, "__spec__", None) is not None:
        try:
            return os.getcwd()
        except FileNotFoundError:  # it has been removed
            return None
    return os.path.dirname(os.path.abspath(file)) if file.endswith(".py") else None


def find_modules() -> None:
    """Let this process find modules in the program's folder, and there first, as the program does.

    Call this late: a module there may have the name of one that Dask imports.
    """
    folder = os.environ.get(PROGRAM_FOLDER)
    if folder and sys.path[0] != folder:
        sys.path.insert(0, folder)


def log_folder(folder: Path, log_directory: str | None) -> Path:
    """Return the folder of a cluster's logs. A `log_directory` has a folder for every cluster.

    Parameters
    ----------
    folder : Path
        The cluster's folder.
    log_directory : str or None
        The cluster's option `log_directory`.
    """
    return Path(log_directory, folder.name) if log_directory else folder / LOGS_FOLDER


def log_path(session: str, folder: Path, log_directory: str | None) -> Path:
    """Return the path of the log of a session with this name, see :func:`log_folder`."""
    return log_folder(folder, log_directory) / (session + LOG_SUFFIX)
