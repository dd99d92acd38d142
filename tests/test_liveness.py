"""Which clusters are alive: the answers of their schedulers, in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import time

import pytest
from distributed import Scheduler
from distributed.core import rpc
from distributed.security import Security

from dask_cml.liveness import identities, is_alive
from dask_cml.record import Record
from dask_cml.registry import claim, records


@contextlib.asynccontextmanager
async def scheduler(security=None):
    async with Scheduler(port=0, dashboard=False, dashboard_address=":0", security=security) as running:
        yield running


async def test_scheduler_is_known_by_its_id():
    async with scheduler() as running:
        own = Record("a", scheduler_address=running.address, scheduler_id=running.id)
        assert await is_alive(own)
        # On CML an address is soon another scheduler's.
        assert not await is_alive(dataclasses.replace(own, scheduler_id="Scheduler-other"))
    assert not await is_alive(own, timeout=0.5)


async def test_scheduler_whose_id_is_not_in_the_record_is_known_by_its_cluster_s_name():
    async with scheduler() as running:
        record = Record("a", scheduler_address=running.address)
        assert not await is_alive(record)
        async with rpc(running.address) as own:
            await own.set_metadata(keys=["cluster-manager-info"], value={"name": "a"})
        assert await is_alive(record)
        assert not await is_alive(dataclasses.replace(record, name="b"))


async def test_record_without_an_address_is_not_alive():
    assert not await is_alive(Record("a"))
    assert await identities([]) == {}


async def test_keys_of_a_scheduler_are_found_by_the_record(tmp_path):
    pytest.importorskip("cryptography")
    security = Security.temporary()
    files = {}
    for key in ("tls_ca_file", "tls_client_cert", "tls_client_key"):
        (tmp_path / key).write_text(getattr(security, key))
        files[key] = str(tmp_path / key)
    async with scheduler(security) as running:
        record = Record("a", scheduler_address=running.address, scheduler_id=running.id)
        assert await is_alive(dataclasses.replace(record, security=files))
        assert await is_alive(record, security)
        assert not await is_alive(record, Security.temporary(), timeout=1)
        assert not await is_alive(record, timeout=1)
        (tmp_path / "tls_client_key").unlink()
        assert not await is_alive(dataclasses.replace(record, security=files))


async def test_among_two_hundred_records_those_that_are_alive_are_found(tmp_path):
    """Half of them stale: refused, or silent as where a pod was."""
    with contextlib.ExitStack() as stack:
        # A full backlog answers nobody, as does an address that nobody has any more.
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(silent.getsockname())
        refusing = stack.enter_context(socket.socket())
        refusing.bind(("127.0.0.1", 0))
        stale = [f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (silent, refusing)]
        async with scheduler() as running:
            for i in range(100):
                live = Record(f"live-{i}", scheduler_address=running.address, scheduler_id=running.id)
                claim(live, tmp_path)
                claim(Record(f"stale-{i}", scheduler_address=stale[i % 2]), tmp_path)
            before = descriptors()
            found = await identities(records(tmp_path), timeout=10)
            end = time.monotonic()
            assert set(found) == {f"live-{i}" for i in range(100)}
            assert {each["id"] for each in found.values()} == {running.id}
            while descriptors() > before:  # the silent ones' are not kept until the system gives up
                assert time.monotonic() < end + 20
                await asyncio.sleep(0.01)


def descriptors():
    return len(os.listdir("/proc/self/fd"))
