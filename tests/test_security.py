"""What speaks with a cluster must have its keys, which are in their files alone."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from clusters import make, until_written, write_record
from cryptography import x509
from distributed import Client, Scheduler
from distributed.comm.registry import get_backend
from distributed.security import Security

from dask_cml.options import state_directory
from dask_cml.records import store
from dask_cml.records.record import Record, SchedulerState
from dask_cml.sessions import tls
from dask_cml.sharing.link import Link

pytestmark = pytest.mark.usefixtures("light")


@pytest.fixture
async def cluster(platform):
    async with make(n_workers=1) as cluster:
        yield cluster


async def computes(address, timeout=60, **options):
    client = Client(address, asynchronous=True, timeout=timeout, **options)
    try:
        async with client:
            return await client.submit(sum, [1, 2])
    finally:
        # By itself it does not end a start that failed with a TypeError.
        await client.close()


async def test_a_client_of_the_cluster_finds_the_keys(cluster):
    assert cluster.scheduler.address.startswith("tls://")
    assert await computes(cluster) == 3


@pytest.mark.parametrize(
    ("keys", "protocol"),
    [
        ("none", "tcp"),
        ("others", "tls"),
        pytest.param("none", "tls", marks=[pytest.mark.slow, pytest.mark.images]),
        pytest.param("others", "tcp", marks=[pytest.mark.slow, pytest.mark.images]),
    ],
)
async def test_a_client_without_the_clusters_keys_gets_nothing(cluster, protocol, keys):
    address = cluster.scheduler.address.replace("tls", protocol)
    security = Security() if keys == "none" else Security.temporary()
    security.require_encryption = False
    with pytest.raises((OSError, TypeError)):
        await computes(address, timeout=5, security=security)


async def test_without_keys_any_program_with_the_address_can_connect(platform):
    async with make(name="open", n_workers=1, security=False) as cluster:
        assert cluster.scheduler_address.startswith("tcp://")
        assert cluster.scheduler_address in repr(cluster)
        assert not (state_directory() / "open" / "keys").exists()
        for address in cluster, cluster.scheduler_address, "cml://open":
            assert await computes(address) == 3


async def test_a_client_that_requires_encryption_refuses_a_cluster_without_keys(platform):
    async with make(name="open", security=False):
        with pytest.raises(RuntimeError, match="encryption required"):
            await computes("cml://open", security=Security(require_encryption=True))


@pytest.mark.parametrize("scheme", ["ws", "tcp"])
async def test_nobody_leaves_a_cluster_with_keys_for_an_address_without_encryption(state, scheme):
    """A stranger's scheduler would get the tasks. For ``ws://``, Dask requires no encryption."""
    keys, files = tls.as_files(True, state_directory() / "mine")
    async with Scheduler(host=f"{scheme}://127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as stranger:
        seen = SchedulerState(address=stranger.address)
        write_record(Record("mine", scheduler=seen, security=tls.paths(keys)))
        tls.write(files)
        with pytest.raises(OSError, match="Timed out"):
            await computes("cml://mine", timeout=2)
        refused = pytest.raises(OSError, match="expected tls://")
        with refused:
            await get_backend("cml").get_connector().connect("mine")
        with refused:
            await store.read("mine").ask_scheduler("identity", 30)
        with refused:
            await Link("me", "mine", "me").join(stranger.address, keys, "id")
        assert {*stranger.clients} == {"fire-and-forget"}


async def test_no_link_leads_to_a_server_that_took_the_dashboards_port_first(platform, holds):
    """On a laptop, another user may listen there. Dask then serves the dashboard at another port."""
    platform.configure(start_delay=1)
    starting = asyncio.ensure_future(make(name="mine", scheduler_args=[]))
    await holds(lambda: platform.sessions())
    [session] = platform.sessions()
    with socket.create_server(("127.0.0.1", urlsplit(session["app_url"]).port)):
        cluster = await starting
        async with cluster:
            await until_written(cluster)
            assert "dashboard" in cluster.scheduler_info["services"]
            assert session["app_url"] not in cluster._repr_html_().partition("Sessions:")[0]
            assert cluster.dashboard_link == ""
            assert store.read("mine").dashboard_link is None


@pytest.mark.slow
@pytest.mark.images
async def test_tasks_may_have_open_clusters_of_their_own(cluster):
    """With its keys, the environment does not require encryption of all that a session does."""

    def in_a_task():
        from distributed import Client, LocalCluster

        options = {"processes": False, "protocol": "tcp", "dashboard_address": None}
        with LocalCluster(n_workers=1, **options) as own, Client(own, set_as_default=False) as client:
            return client.submit(sum, [1, 2]).result()

    async with Client(cluster, asynchronous=True) as client:
        assert await client.submit(in_a_task) == 3


async def test_keys_are_for_their_owner_only_and_go_with_the_cluster(platform):
    async with make() as cluster:
        folder = state_directory() / cluster.name
        files = [*(folder / "keys").iterdir()]
        assert files
        assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "keys")} == {0o700}
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert not folder.exists()


