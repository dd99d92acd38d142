"""A network namespace for each session: a loopback and an address of its own, as CML's pods have.

For Linux, as root. The sessions of a state directory are on one bridge, which this machine is on as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dask_cml.local import state

#: On CML all sessions have the same.
APP_PORT, PUBLIC_PORT = 8100, 8080

_NAMESPACES = Path("/run/netns")
#: The networks to choose from: 10.128.0.0/16 to 10.255.0.0/16.
_FIRST, _COUNT = 128, 128
_LAST_HOST = 0xFFFE


def check() -> None:
    """Raise a RuntimeError that says why this machine cannot have namespaces, if it cannot."""
    lacks = []
    if not sys.platform.startswith("linux"):
        lacks.append("Linux")
    if os.geteuid() != 0:
        lacks.append("root")
    lacks += [program for program in ("ip", "nsenter") if shutil.which(program) is None]
    if lacks:
        raise RuntimeError(f'network="namespaces" needs {", ".join(lacks)}')


def allocate() -> dict[str, str]:
    """Return the network of a new session, and make the bridge that it will be on.

    Returns
    -------
    dict
        ``bridge``, ``subnet``, ``gateway``, ``ip``, ``namespace``, ``interface`` and ``nsenter``.
    """
    path = state.directory() / "network.json"
    with _locked():
        known = state.read_json(path) or {"last": 1}
        bridge = _bridge()
        if not _exists(bridge, bridge):
            known["subnet"] = _free_subnet(bridge)
        last = known["last"] = known["last"] % (_LAST_HOST - 1) + 1
        subnet = ipaddress.IPv4Network(known["subnet"])
        plan = {
            "bridge": bridge,
            "subnet": known["subnet"],
            "gateway": str(subnet[1]),
            "ip": str(subnet[last]),
            "namespace": f"{bridge}-{last}",
            # Names of interfaces have 15 characters at most.
            "interface": f"{bridge}-{last:x}",
            # The session's PATH may lead elsewhere.
            "nsenter": shutil.which("nsenter") or "nsenter",
        }
        _make_bridge(plan)
        state.write_json(path, known)
    return plan


def host(bridge: str | None = None) -> list[str]:
    """Return what a command is to be preceded by, so as to run in this machine's own network."""
    alias = _host_alias(bridge or _bridge())
    return ["nsenter", f"--net={alias}"] if alias.exists() else []


def inside(plan: dict[str, str]) -> list[str]:
    """Return what a command is to be preceded by, so as to run in a session's network."""
    return [plan["nsenter"], f"--net={_NAMESPACES / plan['namespace']}"]


def set_up(plan: dict[str, str]) -> None:
    """Make the namespace of a session."""
    bridge, namespace, interface = plan["bridge"], plan["namespace"], plan["interface"]
    with _locked():
        _make_bridge(plan)
        _batch(
            bridge,
            f"netns add {namespace}",
            f"link add {interface} type veth peer name eth0 netns {namespace}",
            f"link set {interface} master {bridge} up",
        )
    width = plan["subnet"].split("/")[1]
    _batch(
        bridge,
        "link set lo up",
        f"address add {plan['ip']}/{width} dev eth0",
        "link set eth0 up",
        f"route add default via {plan['gateway']}",
        namespace=namespace,
    )


def cut(plan: dict[str, str]) -> None:
    """Take a session's link down: what it sends and what is sent to it is lost."""
    _batch(plan["bridge"], f"link set {plan['interface']} down")


def remove(plan: dict[str, str]) -> None:
    """Remove the namespace of a session whose processes have ended, and the bridge with the last of them."""
    bridge = plan["bridge"]
    alias = _host_alias(bridge)
    with _locked():
        # The kernel removes the links of a namespace some time after it.
        if _exists(plan["interface"], bridge):
            _batch(bridge, f"link delete {plan['interface']}")
        if (_NAMESPACES / plan["namespace"]).exists():
            _batch(bridge, f"netns delete {plan['namespace']}")
        # A session that is still starting makes the bridge anew.
        if [*_NAMESPACES.glob(f"{bridge}-*")] == [alias]:
            if _exists(bridge, bridge):
                _batch(bridge, f"link delete {bridge}")
            _batch(bridge, f"netns delete {alias.name}")


def _bridge() -> str:
    return "cml" + hashlib.sha256(os.fsencode(state.directory())).hexdigest()[:7]


def _host_alias(bridge: str) -> Path:
    """Name this machine's own network, because sessions can launch sessions but are not in it."""
    return _NAMESPACES / f"{bridge}-host"


def _make_bridge(plan: dict[str, str]) -> None:
    bridge = plan["bridge"]
    if not _host_alias(bridge).exists():
        _batch(bridge, f"netns attach {_host_alias(bridge).name} {os.getpid()}")
    if not _exists(bridge, bridge):
        width = plan["subnet"].split("/")[1]
        _batch(
            bridge,
            f"link add {bridge} type bridge",
            f"address add {plan['gateway']}/{width} dev {bridge}",
            f"link set {bridge} up",
        )


def _free_subnet(bridge: str) -> str:
    routes = json.loads(_run([*host(bridge), "ip", "-json", "-4", "route", "show", "table", "all"]))
    taken = [_network(route) for route in routes]
    start = int(hashlib.sha256(bridge.encode()).hexdigest(), 16)
    for i in range(_COUNT):
        subnet = ipaddress.IPv4Network(f"10.{_FIRST + (start + i) % _COUNT}.0.0/16")
        # A wider route, such as one to 10.0.0.0/8, gives way to the bridge's.
        if not any(other.prefixlen >= 16 and subnet.overlaps(other) for other in taken):
            return str(subnet)
    raise OSError("no network between 10.128.0.0/16 and 10.255.0.0/16 is free")


def _network(route: dict[str, Any]) -> ipaddress.IPv4Network:
    destination = route["dst"]
    return ipaddress.IPv4Network("0.0.0.0/0" if destination == "default" else destination, strict=False)


def _exists(link: str, bridge: str) -> bool:
    """Whether this machine's own network has a link of this name."""
    links = json.loads(_run([*host(bridge), "ip", "-json", "link", "show"]) or "[]")
    return any(each.get("ifname") == link for each in links)


def _batch(bridge: str, *commands: str, namespace: str | None = None) -> None:
    where = ["-netns", namespace] if namespace else []
    _run([*host(bridge), "ip", *where, "-batch", "-"], "\n".join(commands) + "\n")


def _run(command: list[str], stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()} {stdin.strip()!r}")
    return done.stdout


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Keep all other processes of this machine from changing networks for the same purpose."""
    with open("/run/dask-cml-local.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
