"""The module of the platform that this process is on."""

from __future__ import annotations

import importlib
from typing import Any

from dask_cml.errors import NotOnCML


def load_platform(platform: str = "auto") -> Any:
    """Import the module that offers ``launch_workers`` and its three companions.

    Parameters
    ----------
    platform : {"auto", "local"}
        ``"auto"`` is CML: ``cml.workers_v1``, else the older ``cdsw``.

    Raises
    ------
    NotOnCML
        If it is not there.
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
        "this is not a CML session: neither cml.workers_v1 nor cdsw can be imported. To run on this "
        'machine, give platform="local" or set the environment variable DASK_CML__PLATFORM=local'
    )
