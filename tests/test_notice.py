"""The notice before the platform stops a session: its data moves, whichever processes get the signal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time

import pytest
from clusters import log_of, make
from distributed import Client, wait

from dask_cml.local import processes as local_processes


@pytest.mark.slow
@pytest.mark.parametrize("nannies", [False, True])
async def test_results_survive_a_notice_to_all_processes_of_a_session(
    platform, light, holds, tmp_path, nannies
):
    def compute(n, path):
        open(f"{path}/{n}", "x").close()  # fails if it is computed again
        return n

    worker_args = [] if nannies else None
    async with (
        make(name="mine", n_workers=2, worker_args=worker_args) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):
        await client.wait_for_workers(2)
        futures = client.map(compute, range(40), path=str(tmp_path))
        await wait(futures)
        [session, _] = [session.id for session in cluster.sessions if session.role == "worker"]
        for process in await asyncio.to_thread(local_processes.find, session):
            process.terminate()
        await holds(lambda: "evicted, with notice; launching a replacement" in log_of(cluster))
        assert await client.gather(futures) == [*range(40)]


@pytest.mark.slow
async def test_tasks_end_their_own_processes_by_sigterm(platform, light):
    """A worker ignores the signal, but what its tasks start does not."""

    def end(start):
        process = start()
        time.sleep(0.2)
        process.terminate()
        process.wait(60)
        return process.returncode

    def started():
        return subprocess.Popen(["sleep", "600"])

    def forked():
        pid = os.fork()
        if not pid:
            time.sleep(600)
            os._exit(1)
        os.kill(pid, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    async with make(n_workers=1) as cluster, Client(cluster, asynchronous=True) as client:
        assert await client.submit(end, started) == -signal.SIGTERM
        assert await client.submit(forked) == -signal.SIGTERM
