"""A network namespace for each session, with a loopback and an address of its own, like CML's pods.

Requires Linux and root. A bridge connects the sessions of a state directory with this machine.
"""

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

#: For applications and public pages, in all sessions.
_PORTS = [8100, 8080]

_NAMESPACES = Path("/run/netns")
#: The candidate networks: 10.128.0.0/16 to 10.255.0.0/16.
_FIRST, _COUNT = 128, 128
_LAST_HOST = 0xFFFE


def check() -> None:
    """Raise a RuntimeError if this machine does not support namespaces. The message says why."""
    lacks = []
    if not sys.platform.startswith("linux"):
        lacks.append("Linux")
    if os.geteuid() != 0:
        lacks.append("root")
    lacks += [program for program in ("ip", "nsenter") if shutil.which(program) is None]
    if lacks:
        raise RuntimeError(f"network namespaces need {', '.join(lacks)}")


def short_name() -> str:
    return "cml" + hashlib.sha256(os.fsencode(state.directory())).hexdigest()[:7]


def network() -> dict[str, Any]:
    own = _allocate()
    return {"ip": own["ip"], "gateway": own["gateway"], "ports": _PORTS, "network": own}


def enter(session: dict[str, Any]) -> list[str]:
    """Create the namespace of a session, and return the words before a command that run it there."""
    own = session["network"]
    _set_up(own)
    return [own["nsenter"], f"--net={_NAMESPACES / own['namespace']}"]


def cut(session_id: str) -> None:
    """Take down a session's link, so that all packets from and to it are lost."""
    own = state.read_json(state.folder_of(session_id) / "session.json")["network"]
    _batch(own["bridge"], f"link set {own['interface']} down")


def _allocate() -> dict[str, str]:
    path = state.directory() / "network.json"
    with _locked():
        known = state.read_json(path) or {"last": 1}
        bridge = short_name()
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
            # The session's PATH may lead to another program.
            "nsenter": shutil.which("nsenter") or "nsenter",
        }
        _make_bridge(plan)
        state.write_json(path, known)
    return plan


def _host(bridge: str) -> list[str]:
    """Return the words before a command that run it in this machine's own network."""
    alias = _host_alias(bridge)
    return ["nsenter", f"--net={alias}"] if alias.exists() else []


def _set_up(plan: dict[str, str]) -> None:
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


def remove(session: dict[str, Any]) -> None:
    """Remove the namespace of a session whose processes have ended. Remove the bridge with the last one."""
    own = session["network"]
    bridge = own["bridge"]
    alias = _host_alias(bridge)
    with _locked():
        # The kernel removes the links of a namespace some time after the namespace.
        if _exists(own["interface"], bridge):
            _batch(bridge, f"link delete {own['interface']}")
        if (_NAMESPACES / own["namespace"]).exists():
            _batch(bridge, f"netns delete {own['namespace']}")
        # A session that is still starting creates the bridge again.
        if [*_NAMESPACES.glob(f"{bridge}-*")] == [alias]:
            if _exists(bridge, bridge):
                _batch(bridge, f"link delete {bridge}")
            _batch(bridge, f"netns delete {alias.name}")


def _host_alias(bridge: str) -> Path:
    """Return a name for this machine's own network, because sessions launch sessions from other networks."""
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
    routes = json.loads(_run([*_host(bridge), "ip", "-json", "-4", "route", "show", "table", "all"]))
    destinations = [route["dst"] for route in routes if route["dst"] != "default"]
    taken = [ipaddress.IPv4Network(destination, strict=False) for destination in destinations]
    start = int(hashlib.sha256(bridge.encode()).hexdigest(), 16)
    for i in range(_COUNT):
        subnet = ipaddress.IPv4Network(f"10.{_FIRST + (start + i) % _COUNT}.0.0/16")
        # The bridge's route takes precedence over a wider one, such as to 10.0.0.0/8.
        if not any(other.prefixlen >= 16 and subnet.overlaps(other) for other in taken):
            return str(subnet)
    raise OSError("no free network between 10.128.0.0/16 and 10.255.0.0/16")


def _exists(name: str, bridge: str) -> bool:
    links = json.loads(_run([*_host(bridge), "ip", "-json", "link", "show"]) or "[]")
    return any(link.get("ifname") == name for link in links)


def _batch(bridge: str, *commands: str, namespace: str | None = None) -> None:
    where = ["-netns", namespace] if namespace else []
    _run([*_host(bridge), "ip", *where, "-batch", "-"], "\n".join(commands) + "\n")


def _run(command: list[str], stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed: {done.stderr.strip()} {stdin.strip()!r}")
    return done.stdout


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Prevent other processes of this machine from changing these networks in the block."""
    with open("/run/dask-cml-local.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
