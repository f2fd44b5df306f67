"""Requests over HTTP are bounded in number, and in the time that their bodies take."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from unittest.mock import Mock

from persia.serving.http import HttpEndpoint
from persia.serving.inference import Inference
from persia.serving.models import Models

HEAD = b"POST /v2/models/ads/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"


async def answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)).decode()
    length = next(line for line in head.lower().splitlines() if line.startswith("content-length:"))
    body = await reader.readexactly(int(length.split(":")[1]))
    return int(head.split()[1]), json.loads(body)["error"]


def test_a_slow_body_ends_and_takes_no_more_than_its_permit() -> None:
    statistics = Mock()
    models = Models({"ads": Inference(Mock(), Mock(), statistics, timeout_s=3.0)}, Mock())

    async def ask() -> list[Any]:
        endpoint = HttpEndpoint(models, asyncio.Semaphore(1), 3.0)
        runner, port = await endpoint.listen("127.0.0.1", 0, 1 << 20)
        try:
            slow, slow_writer = await asyncio.open_connection("127.0.0.1", port)
            slow_writer.write(HEAD + b"1")  # and never the other nine bytes
            while not endpoint.permits.locked():
                await asyncio.sleep(0.01)
            second, second_writer = await asyncio.open_connection("127.0.0.1", port)
            second_writer.write(HEAD)
            answers = [await answer(second), await answer(slow)]
            assert not endpoint.permits.locked()
            slow_writer.close()
            second_writer.close()
            return answers
        finally:
            await runner.cleanup()

    begin_s = time.monotonic()
    refused, late = asyncio.run(ask())
    assert time.monotonic() - begin_s < 50
    assert (refused[0], late[0]) == (429, 504)
    assert "--max-queued" in refused[1]
    assert "the body has not arrived in 3 s (--timeout)" in late[1]
    codes = [call.args[1] for call in statistics.add_request.call_args_list]
    assert codes == ["RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"]
