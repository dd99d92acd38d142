"""Check JupyterLab: its Dask sidebar and its idle time-outs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from dask_cml.doctor.finding import Finding, pip_command
from dask_cml.doctor.packages import unmet, version
from dask_cml.doctor.session import launches_sessions

_SERVER_EXTENSIONS = ("dask_labextension", "dask_cml.jupyter")
_TIME_OUTS = ("JUPYTER_KERNEL_TIMEOUT_SECONDS", 3600), ("JUPYTER_SERVER_TIMEOUT_SECONDS", 300)


def sidebar() -> Finding:
    """Check that JupyterLab's Dask sidebar is installed and enabled."""
    if version("jupyterlab") is None:
        return Finding("ok", "JupyterLab is not installed, so no sidebar is needed.")
    if missing := unmet("dask-cml", "jupyter"):
        words = f"{'; '.join(missing.values())}. JupyterLab shows no Dask sidebar without these packages."
        return Finding("warning", words, pip_command("install", *missing))
    from jupyter_core.paths import jupyter_config_path
    from jupyter_server.extension.config import ExtensionConfigManager

    path = jupyter_config_path()
    enabled = ExtensionConfigManager(read_config_path=path).get_jpserver_extensions()
    off = [name for name in _SERVER_EXTENSIONS if not enabled.get(name)]
    if not off:
        return Finding("ok", "The Dask sidebar is installed, and the Jupyter server enables it.")
    words = (
        f"The Jupyter server's configuration does not enable {' and '.join(off)}. "
        "Run this command, and start a new session."
    )
    return Finding("warning", words, _enable(off, path[0]))


def _enable(extensions: Sequence[str], directory: str) -> str:
    # `jupyter server extension enable` does not find the extensions that pip installed into ~/.local.
    settings = {"ServerApp": {"jpserver_extensions": dict.fromkeys(extensions, True)}}
    code = (
        "from jupyter_server.config_manager import BaseJSONConfigManager as Manager; "
        f'Manager(config_dir="{directory}").update("jupyter_server_config", {settings})'
    ).replace("'", '"')
    return shlex.join([sys.executable, "-c", code])


def time_outs() -> Finding:
    """Report the idle time-outs of JupyterLab. When it shuts down, the session and its workers stop."""
    if version("jupyterlab") is None or not launches_sessions():
        return Finding("ok", "Only JupyterLab on CML shuts down when it is idle.")
    values = [f"{name} ({os.environ.get(name) or f'by default {value}'})" for name, value in _TIME_OUTS]
    words = (
        f"JupyterLab shuts down kernels, and then the session with its workers, after {' and '.join(values)} "
        "seconds. Set both as environment variables of the project."
    )
    return Finding("warning", words)