async def test_no_key_in_command_lines_launches_environments_and_logs(cluster, platform, holds):
    await holds(lambda: cluster.scheduler_info["workers"])
    folder, local = state_directory() / cluster.name, Path(os.environ["DASK_CML_LOCAL_DIRECTORY"])
    secrets = {
        line
        for file in (folder / "keys").glob("*_key.pem")
        for line in file.read_text().splitlines()
        if len(line) > 40
    }
    assert secrets
    texts = [cluster.job_script()]
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get("DASK_CML_LOCAL_DIRECTORY") == str(local):
                texts += [*process.cmdline(), *environment.values()]
        except psutil.Error:
            continue
    assert len(texts) > 10
    for directory in (local, folder):
        files = [file for file in directory.rglob("*") if file.is_file() and "keys" not in file.parts]
        texts += [file.read_text(errors="replace") for file in files]
    assert not [secret for secret in secrets if any(secret in text for text in texts)]


def test_keys_are_valid_where_the_clock_is_slow(tmp_path):
    """The nodes of a cluster have clocks of their own."""
    begun = datetime.now(timezone.utc)
    _, files = tls.as_files(True, tmp_path)
    certificate = x509.load_pem_x509_certificate(files[tmp_path / "keys" / "tls_ca_file.pem"].encode())
    assert certificate.not_valid_before_utc < begun - timedelta(minutes=55)
    assert certificate.not_valid_after_utc > begun + timedelta(days=364)


@pytest.mark.slow
@pytest.mark.images
async def test_a_given_security_is_used_unchanged(platform, tmp_path):
    security = Security.temporary()
    for field in ("tls_ca_file", "tls_scheduler_key"):
        (tmp_path / field).write_text(getattr(security, field))
        setattr(security, field, str(tmp_path / field))
    async with make(n_workers=1, security=security) as cluster:
        assert cluster.security.tls_scheduler_key == str(tmp_path / "tls_scheduler_key")
        assert await computes(cluster.scheduler.address, security=security) == 3
    assert (tmp_path / "tls_scheduler_key").exists()


@pytest.mark.slow
@pytest.mark.images
async def test_keys_may_be_in_the_files_of_their_certificates(platform, tmp_path):
    security = Security.temporary()
    for role in ("client", "scheduler", "worker"):
        file = tmp_path / f"{role}.pem"
        parts = [getattr(security, f"tls_{role}_{part}") for part in ("cert", "key")]
        file.write_text("\n".join(parts))
        setattr(security, f"tls_{role}_cert", str(file))
        setattr(security, f"tls_{role}_key", None)
    async with make(n_workers=1, security=security) as cluster:
        assert await computes(cluster.scheduler.address, security=security) == 3
    assert security.tls_client_key is None


async def test_an_incomplete_security_is_refused_before_anything_is_launched(platform):
    with pytest.raises(ValueError, match=r"invalid security=.*expected a Security with tls_ca_file"):
        await make(security=Security(require_encryption=True))
    assert platform.list_workers() == []


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


@pytest.mark.parametrize("wrong", ["~/missing.pem", "~/folder", "~/empty.pem", "~/pipe", "~/ca.pem/key.pem"])
@pytest.mark.parametrize("name", ["ca", "key"])
async def test_a_missing_file_of_keys_is_refused_before_anything_is_launched(platform, files, name, wrong):
    field = {"ca": "tls_ca_file", "key": "tls_client_key"}[name]
    path = wrong.replace("~", os.environ["HOME"])
    with pytest.raises(ValueError, match=f"invalid security: .* whose {field} is a PEM .*, got '{path}' \\("):
        await make(security=files(**{name: wrong}))
    assert platform.list_workers() == []
