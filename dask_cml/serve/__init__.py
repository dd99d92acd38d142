"""The web UI of ``dask cml serve``: shows and manages all clusters of the project."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

__all__ = ["run_application"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_application() -> None:
    """Serve the web UI of all clusters of the project until CML stops this Application.

    Call it in the script of a CML Application. The web UI runs in another process, because CML runs the
    script in IPython, which has its own event loop and signal handlers. This process forwards its signals to
    the web UI, which shuts down the clusters that it created at SIGTERM.

    Raises
    ------
    SystemExit
        If the web UI fails. CML then shows the Application as failed.

    Examples
    --------
    >>> from dask_cml.serve import run_application
    >>> run_application()  # doctest: +SKIP
    """
    # In a session of its own, it gets a signal to IPython's process group once, by this process.
    web_ui = subprocess.Popen([sys.executable, "-m", "dask", "cml", "serve"], start_new_session=True)

    def forward(signum: int, _: Any) -> None:
        web_ui.send_signal(signum)

    for signum in _SIGNALS:
        signal.signal(signum, forward)
    if status := web_ui.wait():
        sys.exit(status)
