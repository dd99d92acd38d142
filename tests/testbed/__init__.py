"""The local platform for tests: with faults, slow starts, and limits as CML has them.

:func:`set_up` gives it to a state directory, for all processes that use the directory. They go on to call
:mod:`dask_cml.local`, whose classes this package extends.
"""

from pathlib import Path

from dask_cml.local import (
    Response,
    await_workers,
    install,
    launch_workers,
    list_workers,
    shares_host_network,
    stop_workers,
)

from .control import evict, log, sessions
from .faults import clear as clear_faults
from .faults import inject
from .settings import Settings, configure, settings

__all__ = [
    "Response",
    "Settings",
    "await_workers",
    "clear_faults",
    "configure",
    "evict",
    "inject",
    "install",
    "launch_workers",
    "list_workers",
    "log",
    "sessions",
    "set_up",
    "settings",
    "shares_host_network",
    "stop_workers",
]

_PLATFORM = """\
import sys

sys.path.append({tests!r})
from testbed.platform import Platform
"""


def set_up(directory: Path) -> None:
    """Create a state directory of the local platform that has this one."""
    directory.mkdir(mode=0o700)
    (directory / "platform.py").write_text(_PLATFORM.format(tests=str(Path(__file__).parents[1])))
