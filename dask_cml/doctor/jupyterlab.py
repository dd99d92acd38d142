"""Check JupyterLab: its Dask sidebar and its idle time-outs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from dask_cml.doctor.finding import Finding
from dask_cml.doctor.packages import optional, version
from dask_cml.doctor.session import launches_sessions

_SERVER_EXTENSIONS = ("dask_labextension", "dask_cml.jupyter")


def sidebar() -> Finding:
    """Check that JupyterLab's Dask sidebar is installed and enabled."""
    if version("jupyterlab") is None:
        return Finding("sidebar", "ok", "JupyterLab is not installed, so no sidebar is needed.")
    finding = optional("sidebar", "jupyter", "JupyterLab shows no Dask sidebar without these packages.")
    if finding.state != "ok":
        return finding
    from jupyter_core.paths import jupyter_config_path
    from jupyter_server.extension.config import ExtensionConfigManager

    path = jupyter_config_path()
    enabled = ExtensionConfigManager(read_config_path=path).get_jpserver_extensions()
    off = [name for name in _SERVER_EXTENSIONS if not enabled.get(name)]
    if not off:
        return Finding("sidebar", "ok", f"{finding.words} The Jupyter server's extensions are enabled.")
    words = (
        f"The Jupyter server's configuration does not enable {' and '.join(off)}. "
        "Run this command, and start a new session."
    )
    return Finding("sidebar", "warning", words, _enable(off, path[0]))


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
    if version("jupyterlab") is None:
        return Finding("time-outs", "ok", "JupyterLab is not installed.")
    if not launches_sessions():
        return Finding("time-outs", "ok", "Only CML shuts down an idle JupyterLab.")
    kernel = os.environ.get("JUPYTER_KERNEL_TIMEOUT_SECONDS") or "by default 3600"
    server = os.environ.get("JUPYTER_SERVER_TIMEOUT_SECONDS") or "by default 300"
    words = (
        f"JupyterLab shuts down a kernel that is idle for JUPYTER_KERNEL_TIMEOUT_SECONDS ({kernel}). "
        f"JUPYTER_SERVER_TIMEOUT_SECONDS ({server}) after the last kernel, terminal and tab close, the "
        "session stops, and its workers stop with it. Set both as environment variables of the project."
    )
    return Finding("time-outs", "warning", words)
