"""What speaks with a cluster must have its keys, which are in their files alone."""

import asyncio
import ipaddress
import os
import socket
import ssl
import stat
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from clusters import make, until_written, write_record
from conftest import processes_of
from cryptography import x509
from distributed import Client, Scheduler
from distributed.comm.registry import get_backend
from distributed.security import Security

from dask_cml import CMLCluster
from dask_cml.options import state_directory
from dask_cml.records import store
from dask_cml.records.store import Record, SchedulerState
from dask_cml.sessions import tls
from dask_cml.sharing.keeper import Link

pytestmark = pytest.mark.usefixtures("light")


async def computes(address, timeout=60, **options):
    client = Client(address, asynchronous=True, timeout=timeout, **options)
    try:
        async with client:
            return await client.submit(sum, [1, 2])
    finally:
        # By itself it does not end a start that failed with a TypeError.
        await client.close()


async def test_a_client_without_the_clusters_keys_gets_nothing(platform):
    async with make(n_workers=1) as cluster:
        address = cluster.scheduler.address
        assert address.startswith("tls://")
        assert await computes(cluster) == 3
        for kind in Security, Security.temporary:
            for protocol in "tls", "tcp":
                security = kind()
                security.require_encryption = False
                with pytest.raises((OSError, TypeError)):
                    await computes(address.replace("tls", protocol), timeout=2, security=security)


@pytest.mark.slow
async def test_without_keys_any_program_with_the_address_can_connect(platform):
    async with make(name="open", n_workers=1, security=False) as cluster:
        assert cluster.scheduler_address.startswith("tcp://")
        assert cluster.scheduler_address in repr(cluster)
        assert not (state_directory() / "open" / "keys").exists()
        for address in cluster, cluster.scheduler_address, "cml://open":
            assert await computes(address) == 3
        with pytest.raises(RuntimeError, match="encryption required"):
            await computes("cml://open", security=Security(require_encryption=True))


@pytest.mark.parametrize("scheme", ["tcp", pytest.param("ws", marks=pytest.mark.slow)])
async def test_nobody_leaves_a_cluster_with_keys_for_an_address_without_encryption(state, scheme):
    """A stranger's scheduler would get the tasks. For ``ws://``, Dask requires no encryption."""
    keys, files = tls.as_files(True, state_directory() / "mine")
    async with Scheduler(host=f"{scheme}://127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as stranger:
        seen = SchedulerState(address=stranger.address)
        write_record(Record("mine", scheduler=seen, security=tls.paths(keys)))
        tls.write(files)
        with pytest.raises(OSError, match="Timed out"):
            await computes("cml://mine", timeout=1)
        refused = pytest.raises(OSError, match="expected tls://")
        with refused:
            await get_backend("cml").get_connector().connect("mine")
        with refused:
            await store.read("mine").ask_scheduler("identity", 30)
        with refused:
            await Link("me", "mine", "me").join(stranger.address, keys, "id")
        assert {*stranger.clients} == {"fire-and-forget"}


@pytest.mark.slow
async def test_no_link_leads_to_a_server_that_took_the_dashboards_port_first(platform, holds):
    """On a laptop, another user may listen there. Dask then serves the dashboard at another port."""
    platform.configure(quota={"sessions": 0}, over_quota="wait")
    starting = asyncio.ensure_future(make(name="mine", scheduler_args=[]))
    await holds(lambda: platform.sessions())
    [session] = platform.sessions()
    with socket.create_server(("127.0.0.1", urlsplit(session["app_url"]).port)):
        platform.configure(quota=None)
        cluster = await starting
        async with cluster:
            await until_written(cluster)
            assert "dashboard" in cluster.scheduler_info["services"]
            assert session["app_url"] not in cluster._repr_html_().partition("Sessions:")[0]
            assert cluster.dashboard_link == ""
            assert store.read("mine").dashboard_link is None


@pytest.mark.images
async def test_tasks_may_have_open_clusters_of_their_own(platform):
    """With its keys, the environment does not require encryption of all that a session does."""

    def in_a_task():
        from distributed import Client, LocalCluster

        options = {"processes": False, "protocol": "tcp", "dashboard_address": None}
        with LocalCluster(n_workers=1, **options) as own, Client(own, set_as_default=False) as client:
            return client.submit(sum, [1, 2]).result()

    async with make(n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        assert await client.submit(in_a_task) == 3


async def test_keys_are_for_their_owner_only_and_go_with_the_cluster(platform, holds):
    """They are in no command line, launch, environment and log."""
    local = Path(os.environ["DASK_CML_LOCAL_DIRECTORY"])
    async with make(n_workers=1) as cluster:
        await holds(lambda: cluster.scheduler_info["workers"])
        folder = state_directory() / cluster.name
        files = [*(folder / "keys").iterdir()]
        assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "keys")} == {0o700}
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        keys = [file.read_text() for file in files if file.name.endswith("_key.pem")]
        secrets = {line for key in keys for line in key.splitlines() if len(line) > 40}
        assert secrets
        texts = [cluster.job_script()]
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if environment.get("DASK_CML_LOCAL_DIRECTORY") == str(local):
                    texts += [*process.cmdline(), *environment.values()]
            except psutil.Error:
                continue
        for directory in (local, folder):
            found = [file for file in directory.rglob("*") if file.is_file() and "keys" not in file.parts]
            texts += [file.read_text(errors="replace") for file in found]
        assert len(texts) > 10
        assert not [secret for secret in secrets if any(secret in text for text in texts)]
    assert not folder.exists()


