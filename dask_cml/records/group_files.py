"""The files of a cluster's worker groups: each holds the options of one, and its name says which.

Whichever manager adds a group makes its file, at once and as a whole, and nobody changes it. So two managers
never add two groups of one name.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dask_cml.checks import group_name, message
from dask_cml.private import MOST_BYTES, open_folder, read_file, written

#: In a cluster's folder.
GROUPS_FOLDER = "groups"
_SUFFIX = ".json"


def write(name: str, options: Mapping[str, Any], folder: Path, descriptor: int) -> None:
    """Make the file of a new worker group.

    Parameters
    ----------
    name : str
        The group's.
    options : mapping
        The group's, as JSON can hold them.
    folder : Path
        The cluster's.
    descriptor : int
        What it is open at.

    Raises
    ------
    ValueError
        If there is a group of this name, or the options have more than a megabyte.
    """
    content = json.dumps(options).encode()
    if len(content) > MOST_BYTES:
        group = f"the options of the worker group {name!r}"
        raise ValueError(f"{group} have {len(content)} bytes: expected at most {MOST_BYTES}")
    file = name + _SUFFIX
    with open_folder(folder / GROUPS_FOLDER, descriptor) as own, written(file, content, own) as temporary:
        try:
            # Unlike a rename, this takes the place of no other group.
            os.link(temporary, file, src_dir_fd=own, dst_dir_fd=own)
        except FileExistsError:
            raise ValueError(
                message("name", name, "a name that no worker group of the cluster has")
            ) from None


def remove(name: str, folder: Path, descriptor: int) -> None:
    """Remove the file of a worker group, if there is one."""
    with open_folder(folder / GROUPS_FOLDER, descriptor) as own, contextlib.suppress(FileNotFoundError):
        os.unlink(name + _SUFFIX, dir_fd=own)


def read_all(folder: Path, descriptor: int) -> dict[str, dict[str, Any]]:
    """Return the options of all worker groups of a cluster, by name.

    Raises
    ------
    NotPrivate
        If others can write to them.
    ValueError
        If a file is not that of a group.
    """
    found = {}
    with open_folder(folder / GROUPS_FOLDER, descriptor) as own:
        for file in sorted(os.listdir(own)):
            if file.startswith("."):  # it is being written
                continue
            name = group_name("group", file.removesuffix(_SUFFIX))
            options = json.loads(read_file(folder / GROUPS_FOLDER / file, own))
            if not isinstance(options, dict):
                raise ValueError(f"the options of the worker group {name!r} cannot be {repr(options)[:100]}")
            found[name] = options
    return found
