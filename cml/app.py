"""Run ``dask cml serve``, the page that manages the project's clusters, as a CML Application.

CML runs this script in IPython, in the project's root. IPython has an event loop and signal handlers of its
own, so the page runs in another process. This process forwards its signals: at SIGTERM, the page shuts down
the clusters that it created.
"""

import signal
import subprocess
import sys

# If this process is killed, the kernel of Linux sends SIGTERM to the page's process.
SERVE = """
import ctypes, signal
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG

from dask.__main__ import main
main()
"""


def main():
    command = [sys.executable, "-c", SERVE, "cml", "serve"]
    # In a session of its own, it gets a signal to IPython's process group once, by this process.
    page = subprocess.Popen(command, start_new_session=True)

    def forward(number, frame):
        page.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    return page.wait()


if status := main():
    sys.exit(status)
