"""The published network."""

from __future__ import annotations

import pytest
import torch

from model import DNN


def inputs(batch_size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    embeddings = [torch.randn(batch_size, 8, generator=generator) for _ in range(8)]
    return [torch.randn(batch_size, 5, generator=generator)], embeddings


def test_layers_are_the_published_ones() -> None:
    num_parameters = sum(parameter.numel() for parameter in DNN().parameters())
    linear = [(5, 16), (64, 128), (144, 256), (256, 128), (128, 1)]
    assert num_parameters == sum((i + 1) * o for i, o in linear) + 2 * (16 + 128)


def test_output_is_a_probability_for_each_sample() -> None:
    output = DNN()(*inputs(7))
    assert output.shape == (7, 1)
    assert bool(((output > 0) & (output < 1)).all())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # Published scripts save it; it works.
def test_scripted_and_eager_model_agree() -> None:
    model = DNN().eval()
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(*inputs(3)), model(*inputs(3)))
