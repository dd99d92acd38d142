"""Takes out of a session's configuration what the cluster's creator has taken out.

Dask adds the entries of its defaults and files to those of a mapping that a session inherits.
"""

from __future__ import annotations

import json
import os

import dask.config

from dask_cml.layout import TAKEN_OUT


def take_out() -> None:
    """Remove the entries of mappings that :func:`dask_cml.options.configuration.inherited` names.

    A session's own environment variables set an entry nevertheless.
    """
    own = dask.config.collect_env()
    for key, names in json.loads(os.environ.get(TAKEN_OUT) or "{}").items():
        kept = dask.config.get(key, {}, config=own)
        entries = dask.config.get(key, {})
        left = {name: value for name, value in entries.items() if name not in names or name in kept}
        dask.config.set({key: left})
