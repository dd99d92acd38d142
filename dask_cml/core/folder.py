"""The folder of a new cluster: its keys, and the logs of its sessions."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed.security import Security

from dask_cml.errors import ClusterExists
from dask_cml.layout import LOGS_FOLDER, STARTED_FOLDER
from dask_cml.options import Options
from dask_cml.options.limits import check_new
from dask_cml.private_files import make_folder, naming
from dask_cml.sessions import tls
from dask_cml.sessions.plan import Place
from dask_cml.sessions.session_logs import log_folder


@dataclass(frozen=True)
class Keys:
    """The keys of a new cluster, which are not written yet.

    Parameters
    ----------
    security : Security or None
        The keys in files. None: the cluster has no keys.
    files : mapping
        The contents of these files, by their paths.
    """

    security: Security | None
    files: Mapping[Any, str]


def make_keys(options: Options, place: Place) -> Keys:
    """Make the keys of a new cluster."""
    return Keys(*tls.as_files(options.security, place.folder))


def fill_folder(options: Options, place: Place, keys: Keys) -> None:
    """Write the keys of a new cluster into its folder, which belongs to it, and make the folder of its logs.

    Raises
    ------
    ValueError
        If the cluster exceeds a limit of the site; nothing is written then. Or if the folder of the logs
        cannot be made.
    """
    check_new(options)  # only now it is known that no running cluster is to be connected to
    tls.write(keys.files)
    if options.log_directory is not None:
        with naming("log_directory", options.log_directory):
            log_folder(place.folder, options.log_directory).mkdir(mode=0o700, parents=True, exist_ok=True)


def new_folder(folder: Path) -> None:
    """Make the folder of a cluster without a record.

    Raises
    ------
    ClusterExists
        If it exists.
    NotPrivate
        If the state directory belongs to another user, or others can write to it.
    """
    with naming("cml.state-directory", folder.parent):
        make_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise ClusterExists(folder.name) from None
    folder.chmod(0o700)  # whatever the umask
    for name in (STARTED_FOLDER, LOGS_FOLDER):
        make_folder(folder / name)


def remove_folder(folder: Path) -> None:
    """Remove the folder of a cluster without a record, whose sessions may still write into it."""
    aside = folder.with_name(f".removed-{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
