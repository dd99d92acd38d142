"""Finds out whether a service mesh may keep Dask from connecting sessions.

On some workbenches, an Istio sidecar in each pod accepts all connections. If the mesh demands its own mutual
TLS, every connection between pods succeeds, and nothing that Dask sends arrives.
"""

from __future__ import annotations

import http.client

#: The port of the loopback at which a sidecar says whether it is ready.
HEALTH_PORT = 15021
_TIMEOUT = 2.0
#: The administrator's commands that show the mode of the mesh, and let other connections pass.
SHOW_MODE = "kubectl get peerauthentication --all-namespaces"
PERMIT = (
    "kubectl patch peerauthentication <name> -n <namespace> --type merge "
    """-p '{"spec":{"mtls":{"mode":"PERMISSIVE"}}}'"""
)
#: What a sidecar can mean, in sentences.
EFFECT = (
    "An Istio sidecar runs in this session. If the mesh has the mode STRICT, it accepts all connections "
    "between sessions, but Dask never gets an answer."
)


def has_sidecar() -> bool:
    """Return whether a sidecar runs in this session's pod. Blocks for some seconds at most."""
    connection = http.client.HTTPConnection("127.0.0.1", HEALTH_PORT, timeout=_TIMEOUT)
    try:
        connection.request("GET", "/healthz/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):  # nobody listens, or another program
        return False
    finally:
        connection.close()
