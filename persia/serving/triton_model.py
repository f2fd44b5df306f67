"""A model of Triton's Python backend: an exported job of persia. Needs torch and NumPy, and no persia.

Written by `persia-launcher export --format triton` beside `model.pt`, the rows and the dense model as
TorchScript, and `inputs.json`, the features in their order. Inputs are named like features: NAME, int64 [n],
of an ID feature, with NAME.lengths, int32 [batch] (one ID a sample without it), and NAME.weights, float32
[n]; NAME [batch, ...] of a dense one. Outputs are output_0, output_1, ...
"""

# It is run by Triton, and must not name tools of persia in its lines.
# mypy: disable-error-code="no-untyped-call"

import json
import os
from typing import Any

import numpy as np
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Triton makes one for each instance."""

    def initialize(self, args: dict[str, str]) -> None:
        """Loads the files beside this one."""
        folder = os.path.join(args["model_repository"], args["model_version"])
        with open(os.path.join(folder, "inputs.json"), encoding="utf-8") as file:
            self._signature = json.load(file)
        self._model = torch.jit.load(os.path.join(folder, "model.pt"), map_location="cpu").eval()

    def execute(self, requests: list[Any]) -> list[Any]:
        """An answer to each request; a wrong request has an error of its own."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            with torch.inference_mode():
                outputs = self._model(*self._inputs(request))
        except (ValueError, RuntimeError) as failure:
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(failure)))
        listed = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        # NumPy has no bfloat16.
        arrays = [(t.float() if t.dtype is torch.bfloat16 else t).contiguous().numpy() for t in listed]
        return pb_utils.InferenceResponse(
            output_tensors=[pb_utils.Tensor(f"output_{i}", array) for i, array in enumerate(arrays)]
        )

    def _inputs(self, request: Any) -> tuple[Any, ...]:
        ids, lengths, weights = [], [], []
        is_weighted = False
        for feature in self._signature["ids"]:
            name = feature["name"]
            values = _array(request, name)
            counts = _array(request, f"{name}.lengths", optional=True)
            counts = np.ones(len(values), np.int64) if counts is None else counts.astype(np.int64)
            if counts.min(initial=0) < 0 or counts.sum() != len(values):
                raise ValueError(
                    f"{name}.lengths must be 0 or more and add up to {len(values)}, the IDs of {name}"
                )
            own = _array(request, f"{name}.weights", optional=True)
            is_weighted = is_weighted or own is not None
            own = np.ones(len(values), np.float32) if own is None else own
            if len(own) != len(values):
                raise ValueError(f"{name} has {len(values)} IDs and {len(own)} weights")
            ids.append(torch.from_numpy(values.view(np.int64)))
            lengths.append(torch.from_numpy(counts))
            weights.append(torch.from_numpy(np.array(own)))
        dense = []
        for feature in self._signature["dense"]:
            values = _array(request, feature["name"])
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise ValueError(f"dense feature {feature['name']} has NaN or Inf")
            dense.append(torch.from_numpy(np.array(values)))
        sizes = {len(tensor) for tensor in (*lengths, *dense)}
        if len(sizes) > 1:
            raise ValueError(f"the inputs have different numbers of samples: {sorted(sizes)}")
        return dense, ids, lengths, weights if is_weighted else None


def _array(request: Any, name: str, optional: bool = False) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None and not optional:
        raise ValueError(f"the request has no input {name}")
    # Copied: torch refuses arrays that cannot be written, as Triton's may be.
    return None if tensor is None else np.array(tensor.as_numpy())
