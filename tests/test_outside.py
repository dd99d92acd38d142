"""A client outside of CML: the commands and the program of the documentation, through a real SSH server."""

import getpass
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from distributed.comm.addressing import get_address_host_port
from ports import free_port, listens

from dask_cml import CMLCluster
from dask_cml.records import store

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
#: It is not on PATH of users who are not root.
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin")
WORK = """
print(client.submit(sum, [1, 2]).result())
[data] = client.scatter([[3, 4]])
print(client.submit(sum, data).result(), len(client.scheduler_info()["workers"]))
import sys
print("dask_cml" in sys.modules)
"""


def blocks(language):
    """The blocks of the section, whose steps are indented."""
    section = PAGE.read_text().partition("## Connect from outside of CML")[2].partition("\n## ")[0]
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```$", section, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


@pytest.fixture
def ssh(tmp_path, until):
    """The options by which ``ssh`` connects to a server of this machine, and its port."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("needs ssh and sshd")
    if os.geteuid() == 0:  # the server's own service makes it
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    folder = tmp_path / "ssh"
    folder.mkdir(mode=0o700)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    port = free_port()
    (folder / "server").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        "StrictModes no\nPermitRootLogin yes\nPidFile none\n"
    )
    (folder / "client").write_text(
        f"IdentityFile {folder}/user\nUserKnownHostsFile {folder}/known\nStrictHostKeyChecking accept-new\n"
        "BatchMode yes\n"
    )
    with subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "server"], stderr=subprocess.DEVNULL) as server:
        try:
            until(lambda: listens(port))
            yield folder / "client", port
        finally:
            server.terminate()


@pytest.mark.images
def test_a_client_outside_connects_by_the_commands_of_the_page(platform, state, ssh, until, tmp_path):
    options, server = ssh
    _endpoint, commands = blocks("sh")
    [program] = blocks("python")
    outside = tmp_path / "laptop"
    outside.mkdir()
    with CMLCluster(name="night", n_workers=1, platform="local") as cluster:
        cluster.wait_for_workers(1)
        record = store.read("night")
        _, scheduler = get_address_host_port(record.scheduler.address)
        here = free_port()
        for text, real in {
            "9750": str(server),
            "cdsw@localhost": f"{getpass.getuser()}@127.0.0.1",
            ".dask-cml/night": shlex.quote(str(record.folder)),
            "8786:100.66.0.18:8786": f"{here}:127.0.0.1:{scheduler}",
            "ssh ": f"ssh -F {options} ",
        }.items():
            assert text in commands
            commands = commands.replace(text, real)
        copy, forward = commands.splitlines()
        subprocess.run(copy, shell=True, cwd=outside, check=True)
        assert (outside / "keys" / "tls_client_key.pem").stat().st_mode & 0o77 == 0
        assert "127.0.0.1:8786" in program
        program = program.replace("127.0.0.1:8786", f"127.0.0.1:{here}") + WORK
        with subprocess.Popen(shlex.split(forward)) as tunnel:
            try:
                until(lambda: listens(here))
                result = subprocess.run(
                    [sys.executable, "-c", program],
                    cwd=outside,
                    env={"HOME": str(outside), "PATH": ""},
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=240,
                )
            finally:
                tunnel.terminate()
    assert result.stdout.splitlines() == ["3", "7 1", "False"]
