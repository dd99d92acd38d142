"""A cluster's address is its name, ``cml://<name>``: for processes that know nothing else of it."""

import asyncio
import contextlib
import dataclasses
import os
import re
import socket
import subprocess
import sys

import dask
import pytest
from clusters import end, sessions, write_record, write_scheduler
from distributed import Client, Scheduler
from distributed.core import rpc
from ports import free_port
from tornado.iostream import IOStream

from dask_cml import CMLCluster, CMLError, NoSuchCluster, address
from dask_cml.address import CMLBackend
from dask_cml.options import state_directory
from dask_cml.protocol import END
from dask_cml.records import store
from dask_cml.records.store import Maker, Record, SchedulerState, cluster_address
from dask_cml.sessions import tls
from dask_cml.timing import timing

LOADER = "distributed.client.security-loader"
NAME = "night shift, 50%"
ADDRESS = "cml://night%20shift%2C%2050%25"


def run(program, folder):
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cluster(shared_platform):
    with CMLCluster(
        n_workers=2, name=NAME, platform="local", scheduler_args=["--no-dashboard"], quiet=True
    ) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def scheduler():
    """A scheduler in this process, as a stand-in for a cluster's."""
    async with Scheduler(port=0, dashboard=False, dashboard_address="127.0.0.1:0") as running:
        yield running


def lead_to(running, name):
    """Have the record of a cluster say that its scheduler is this one."""
    record = store.read(name)
    found = SchedulerState(address=running.address)
    write_scheduler(dataclasses.replace(record, scheduler=found), state_directory() / name)


@pytest.mark.images
async def test_the_link_to_the_dashboard_is_the_clusters(cluster, holds):
    async with (
        CMLCluster(name="linked", platform="local", asynchronous=True, quiet=True) as linked,
        Client("cml://linked", asynchronous=True) as client,
        Client(cluster.scheduler_address, asynchronous=True) as without,
    ):
        await holds(lambda: client.dashboard_link == linked.dashboard_link)
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/status", client.dashboard_link)
        assert client.dashboard_link in client._repr_html_()
        assert without.dashboard_link is None  # its scheduler has no dashboard
    async with Client(processes=False, dashboard_address=":0", asynchronous=True) as local:
        assert local.dashboard_link == local.cluster.dashboard_link


async def test_a_client_connects_by_the_plain_address_and_each_representation_shows_the_name(cluster):
    assert cluster.scheduler_address == cluster_address(NAME) == ADDRESS
    assert repr(cluster).startswith(f"CMLCluster({NAME}, '{ADDRESS}', workers=")
    assert ADDRESS in cluster._repr_html_()
    async with Client(cluster.scheduler.address, asynchronous=True) as client:
        assert await client.submit(sum, [1, 2]) == 3


DIRECT = f"""
import sys, time
from distributed import Client
with Client("{ADDRESS}") as client:
    while not client.connection_args["ssl_context"]:  # a thread gives the client its keys
        time.sleep(0.01)
    data = client.scatter([1, 2], direct=True)
    print(client.submit(sum, data).result(), [name for name in sys.modules if name == "dask_cml.cluster"])
"""


def test_a_client_without_our_import_sends_data_directly_to_workers(cluster, tmp_path):
    assert run(DIRECT, tmp_path) == "3 []\n"


def test_the_users_own_loader_stays():
    for configured, left in (None, "dask_cml.address.load_security"), ("mine.load", "mine.load"):
        with dask.config.set({LOADER: configured}):
            CMLBackend()
            assert dask.config.get(LOADER) == left


def test_importing_it_changes_no_configuration(tmp_path):
    code = "import copy, dask.config as c; before = copy.deepcopy(c.config); import dask_cml"
    assert run(f"{code}; print(c.config == before)", tmp_path) == "True\n"


