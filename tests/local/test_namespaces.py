from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import pytest
from testbed import networks

from .conftest import FOREVER

SERVE = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write({answer!r}.encode())
http.server.HTTPServer(({host!r}, {port}), Handler).serve_forever()
"""


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("namespaces")]


def fetched(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.read().decode()
    except OSError:
        return None


def left() -> list[str]:
    """Names that the sessions of this state directory have on the machine."""
    bridge = networks.short_name()
    links = os.listdir("/sys/class/net")
    names = os.listdir("/run/netns") if Path("/run/netns").exists() else []
    return [name for name in links + names if name.startswith(bridge)]


def test_sessions_have_addresses_of_their_own_and_the_same_ports(platform, launch, reaches, until):
    assert not platform.shares_host_network()
    hosts = {"first": "0.0.0.0", "second": "0.0.0.0", "private": "127.0.0.1"}
    urls = {}
    for answer, host in hosts.items():
        [session] = launch(code=SERVE.format(answer=answer, host=host, port=8786))
        urls[answer] = f"http://{reaches(session, 'running')['ip_address']}:8786/"
    for answer in "first", "second":
        until(lambda answer=answer: fetched(urls[answer]) == answer)
    assert fetched(urls["private"]) is None
    assert fetched("http://127.0.0.1:8786/") != "private"


def test_sessions_reach_each_other_and_know_their_own_address(launch, reaches, output_of, until):
    [server] = launch(code=SERVE.format(answer="hello", host="0.0.0.0", port=8786))
    address = reaches(server, "running")["ip_address"]
    until(lambda: fetched(f"http://{address}:8786/"))
    answer, own, known, port = output_of(
        "import os, urllib.request\n"
        "from distributed.utils import get_ip\n"
        f"answer = urllib.request.urlopen('http://{address}:8786/').read().decode()\n"
        "print(answer, get_ip(), os.environ['CDSW_IP_ADDRESS'], os.environ['CDSW_APP_PORT'],"
        " file=open('{output}', 'w'))"
    ).split()
    assert answer == "hello"
    assert own == known != address
    assert port == "8100"


def test_nothing_is_left_when_the_last_session_ends(platform, launch, reaches):
    stopped, evicted = launch(2, code=FOREVER)
    for session in (stopped, evicted):
        reaches(session, "running")
    assert left()
    platform.stop_workers(stopped["id"])
    reaches(stopped, "stopped")
    platform.evict(evicted["id"])
    assert left() == []
