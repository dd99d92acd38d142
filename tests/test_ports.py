"""What of a cluster can be reached from outside its sessions."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from pathlib import Path

import psutil
import pytest
from conftest import processes_of
from distributed import Client

from dask_cml import CMLCluster

_LISTENS = "0A"  # the state of such sockets in /proc


def listening(process):
    """Return where anybody in the network of a process accepts connections: addresses and ports."""
    found = set()
    for table in "tcp", "tcp6":
        for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == _LISTENS:
                address, port = local.split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.add((ipaddress.ip_address(b"".join(words)), int(port, 16)))
    return found


def without_keys(address):
    """Return with which error a TLS handshake without a certificate ends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with (
            socket.create_connection(address, timeout=60) as connection,
            context.wrap_socket(connection) as encrypted,
        ):
            return f"it says {encrypted.recv(100)!r}"
    except OSError as error:
        return str(error)


@pytest.mark.slow
def test_every_port_is_on_loopback_or_wants_the_clusters_keys(namespaces):
    options = {"forward_dashboard": True, "processes": 2, "cpu": 2}
    with (
        CMLCluster(n_workers=1, platform="local", quiet=True, **options) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2)
        mine = {
            connection.laddr.ip
            for connection in psutil.Process().net_connections()
            if connection.status == "LISTEN"
        }
        assert mine == {"127.0.0.1"}
        loopback, reachable = set(), set()
        for process in processes_of(Path(os.environ["DASK_CML_LOCAL_DIRECTORY"])):
            session = process.environ().get("CDSW_IP_ADDRESS")
            if os.stat(f"/proc/{process.pid}/ns/net") == os.stat("/proc/self/ns/net"):
                continue  # what starts the sessions
            for address, port in listening(process):
                (loopback if address.is_loopback else reachable).add((session, port))
        # The dashboard's port, and each worker process's health and metrics.
        assert len(loopback) == 3
        # The scheduler's, and those of each worker process and its nanny.
        assert len(reachable) == 5
        for address in reachable:
            assert "CERTIFICATE_REQUIRED" in without_keys(address), address
