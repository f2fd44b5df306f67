"""The loop of a session ends without tasks that are left behind."""

from __future__ import annotations

import asyncio

from persia.messaging.loop_thread import LoopThread


def test_a_task_that_loses_its_cancellation_and_begins_another_is_ended_too() -> None:
    tasks = list[asyncio.Task[None]]()

    async def connect() -> None:
        await asyncio.sleep(600)

    async def reconnect() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:  # as the client of NATS, whose attempt then connects once more
            tasks.append(asyncio.create_task(connect()))
            await asyncio.shield(tasks[-1])

    async def begin() -> None:
        tasks.append(asyncio.create_task(reconnect()))
        await asyncio.sleep(0)

    async def shut_down() -> None: ...

    thread = LoopThread("test", lambda: None)
    thread.start()
    thread.call(begin(), 5.0)
    assert thread.close(shut_down)
    assert [task.done() for task in tasks] == [True, True]
