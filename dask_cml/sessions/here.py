"""Where this process runs: its session, its user, and the owner of what it launches.

The owner is the session with which this process's launches end.

On some workbenches, an Istio sidecar in each pod accepts all connections. If the mesh demands its own mutual
TLS, every connection between pods succeeds, and nothing that Dask sends arrives.
"""

from __future__ import annotations

import contextlib
import getpass
import http.client
import os
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import dask.config
import psutil

from dask_cml.checks import web_link
from dask_cml.layout import CLIENT_NAME, CLUSTER, inside_name
from dask_cml.words import format_duration

#: The kinds of sessions that have no limit, or whose limit is that of another session.
_WITHOUT_LIMITS = frozenset({"application", "worker", "model", "experiment"})
_LONGER = "To compute for longer, run your script as a CML Job, or run `dask cml serve` as an Application"
#: The variables with the ports of this session that CML serves, and the beginnings of their hosts.
SERVED_PORTS = {"CDSW_APP_PORT": "", "CDSW_READONLY_PORT": "read-only-"}
#: Dask's own template of a link, for a dashboard at a port of its host.
_DASKS_LINK = "{scheme}://{host}:{port}/status"
_DASHBOARD_PREFIX = "--dashboard-prefix"
_PORTS = {"http": 80, "https": 443}
#: The port of the loopback at which a sidecar says whether it is ready.
MESH_PORT = 15021
_MESH_TIMEOUT = 2.0
#: The administrator's commands that show the mode of the mesh, and let other connections pass.
SHOW_MESH = "kubectl get peerauthentication --all-namespaces"
PERMIT_MESH = (
    "kubectl patch peerauthentication <name> -n <namespace> --type merge "
    """-p '{"spec":{"mtls":{"mode":"PERMISSIVE"}}}'"""
)
#: What a sidecar can mean, in sentences.
MESH_EFFECT = (
    "An Istio sidecar runs in this session. If the mesh has the mode STRICT, it accepts all connections "
    "between sessions, but Dask never gets an answer."
)


def served_hosts() -> dict[str, str]:
    """Return the hosts at which CML serves the ports of this session, by the variables with the ports."""
    session, domain = this_session(), os.environ.get("CDSW_DOMAIN")
    if session is None or not domain:
        return {}
    return {variable: f"{prefix}{session}.{domain}".lower() for variable, prefix in SERVED_PORTS.items()}


def dashboard_link(url: object, scheduler_args: Sequence[str] = ()) -> str:
    """Return the link to a dashboard. Empty if there is none, or its URL is not known.

    A template in ``distributed.dashboard.link`` is used if this process has all variables that it names. It
    may be left from another deployment.

    Parameters
    ----------
    url : object
        The URL of the scheduler's session, from the platform or a file.
    scheduler_args : sequence of str
        Additional arguments of ``dask scheduler``.

    Examples
    --------
    >>> dashboard_link("https://abcdefgh12345678.example.com/")
    'https://abcdefgh12345678.example.com/status'
    >>> dashboard_link("https://abcdefgh12345678.example.com", ["--dashboard-prefix", "/reports"])
    'https://abcdefgh12345678.example.com/reports/status'
    """
    base = web_link(url)
    # Without a dashboard, Dask serves other pages at its port.
    if base is None or "--no-dashboard" in scheduler_args:
        return ""
    template = dask.config.get("distributed.dashboard.link")
    if isinstance(template, str) and template != _DASKS_LINK:
        # A variable is missing, or a port wrong.
        with contextlib.suppress(AttributeError, KeyError, IndexError, ValueError):
            parts = urlsplit(base)
            port = parts.port or _PORTS[parts.scheme]
            place = {"scheme": parts.scheme, "host": parts.hostname, "port": port}
            return str(template.format(**{**os.environ, **place}))
    words = [part for word in scheduler_args for part in word.split("=", 1)]
    prefix = words[words.index(_DASHBOARD_PREFIX) + 1].strip("/") if _DASHBOARD_PREFIX in words[:-1] else ""
    return "/".join(filter(None, [base.rstrip("/"), prefix, "status"]))


def this_session() -> str | None:
    """Return the id of the session in which this process runs. Return None outside of sessions."""
    return os.environ.get("CDSW_ENGINE_ID") or None


def is_inside(record: str) -> bool:
    """Return whether this process runs in a session of the cluster whose record has this id."""
    return os.environ.get(CLIENT_NAME) == inside_name(record)


def this_cluster() -> str | None:
    """Return the name of the cluster in whose session this process runs. Return None elsewhere."""
    return os.environ.get(CLUSTER)


def this_user() -> str | None:
    """Return the name of this process's user. Return None if the user has no name."""
    try:
        return os.environ.get("CDSW_CREATOR") or getpass.getuser()
    except (KeyError, OSError):  # the user id has no name
        return None


def this_owner() -> str | None:
    """Return the id of the owner of the sessions that this process launches. Return None outside of sessions.

    The platform assigns the sessions that a worker session launches to the session that launched the worker
    session.
    """
    return os.environ.get("CDSW_MASTER_ID") or this_session()


def lifetime(name: str, idle_timeout: float | None) -> str:
    """Return a sentence on how long a cluster can run that this process creates.

    Parameters
    ----------
    name : str
        The cluster's name.
    idle_timeout : float or None
        Idle time after which it shuts down, in seconds. None: never.
    """
    owner = this_owner()
    end = f"session {owner} ends" if owner else "this machine restarts"
    idle = f", or until it is idle for {format_duration(idle_timeout)}" if idle_timeout else ""
    return f"Cluster {name} can run until {end}{idle}"


def session_limits() -> str:
    """Return when the platform ends the session of this process, and how to work for longer.

    Return an empty text if it does not say so, or if this process's launches end with another session.
    """
    session, kind = this_session(), os.environ.get("CDSW_ENGINE_TYPE", "").lower()
    if session is None or session != this_owner() or kind in _WITHOUT_LIMITS:
        return ""
    noun, limit = ("Job", "JOB") if kind == "job" else ("session", "SESSION")
    ends = []
    if noun == "session" and (idle := _minutes("IDLE_MAXIMUM_MINUTES")):
        ends.append(f"after {format_duration(idle)} without use, in some editors even while it computes")
    if most := _minutes(f"{limit}_MAXIMUM_MINUTES"):
        left = most - _age()
        ends.append(
            f"in {format_duration(left)} at the latest" if left > 0 else f"after {format_duration(most)}"
        )
    if not ends:
        return ""
    words = f"CML ends {noun} {session} {', and '.join(ends)}. Its clusters end with it"
    return words if noun == "Job" else f"{words}. {_LONGER}"


def _minutes(variable: str) -> float:
    """Return the minutes in a variable, in seconds. 0: it sets no limit."""
    with contextlib.suppress(ValueError):
        return max(0.0, 60.0 * int(os.environ.get(variable, "")))
    return 0.0


def _age() -> float:
    """Return the age of this session, in seconds: its first process starts its pod."""
    try:
        return max(0.0, time.time() - psutil.Process(1).create_time())
    except psutil.Error:
        return 0.0


def has_sidecar() -> bool:
    """Return whether a sidecar runs in this session's pod. Blocks for some seconds at most."""
    connection = http.client.HTTPConnection("127.0.0.1", MESH_PORT, timeout=_MESH_TIMEOUT)
    try:
        connection.request("GET", "/healthz/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):  # nobody listens, or another program
        return False
    finally:
        connection.close()