def test_keys_are_valid_where_the_clock_is_slow(tmp_path):
    """The nodes of a cluster have clocks of their own."""
    begun = datetime.now(timezone.utc)
    _, files = tls.as_files(True, tmp_path)
    certificate = x509.load_pem_x509_certificate(files[tmp_path / "keys" / "tls_ca_file.pem"].encode())
    assert certificate.not_valid_before_utc < begun - timedelta(minutes=55)
    assert certificate.not_valid_after_utc > begun + timedelta(days=364)


@pytest.mark.images
async def test_a_given_security_is_used_unchanged(platform, tmp_path):
    """Its keys may be in files, also in those of their certificates."""
    security = Security.temporary()
    (tmp_path / "ca").write_text(security.tls_ca_file)
    security.tls_ca_file = str(tmp_path / "ca")
    for role in ("client", "scheduler"):
        file = tmp_path / f"{role}.pem"
        file.write_text("\n".join(getattr(security, f"tls_{role}_{part}") for part in ("cert", "key")))
        setattr(security, f"tls_{role}_cert", str(file))
        setattr(security, f"tls_{role}_key", None)
    async with make(n_workers=1, security=security) as cluster:
        assert cluster.security.tls_scheduler_key == str(tmp_path / "scheduler.pem")
        assert await computes(cluster.scheduler.address, security=security) == 3
    assert security.tls_client_key is None
    assert (tmp_path / "ca").exists()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Keys in files of a home folder, by their names there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = Security.temporary()
    contents = {"ca.pem": keys.tls_ca_file, "cert.pem": keys.tls_client_cert, "key.pem": keys.tls_client_key}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.pem").touch()
    os.mkfifo(tmp_path / "pipe")

    def files(ca="~/ca.pem", key="~/key.pem"):
        pairs = {f"tls_{role}_cert": "$HOME/cert.pem" for role in ("client", "scheduler", "worker")}
        pairs |= {f"tls_{role}_key": key for role in ("client", "scheduler", "worker")}
        return Security(require_encryption=True, tls_ca_file=ca, **pairs)

    return files


def test_paths_of_keys_may_be_below_the_home_folder(files, tmp_path):
    security, written = tls.as_files(files(), tmp_path / "cluster")
    assert not written
    assert security.tls_ca_file == str(tmp_path / "ca.pem")
    assert security.tls_worker_cert == str(tmp_path / "cert.pem")
    assert security.get_connection_args("worker")["ssl_context"]


async def test_an_unusable_security_is_refused_before_anything_is_launched(platform, files):
    with pytest.raises(ValueError, match=r"invalid security=.*expected a Security with tls_ca_file"):
        await make(security=Security(require_encryption=True))
    for name, field in {"ca": "tls_ca_file", "key": "tls_client_key"}.items():
        for wrong in "missing.pem", "folder", "empty.pem", "pipe", "ca.pem/key.pem":
            words = f"whose {field} is a PEM .*, got '{os.environ['HOME']}/{wrong}' \\("
            with pytest.raises(ValueError, match=f"invalid security: .* {words}"):
                await make(security=files(**{name: f"~/{wrong}"}))
    assert platform.list_workers() == []


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
    options = {"forward_dashboard": True, "processes": 2, "cpu": 2, "worker_args": [], "scheduler_args": []}
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