@pytest.fixture(params=[True, False], ids=["tls", "tcp"])
def mute(platform, request, monkeypatch):
    """A cluster whose scheduler's address accepts connections and never answers, as behind a mesh."""
    monkeypatch.setattr(timing, "answer", 1.0)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
    ):
        keys, files = tls.as_files(request.param, state_directory() / "mute")
        location = f"127.0.0.1:{silent.getsockname()[1]}"
        address = f"{'tls' if request.param else 'tcp'}://{location}"
        scheduler = SchedulerState(address=address, session="aaaabbbbccccdddd")
        maker = dataclasses.replace(Maker.this_process(), user="ana")
        fields = {"maker": maker, "options": {"platform": "local"}, "scheduler": scheduler}
        write_record(Record("mute", security=tls.paths(keys), **fields))
        tls.write(files)
        yield "mute"


def chain(error):
    """Return the messages that a traceback shows: of an error, and of the errors behind it."""
    return "" if error is None else f"{error}\n{chain(error.__cause__ or error.__context__)}"


@pytest.mark.slow
async def test_a_peer_that_accepts_and_never_answers_ends_a_connection_in_time(mute, monkeypatch):
    other = "user ana created the cluster, and this process belongs to user ben"
    reason = "Timed out|accepts connections, but did not answer within 1 s"
    for user in "ana", "ben":
        monkeypatch.setenv("CDSW_CREATOR", user)
        with pytest.raises(CMLError) as remote:
            await asyncio.wait_for(CMLCluster.from_name("mute", asynchronous=True, quiet=True), 60)
        assert (other in str(remote.value)) == (user == "ben")
        assert ("run `dask cml delete mute`" in str(remote.value)) == (user == "ana")
        with pytest.raises(OSError, match=reason) as client:
            await asyncio.wait_for(Client("cml://mute", asynchronous=True), 60)
        assert (other in chain(client.value)) == (user == "ben")
    async with rpc("cml://mute") as there:
        with pytest.raises(OSError, match=reason):
            await asyncio.wait_for(there.identity(), 60)


async def test_a_client_waits_for_no_cluster_whose_creator_died_early_nor_while_the_program_exits(platform):
    gone = dataclasses.replace(Maker.this_process(), pid=2**22 + 1)
    write_record(Record("soon", maker=gone))
    with pytest.raises(
        NoSuchCluster, match="ended before its scheduler answered; run `dask cml delete soon`"
    ):
        await asyncio.wait_for(Client("cml://soon", asynchronous=True, timeout=600), 60)
    await asyncio.get_running_loop().shutdown_default_executor()  # as the interpreter does
    with pytest.raises(OSError, match=r"not connected: .*shutdown"):
        await CMLBackend().get_connector().connect("soon")


@pytest.mark.parametrize("is_listed", [False, True])
async def test_a_client_of_a_cluster_whose_scheduler_has_ended_says_so_once(
    platform, caplog, monkeypatch, is_listed
):
    """Dask's own error says only that its time is up."""
    scheduler = SchedulerState(address=f"tcp://127.0.0.1:{free_port()}", session="aaaabbbb")
    creator = dataclasses.replace(Maker.this_process(), pid=2**22 + 1)
    write_record(Record("gone", maker=creator, scheduler=scheduler, launches=sessions(aaaabbbb="scheduler")))
    if is_listed:
        monkeypatch.setattr(store, "load_platform", lambda _: platform)
        monkeypatch.setattr(platform, "list_workers", lambda: [{"id": "aaaabbbb", "status": "stopped"}])
    else:
        end(store.read("gone"), "aaaabbbb")
    session = "scheduler's session aaaabbbb"
    why = f"its {session}" if is_listed else f"the program of its {session}"
    words = f"Cluster gone not connected: {why} has ended; run `dask cml delete gone`"
    while words not in caplog.text:
        with pytest.raises(OSError, match="Timed out"):
            await Client("cml://gone", asynchronous=True, timeout=1)
    assert caplog.text.count(words) == 1


async def test_a_client_whose_cluster_is_gone_closes_at_once(platform, caplog, holds):
    write_record(Record("gone"))
    async with scheduler() as running:
        lead_to(running, "gone")
        async with Client("cml://gone", asynchronous=True) as client:
            await holds(lambda: END in client._event_handlers)
            store.remove(store.read("gone"))
            await running.close()
            await holds(lambda: client.status == "closed")
    assert caplog.text.count("Client disconnected from cluster gone, which has ended: no cluster named") == 1
    assert "Failed to reconnect" not in caplog.text


