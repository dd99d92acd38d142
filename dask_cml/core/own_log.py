"""The cluster's own log, for other processes and for the time after its end."""

from __future__ import annotations

from datetime import datetime

from dask_cml import output
from dask_cml.options import Options
from dask_cml.private_files import append
from dask_cml.sessions.plan import Place
from dask_cml.sessions.session_logs import OWN, log_path


def write_own_log(options: Options, place: Place, now: datetime, text: str) -> None:
    """Write a line, or several, into the log, without waiting for the file system."""
    path = log_path(OWN, place.folder, options.log_directory)
    output.write(lambda: append(path, f"{now:%Y-%m-%d %H:%M:%S} - {text}\n".encode()))
