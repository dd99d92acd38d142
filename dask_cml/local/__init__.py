"""A platform for laptops: the functions of ``cml.workers_v1``, with processes of this machine as sessions."""

from __future__ import annotations

import importlib.util
import sys
import types

from dask_cml.local.quota import configure
from dask_cml.local.workers import (
    Response,
    await_workers,
    launch_workers,
    list_workers,
    shares_host_network,
    stop_workers,
)

__all__ = [
    "Response",
    "await_workers",
    "configure",
    "install",
    "launch_workers",
    "list_workers",
    "shares_host_network",
    "stop_workers",
]


def install(force: bool = False) -> None:
    """Import the local platform for ``from cml import workers_v1`` and ``import cdsw``, in this process.

    Parameters
    ----------
    force : bool
        Whether to hide an installed ``cml`` or ``cdsw``.

    Raises
    ------
    RuntimeError
        If ``cml`` or ``cdsw`` is installed, and `force` is false.

    Examples
    --------
    >>> from dask_cml import local
    >>> local.install()
    >>> from cml import workers_v1
    >>> workers_v1 is local
    True
    """
    platform = sys.modules[__name__]
    if sys.modules.get("cml.workers_v1") is platform:
        return
    real = [name for name in ("cml", "cdsw") if _is_real(name)]
    if real and not force:
        raise RuntimeError(
            f"{real[0]} is installed, and this may be CML itself. To hide it, call install(force=True)"
        )
    package = types.ModuleType("cml", "A replacement for the cml package of CML sessions.")
    package.__path__ = []
    package.workers_v1 = platform  # type: ignore[attr-defined]
    sys.modules["cml"] = package
    sys.modules["cml.workers_v1"] = sys.modules["cdsw"] = platform


def _is_real(name: str) -> bool:
    """Return whether a package is installed. A folder that only has its name is none."""
    spec = importlib.util.find_spec(name)
    return bool(spec and (spec.origin or importlib.util.find_spec(f"{name}.workers_v1")))