async def test_a_connection_that_closes_before_tls_begins_is_no_answer(platform, monkeypatch):
    def start_tls(stream, *arguments, **more):
        stream.close()  # as by the other end
        return real(stream, *arguments, **more)

    real = IOStream.start_tls
    monkeypatch.setattr(IOStream, "start_tls", start_tls)
    keys, files = tls.as_files(True, state_directory() / "shut")
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = SchedulerState(address=f"tls://127.0.0.1:{server.getsockname()[1]}")
        write_record(Record("shut", scheduler=found, security=tls.paths(keys)))
        tls.write(files)
        for connect in store.read("shut").ask_scheduler, address.CMLConnector().connect:
            with pytest.raises(OSError, match="not idle"):
                await connect("shut", timeout=5)


async def test_a_client_that_is_closed_while_it_connects_again_closes_without_words(
    platform, caplog, holds, monkeypatch
):
    async def connect(client, timeout):
        tries.append(timeout)
        raise OSError("no scheduler")

    tries = []
    write_record(Record("silent"))
    async with scheduler() as running:
        lead_to(running, "silent")
        async with Client("cml://silent", asynchronous=True) as client:
            monkeypatch.setattr(address, "_dask_ensure_connected", connect)
            await running.close()
            await holds(lambda: len(tries) > 1)
    assert client.status == "closed"
    assert "Failed to reconnect" not in caplog.text


@pytest.mark.images
async def test_a_client_connects_again_after_the_record_could_not_be_read_for_a_while(
    platform, caplog, holds
):
    write_record(Record("moves"))
    folder = state_directory() / "moves"
    async with scheduler() as first, scheduler() as second:
        lead_to(first, "moves")
        async with Client("cml://moves", asynchronous=True) as client:
            folder.parent.chmod(0o770)
            await first.close()
            await holds(lambda: f"moves not connected: cannot read the record in {folder}" in caplog.text)
            folder.parent.chmod(0o700)
            lead_to(second, "moves")
            await holds(lambda: client.scheduler_info().get("id") == second.id)
    assert "has ended" not in caplog.text


SCRIPT = """
import time
from distributed import Client

with Client("cml://lab") as client, Client("cml://lab"):
    print(client.submit(sum, [1, 2]).result(), flush=True)
    client.submit(time.sleep, 600).result()
"""


@pytest.mark.images
async def test_a_script_reads_what_the_cluster_tells_its_keeper_and_ends_with_it(
    platform, light, tmp_path, caplog
):
    options = {"name": "lab", "platform": "local", "asynchronous": True, "quiet": True}
    async with CMLCluster(**options) as cluster, Client("cml://lab", asynchronous=True):
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        # Whether Dask notes at INFO that it sent something too late depends on the machine.
        pipes["env"] = {**os.environ, "DASK_LOGGING__DISTRIBUTED": "warning"}
        script = await asyncio.create_subprocess_exec(sys.executable, "-c", SCRIPT, cwd=tmp_path, **pipes)
        try:
            line = await asyncio.wait_for(script.stderr.readline(), 240)
            cluster.scale(1)
            assert await asyncio.wait_for(script.stdout.readline(), 240) == b"3\n"
            await (await CMLCluster.from_name("lab", asynchronous=True, quiet=True)).shutdown()
            # Dask's client would wait for ten minutes.
            _, error = await asyncio.wait_for(script.communicate(), 240)
        finally:
            with contextlib.suppress(ProcessLookupError):
                script.kill()
    told = "Cluster lab cannot run all tasks: 1 task waits, but the cluster has no workers: call "
    assert line.decode() == f"{told}cluster.scale(n) or cluster.adapt()\n"
    lines = error.decode().splitlines()
    assert "cannot run" not in error.decode()  # two clients, one line
    assert "cannot run" not in caplog.text  # a client of the process that keeps it
    assert script.returncode == 1
    cancelled = ("distributed.client.FutureCancelledError", "concurrent.futures._base.CancelledError")
    assert any(line.startswith(cancelled) for line in lines), lines
    # The program's own thread may print its error first.
    logged = "Client disconnected from cluster lab, which has ended: closed by "
    assert sum(line.startswith(logged) for line in lines) in (1, 2), lines
    assert sum(line.startswith("Traceback") for line in lines) == 1
