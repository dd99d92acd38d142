"""Ports for programs that are told where to listen."""

import random
import socket

# Below the ports that the local platform gives to sessions, and that systems give to outgoing connections:
# anybody could take one of those until the program listens.
_PORTS = range(12000, 20000)


def free_port() -> int:
    """Return a port of 127.0.0.1 at which nobody listens."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
