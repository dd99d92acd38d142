"""The folder of a new cluster: its keys, and the logs of its sessions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dask_cml.errors import ClusterExists
from dask_cml.layout import LOGS_FOLDER, STARTED_FOLDER
from dask_cml.options import Options
from dask_cml.options.limits import check_new
from dask_cml.private_files import make_folder
from dask_cml.sessions import tls
from dask_cml.sessions.plan import Place
from dask_cml.sessions.session_logs import log_folder


def fill_folder(options: Options, place: Place, keys: Mapping[Path, str]) -> None:
    """Write the keys of a new cluster into its folder, which belongs to it, and make the folder of its logs.

    Parameters
    ----------
    options : Options
        The cluster's options.
    place : Place
        The cluster's folder.
    keys : mapping
        The files of keys with their contents, see :func:`dask_cml.sessions.tls.as_files`.

    Raises
    ------
    ValueError
        If the cluster exceeds a limit of the site; nothing is written then. Or if the folder of the logs
        cannot be made.
    """
    check_new(options)  # only now it is known that no running cluster is to be connected to
    tls.write(keys)
    if options.log_directory is not None:
        make_folder(log_folder(place.folder, options.log_directory), "log_directory")


def new_folder(folder: Path) -> None:
    """Make the folder of a cluster without a record.

    Raises
    ------
    ClusterExists
        If it exists.
    NotPrivate
        If the state directory belongs to another user, or others can write to it.
    """
    make_folder(folder.parent, "cml.state-directory")
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise ClusterExists(folder.name) from None
    folder.chmod(0o700)  # whatever the umask
    for name in (STARTED_FOLDER, LOGS_FOLDER):
        make_folder(folder / name)
