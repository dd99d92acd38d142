"""Checks of JupyterLab: its sidebar for Dask, and its idle time-outs."""

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
    """Check that JupyterLab's sidebar is installed and lists all clusters of the project."""
    if version("jupyterlab") is None:
        return Finding("sidebar", "ok", "JupyterLab is not installed here, so its sidebar is not needed.")
    finding = optional("sidebar", "warning", "jupyter", "Without these, JupyterLab has no sidebar for Dask.")
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
        f"The Jupyter server does not load {' and '.join(off)}: not enabled. "
        "Run this command, and start a new session."
    )
    return Finding("sidebar", "warning", words, _enable(off, path[0]))


def _enable(extensions: Sequence[str], directory: str) -> str:
    # `jupyter server extension enable` does not find extensions in ~/.local, where `pip install --user` puts
    # them.
    settings = {"ServerApp": {"jpserver_extensions": dict.fromkeys(extensions, True)}}
    code = (
        "from jupyter_server.config_manager import BaseJSONConfigManager as Manager; "
        f'Manager(config_dir="{directory}").update("jupyter_server_config", {settings})'
    ).replace("'", '"')
    return shlex.join([sys.executable, "-c", code])


def time_outs() -> Finding:
    """Report after which idle time JupyterLab ends, because the session and its workers end with it."""
    if version("jupyterlab") is None:
        return Finding("time-outs", "ok", "JupyterLab is not installed here.")
    if not launches_sessions():
        return Finding("time-outs", "ok", "Only CML ends an idle JupyterLab.")
    kernel = os.environ.get("JUPYTER_KERNEL_TIMEOUT_SECONDS") or "by default 3600"
    server = os.environ.get("JUPYTER_SERVER_TIMEOUT_SECONDS") or "by default 300"
    words = (
        f"JUPYTER_KERNEL_TIMEOUT_SECONDS ({kernel}): JupyterLab ends a kernel after this idle time. "
        f"JUPYTER_SERVER_TIMEOUT_SECONDS ({server}): this long after the last kernel, terminal and tab, "
        "the session ends, and its workers end with it. Set both as environment variables of the project."
    )
    return Finding("time-outs", "warning", words)
