from __future__ import annotations

import os
import urllib.request
from pathlib import Path

import pytest
from conftest import separate_networks
from extensions import networks

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


pytestmark = pytest.mark.usefixtures("namespaces")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


def fetched(url: str) -> str | None:
    try:
        return get(url)
    except OSError:
        return None


def left() -> list[str]:
    """Names that the sessions of this state directory have on the machine."""
    bridge = networks.short_name()
    links = os.listdir("/sys/class/net")
    names = os.listdir("/run/netns") if Path("/run/netns").exists() else []
    return [name for name in links + names if name.startswith(bridge)]


def test_sessions_have_addresses_of_their_own_and_the_same_ports(platform, launch, reaches, until):
    assert platform.shares_host_network() is False
    [first] = launch(code=SERVE.format(answer="first", host="0.0.0.0", port=8786))
    [second] = launch(code=SERVE.format(answer="second", host="0.0.0.0", port=8786))
    for session, answer in ((first, "first"), (second, "second")):
        address = reaches(session, "running")["ip_address"]
        until(lambda url=f"http://{address}:8786/", answer=answer: fetched(url) == answer)


def test_loopback_of_a_session_is_out_of_reach(launch, reaches, until):
    code = SERVE.format(answer="private", host="127.0.0.1", port=8100)
    [session] = launch(code=f"print('up', flush=True)\n{code}")
    address = reaches(session, "running")["ip_address"]
    assert fetched(f"http://{address}:8100/") is None
    assert fetched("http://127.0.0.1:8100/") != "private"


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


def test_session_in_a_namespace_can_launch_another(platform, launch, reaches, output_of, until):
    launched = output_of(
        "from dask_cml import local\n"
        f"[session] = local.launch_workers(1, 1, 1, code={FOREVER!r})\n"
        "open('{output}', 'w').write(session['id'])"
    )
    until(lambda: platform.sessions()[-1]["status"] == "running")
    assert platform.sessions()[-1]["id"] == launched
    platform.stop_workers(launched)
    until(lambda: platform.sessions()[-1]["status"] == "stopped")


def test_nothing_is_left_when_the_last_session_ends(platform, launch, reaches):
    stopped, evicted = launch(2, code=FOREVER)
    for session in (stopped, evicted):
        reaches(session, "running")
    assert left()
    platform.stop_workers(stopped["id"])
    reaches(stopped, "stopped")
    platform.evict(evicted["id"])
    assert left() == []


def test_state_directories_do_not_share_networks(platform, launch, reaches, tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    [here] = launch(code=FOREVER)
    address = reaches(here, "running")["ip_address"]
    with monkeypatch.context() as other:
        other.setenv("DASK_CML_LOCAL_DIRECTORY", str(tmp_path))
        separate_networks()
        [there] = platform.launch_workers(1, 1, 1, code=FOREVER)
        try:
            assert reaches(there, "running")["ip_address"].split(".")[:2] != address.split(".")[:2]
        finally:
            platform.evict(there["id"])
        assert left() == []
    assert left()
