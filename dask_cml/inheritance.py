"""What the process of a scheduler or a worker takes over from the program that created the cluster."""

from __future__ import annotations

import json
import os
import sys

import dask.config

from dask_cml.layout import PROGRAM_FOLDER, TAKEN_OUT


def find_modules() -> None:
    """Let this process find modules in the program's folder, and there first, as the program does.

    Call this late: a module there may have the name of one that Dask imports.
    """
    folder = os.environ.get(PROGRAM_FOLDER)
    if folder and sys.path[0] != folder:
        sys.path.insert(0, folder)


def take_out() -> None:
    """Remove the entries of mappings that :func:`dask_cml.options.configuration.inherited` names.

    Dask adds those of its defaults and files to what a session inherits. A session's own environment
    variables set an entry nevertheless.
    """
    own = dask.config.collect_env()
    for key, names in json.loads(os.environ.get(TAKEN_OUT) or "{}").items():
        kept = dask.config.get(key, {}, config=own) or {}
        entries = dask.config.get(key, {}) or {}
        left = {name: value for name, value in entries.items() if name not in names or name in kept}
        dask.config.set({key: left})
