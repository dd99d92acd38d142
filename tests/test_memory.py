"""Tasks that need more memory than their session has: how they end, and what they cost."""

import asyncio
import contextlib
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import dask
import pytest
from clusters import arrived, log_of, make
from distributed import Client, KilledWorker, get_worker
from distributed.core import Status

from dask_cml import wrapper
from dask_cml.layout import log_path
from dask_cml.local.processes import find
from dask_cml.options import Options, state_directory
from dask_cml.scheduler.health import Health
from dask_cml.sessions.plan import Place, plan_worker
from dask_cml.timing import timing

GIB = 2**30


def plan(**options):
    return plan_worker(Options.read(name="mine", **options), Place(Path("/nowhere")), "mine-0", "tcp://x:1")


def test_dask_workers_share_a_part_of_the_scratch_space():
    name = "DASK_DISTRIBUTED__WORKER__MEMORY__MAX_SPILL"
    assert plan(scratch="10 GB").env[name] == "8000000000"
    assert plan(scratch="10 GB", processes=4, cpu=4).env[name] == "2000000000"
    assert name not in plan(scratch="none").env
    with dask.config.set({"distributed.worker.memory.max-spill": "3 GB"}):
        assert name not in plan(scratch="10 GB").env


def test_a_session_whose_memory_is_full_opens_no_file_to_look_at_it(tmp_path, until):
    """Each open file takes memory of the session, for which the kernel may kill another process."""
    paths = [tmp_path / name for name in ("log", "memory.current", "memory.stat")]
    for path in paths:
        path.touch()
    log, usage, _ = paths

    usage.write_text("90")
    arguments = (wrapper.Log(str(log)), 100, *map(str, paths[1:]))
    watch = threading.Thread(target=wrapper._watch_memory, args=arguments, daemon=True)
    watch.start()
    until(lambda: log.read_text() == "[memory: 90 of 100 bytes]\n")
    with usage.open("r+") as file:
        for path in paths[1:]:
            path.unlink()
        file.write("99")
        file.flush()
        until(lambda: log.read_text().endswith("[memory: 99 of 100 bytes]\n"))
        file.write("no number")
    watch.join()


GB = 10**9
FULL = {
    "name": "lab-3",
    "status": Status.paused,
    "metrics": {"spilled_bytes": {"memory": 9 * GB, "disk": 8 * GB}},
    "extra": {"cml": {"session": "s", "max_spill": 8 * GB}},
    "memory": SimpleNamespace(process=0.9 * 2**30),
    "memory_limit": 2**30,
}


def problem_of(*workers):
    health = Health(None)
    for now in 0.0, timing.pause:
        health.look([SimpleNamespace(address=n, **worker) for n, worker in enumerate(workers)], now)
    return health.problem


def test_the_problem_names_a_full_worker_and_a_remedy():
    what = "worker lab-3 has spilled 8.0 of 8.0 GB and is paused"
    remedy = "scale up, or give workers more memory"
    assert problem_of(FULL) == f"{what}: {remedy}"
    assert problem_of(FULL, FULL) == f"{what}, like 1 more: {remedy}"
    for change in (  # of one that can spill more, or is without dask-cml
        {"extra": {"cml": {"max_spill": None}}},
        {"extra": {}},
        {"metrics": {}},
        {"metrics": {"spilled_bytes": {"disk": 2 * GB}}},
    ):
        words = problem_of({**FULL, **change})
        assert "is paused and starts no tasks: 0.90 of 1.00 GiB memory are used" in words, change


def kill_order(session):
    """Return which processes of a session the kernel kills first, and the other ones."""
    first, others = set(), set()
    for process in find(session.id):
        with contextlib.suppress(OSError):  # it has ended
            adjustment = Path(f"/proc/{process.pid}/oom_score_adj").read_text()
            (first if adjustment == "1000\n" else others).add(process)
    return first, others


@pytest.mark.images
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where processes can ask to be killed first")
async def test_while_a_worker_ends_the_kernel_has_another_choice_than_its_nanny(platform, holds):
    async def running(dask_worker):
        """Wait until a nanny knows that its worker runs."""
        while dask_worker.status != Status.running:
            await asyncio.sleep(0.01)

    async with make(name="mine", n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        await holds(lambda: arrived(cluster) == 1)
        [session] = [session for session in cluster.sessions if session.role == "worker"]
        gone = set()
        for _ in range(2):
            # The worker's process and one that its nanny can spare, and the session's program and the nanny.
            await holds(lambda: [*map(len, kill_order(session))] == [2, 2])
            first, others = kill_order(session)
            assert first.isdisjoint(gone)
            workers = {*cluster.scheduler_info["workers"]}
            await client.run(running, nanny=True)  # a nanny does not replace a worker that dies in its start
            # The resource tracker first: the nanny starts another one only with the next worker.
            for process in sorted(
                first, key=lambda process: "resource_tracker" not in str(process.cmdline())
            ):
                process.kill()
                await holds(lambda killed=process: killed not in find(session.id))
            gone = first
            await holds(lambda old=workers: cluster.scheduler_info["workers"].keys() - old)
        await holds(lambda others=others: kill_order(session)[1] == others and arrived(cluster) == 1)
        for line in log_of(cluster).splitlines():
            assert line.startswith("Cluster mine: worker mine-0 was restarted: its process ended; it crashed")


@pytest.mark.slow
async def test_a_task_that_needs_too_much_ends_and_costs_few_sessions(platform, holds):
    """On nodes that kill all processes of a session over its memory, before its nanny looks."""

    def grow(gib, folder):
        log = log_path(get_worker().name, folder, None)
        _, parts = wrapper._memory_files(GIB)
        blocks = []
        while sum(map(len, blocks)) < gib * GIB:
            blocks.append(b"1" * (20 << 20))
            full = True
            while full and b"[memory: " not in log.read_bytes():  # the kernel may be faster than the wrapper
                stat = dict(line.split() for line in Path(parts).read_text().splitlines())
                full = int(stat.get("anon") or stat["total_rss"]) > 0.9 * GIB
        return sum(map(len, blocks))

    if not platform.settings().memory_limit:
        pytest.skip("this user may not create memory cgroups")
    platform.configure(over_memory="session")
    settings = {"worker.memory.terminate": False, "worker.memory.pause": False}
    settings["scheduler.allowed-failures"] = 1
    with dask.config.set({f"distributed.{key}": value for key, value in settings.items()}):
        cluster = make(name="mine", n_workers=2, memory=1)
    async with cluster, Client(cluster, asynchronous=True) as client:
        for gib in 0.5, 3:
            await client.wait_for_workers(2)
            before = {session.id for session in cluster.sessions}
            future = client.submit(grow, gib, state_directory() / cluster.name, key=f"grow-{gib}")
            if gib < 1:
                assert await future >= gib * GIB
            else:
                with pytest.raises((KilledWorker, MemoryError)):
                    await future
            cluster.scale(2)  # ends the pause before the next launch
            await holds(lambda: arrived(cluster) == 2)
            assert len(before - {session.id for session in cluster.sessions}) <= 2
        for line in log_of(cluster).splitlines():
            assert re.match(r"Worker mine-\d+ lost: out of memory, .* GiB", line), line
