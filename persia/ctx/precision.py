"""What `TrainCtx(mixed_precision=...)` means: whether the loss is scaled, and whether `forward` autocasts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from persia.errors import InvalidArgumentError

MixedPrecision = bool | str | torch.dtype | None

_NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Precision:
    """`autocast`: the dtype that `forward` runs the model in where torch can; None: the model's business."""

    autocast: torch.dtype | None = None
    scaled: bool = False  # half precision underflows without

    @classmethod
    def of(cls, mixed_precision: MixedPrecision, device_id: int | None) -> Precision:
        """Raises InvalidArgumentError for what the device does not offer."""
        # The published default is True, which no CPU can do: without a choice it holds on a GPU alone.
        if mixed_precision is None:
            mixed_precision = device_id is not None
        if isinstance(mixed_precision, bool):
            made = cls(scaled=mixed_precision)
        else:
            dtype = _NAMES.get(mixed_precision) if isinstance(mixed_precision, str) else mixed_precision
            if dtype not in _NAMES.values():
                raise InvalidArgumentError(
                    f"mixed_precision is {mixed_precision!r}: choose True, False, 'fp16' or 'bf16'"
                )
            made = cls(autocast=dtype, scaled=dtype is torch.float16)
        if made.scaled and made.autocast is None and device_id is None:
            # On a CPU nothing but torch's own autocast runs in half precision.
            raise InvalidArgumentError(
                "mixed_precision=True needs a CUDA device: choose 'fp16' or 'bf16', which autocast on "
                "the CPU too, or False"
            )
        return made

    def wrap(self, model: Callable[..., Any], device_type: str) -> Callable[..., Any]:
        """`model` under autocast; its floating-point outputs are float32, for a loss outside of it."""
        if self.autocast is None:
            return model

        # Made for each call, and not once: the script may replace the model of the context.
        def forward(*arguments: Any) -> Any:
            with torch.autocast(device_type, self.autocast):
                output = model(*arguments)
            return _to_float32(output)

        return forward


def _to_float32(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.float() if output.is_floating_point() else output
    if isinstance(output, dict):
        return {key: _to_float32(value) for key, value in output.items()}
    if type(output) in (list, tuple):
        return type(output)(_to_float32(value) for value in output)
    return output
