"""The files of a cluster's worker groups: each contains the options of one group, which is its name.

A manager that adds a group creates its file atomically, and nobody changes it. So two managers never add two
groups with one name.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dask_cml.checks import group_name, message
from dask_cml.private_files import MOST_BYTES, open_folder, read_file, written

#: The name of the folder, in a cluster's folder.
GROUPS_FOLDER = "groups"
_SUFFIX = ".json"


def write(name: str, options: Mapping[str, Any], folder: Path, descriptor: int) -> None:
    """Create the file of a new worker group.

    Parameters
    ----------
    name : str
        The name of the group.
    options : mapping
        The options of the group, for JSON.
    folder : Path
        The cluster's folder.
    descriptor : int
        The descriptor of that folder.

    Raises
    ------
    ValueError
        If a group with this name exists, or the options exceed a megabyte.
    """
    content = json.dumps(options).encode()
    if len(content) > MOST_BYTES:
        group = f"invalid options of worker group {name!r}"
        raise ValueError(f"{group}: expected at most {MOST_BYTES} bytes as JSON, got {len(content)}")
    file = name + _SUFFIX
    with open_folder(folder / GROUPS_FOLDER, descriptor) as own, written(file, content, own) as temporary:
        try:
            # Unlike a rename, this replaces no other group.
            os.link(temporary, file, src_dir_fd=own, dst_dir_fd=own)
        except FileExistsError:
            raise ValueError(
                message("name", name, "a name that no worker group of the cluster has")
            ) from None


def remove(name: str, folder: Path, descriptor: int) -> None:
    """Remove the file of a worker group, if it exists."""
    with open_folder(folder / GROUPS_FOLDER, descriptor) as own, contextlib.suppress(FileNotFoundError):
        os.unlink(name + _SUFFIX, dir_fd=own)


def read_all(folder: Path, descriptor: int) -> dict[str, dict[str, Any]]:
    """Return the options of all worker groups of a cluster, by name.

    Raises
    ------
    NotPrivate
        If others can write to the files.
    ValueError
        If a file is not that of a worker group.
    """
    found = {}
    with open_folder(folder / GROUPS_FOLDER, descriptor) as own:
        for file in sorted(os.listdir(own)):
            if file.startswith("."):  # another process is writing it
                continue
            name = group_name("group", file.removesuffix(_SUFFIX))
            options = json.loads(read_file(folder / GROUPS_FOLDER / file, own))
            if not isinstance(options, dict):
                raise ValueError(f"invalid options of worker group {name!r}: expected a mapping")
            found[name] = options
    return found
