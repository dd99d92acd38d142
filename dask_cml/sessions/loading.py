"""The module of the platform on which this process runs."""

from __future__ import annotations

import importlib
from typing import Any

from dask_cml.errors import NotOnCML


def load_platform(platform: str = "auto") -> Any:
    """Import the platform's module, with ``launch_workers``, ``list_workers`` and ``stop_workers``.

    Parameters
    ----------
    platform : {"auto", "local"}
        ``"auto"`` is CML: ``cml.workers_v1`` or, if that is missing, ``cdsw``.

    Raises
    ------
    NotOnCML
        If neither module can be imported.
    """
    if platform == "local":
        return importlib.import_module("dask_cml.local")
    for name in ("cml.workers_v1", "cdsw"):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "launch_workers"):
            return module
    raise NotOnCML(
        "not in a CML session: cannot import cml.workers_v1 or cdsw. To run on this machine, use "
        'platform="local" or set the environment variable DASK_CML__PLATFORM=local'
    )
