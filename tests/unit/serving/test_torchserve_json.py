"""What TorchServe's clients get as JSON."""

from __future__ import annotations

import json

import numpy as np

from persia.serving.tensors import json_values


def test_nan_and_infinity_are_null_as_json_has_neither() -> None:
    output = np.array([[1.5, np.nan], [np.inf, -np.inf]], dtype=np.float32)
    assert json.loads(json.dumps(json_values(output), allow_nan=False)) == [1.5, None, None, None]
    assert json_values(np.array([[1], [2]])) == [1, 2]
