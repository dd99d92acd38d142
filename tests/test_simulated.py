"""The simulated platform's processes."""

from __future__ import annotations

import asyncio
import time

from distributed.comm.core import connect, listen
from simulated.testing import eventually, simulated


async def tick(ticks):
    while True:
        ticks.append(time.monotonic())
        await asyncio.sleep(1.0)


@simulated
async def test_a_paused_process_does_nothing_goes_on_and_is_cancelled_after_it(it):
    process, ticks, read = it.process("other"), [], []

    def read_in_a_thread():
        time.sleep(1.5)
        process.check()
        read.append(time.monotonic())

    ticking = process.start(tick(ticks))
    process.start(asyncio.to_thread(read_in_a_thread))
    await asyncio.sleep(1.1)
    begin = time.monotonic()
    process.pause(60.0)
    await asyncio.sleep(59.0)
    assert (len(ticks), read) == (2, [])
    await eventually(lambda: len(ticks) > 4 and read)
    assert min(*ticks[2:], *read) > begin + 59.0
    process.pause(10.0)
    ticking.cancel()
    await asyncio.sleep(5.0)
    assert not ticking.done()
    await asyncio.wait([ticking])
    assert ticking.cancelled()


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
