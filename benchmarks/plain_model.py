"""An exported model as plain TorchScript: what servers without persia answer requests with.

`python -m benchmarks.plain_model MODEL.pt` is a bare `grpc.aio` server of it. TorchServe loads this file as
the handler of an archive, so it imports nothing of persia.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["PlainModel", "encode"]

_model: PlainModel | None = None  # of the process of TorchServe


def encode(dense: Sequence[NDArray[Any]], slots: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> bytes:
    """Dense features, then IDs and lengths of each slot: each array behind its number of elements."""
    arrays = [np.ascontiguousarray(array, np.float32).reshape(-1) for array in dense]
    for pair in slots:
        arrays += [np.ascontiguousarray(array).astype(np.int64) for array in pair]
    head = np.array([len(dense), len(slots), len(slots[0][1])], np.int64).tobytes()
    return head + b"".join(np.int64(array.size).tobytes() + array.tobytes() for array in arrays)


class PlainModel:
    """The TorchScript of `persia-launcher export --format torch`."""

    def __init__(self, path: str) -> None:
        torch.set_num_threads(1)
        self._script: Any = torch.jit.load(path)  # type: ignore[no-untyped-call]

    def answer(self, body: bytes | bytearray) -> bytes:
        """float32 predictions."""
        num_dense, num_slots, num_samples = np.frombuffer(body, np.int64, 3).tolist()
        place, tensors = 24, []
        for number in range(num_dense + 2 * num_slots):
            (size,) = np.frombuffer(body, np.int64, 1, place)
            dtype = np.float32 if number < num_dense else np.int64
            array = np.frombuffer(body, dtype, int(size), place + 8)
            place += 8 + array.nbytes
            tensors.append(torch.from_numpy(array.copy()))
        dense = [tensor.view(num_samples, -1) for tensor in tensors[:num_dense]]
        ids, lengths = tensors[num_dense::2], tensors[num_dense + 1 :: 2]
        with torch.inference_mode():
            output = self._script(dense, ids, lengths, [torch.ones(len(one)) for one in ids])
        output = output if isinstance(output, torch.Tensor) else output[0]
        predictions: bytes = output.float().numpy().tobytes()
        return predictions


def handle(data: list[dict[str, Any]] | None, context: Any) -> list[bytes] | None:
    """TorchServe calls it; without data to prepare the process."""
    global _model
    if _model is None:
        _model = PlainModel(os.path.join(context.system_properties["model_dir"], "model.pt"))
    if data is None:
        return None
    return [_model.answer(request.get("data") or request["body"]) for request in data]


async def _serve(path: str) -> None:
    import grpc

    model = PlainModel(path)

    async def infer(body: bytes, _context: Any) -> bytes:
        return model.answer(body)

    class AnyCall(grpc.GenericRpcHandler):
        def service(self, _details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(infer)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((AnyCall(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"is served at 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
