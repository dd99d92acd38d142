"""The simulated platform's processes."""

from __future__ import annotations

import asyncio
import time

from clusters import arrived, board_of, create_elsewhere, id_on_board, rebuild
from distributed.comm.core import connect, listen
from simulated.testing import eventually, simulated


async def tick(ticks):
    while True:
        ticks.append(time.monotonic())
        await asyncio.sleep(1.0)


@simulated
async def test_a_paused_process_does_nothing_and_goes_on(it):
    process, ticks, read = it.process("other"), [], []

    def read_in_a_thread():
        time.sleep(1.5)
        process.check()
        read.append(time.monotonic())

    process.start(tick(ticks))
    process.start(asyncio.to_thread(read_in_a_thread))
    await asyncio.sleep(1.1)
    begin = time.monotonic()
    process.pause(60.0)
    await asyncio.sleep(59.0)
    assert (len(ticks), read) == (2, [])
    await eventually(lambda: len(ticks) > 4 and read)
    assert min(*ticks[2:], *read) > begin + 59.0


@simulated
async def test_a_cancellation_during_a_pause_counts_after_it(it):
    process = it.process("other")
    task = process.start(tick([]))
    await asyncio.sleep(1.1)
    process.pause(10.0)
    await asyncio.sleep(5.0)
    task.cancel()
    await asyncio.sleep(1.0)
    assert not task.done()
    await asyncio.wait([task])
    assert task.cancelled()


@simulated
async def test_a_process_without_a_network_is_silent_or_refused(it):
    async def answer(comm):
        while True:
            await comm.write(await comm.read())

    async def ask():
        comm = await connect(listener.contact_address)
        while True:
            await comm.write("question")
            answers.append(await comm.read())
            await asyncio.sleep(1.0)

    answers = []
    process, listener = it.process("other"), await listen("tcp://127.0.0.1:0", answer)
    asking = process.start(ask())
    await asyncio.sleep(2.5)
    process.cut_off(60.0)
    known = len(answers)
    await asyncio.sleep(59.0)
    assert len(answers) == known
    await eventually(lambda: len(answers) > known)
    process.cut_off(60.0, refuses=True)
    await asyncio.wait([asking])
    assert isinstance(asking.exception(), OSError)
    listener.stop()


@simulated
async def test_a_short_pause_changes_nothing_for_a_cluster(it):
    creator = await create_elsewhere(it, name="lab", n_workers=1)
    async with rebuild("lab", shutdown_on_close=True) as cluster:
        creator.pause(5.0)
        await asyncio.sleep(20.0)
        assert arrived(cluster) == 1
        assert board_of(cluster).keeper not in (None, id_on_board(cluster))
