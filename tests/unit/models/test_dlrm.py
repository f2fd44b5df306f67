"""DLRM and DCNv2: equal to torchrec's modules, and usable scripted, compiled and under autocast."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from persia.errors import InvalidArgumentError
from persia.models import DLRM, DCNv2, DotInteraction, LowRankCrossNet, make_mlp

SIZES: dict[str, Any] = {"bottom_mlp_sizes": (16, 8), "top_mlp_sizes": (16, 8, 1)}
BATCH, DIM, SLOTS = 6, 8, 5


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    yield
    torch.set_num_threads(before)


def dlrm() -> DLRM:
    return DLRM(4, SLOTS, DIM, **SIZES)


def dcn() -> DCNv2:
    return DCNv2(4, SLOTS, DIM, **SIZES, num_cross_layers=2, cross_layer_projection_dim=3)


def inputs(batch: int = BATCH) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    embeddings = [torch.randn(batch, DIM, requires_grad=True) for _ in range(SLOTS)]
    return [torch.randn(batch, 4)], embeddings


MODELS = pytest.mark.parametrize("make", [dlrm, dcn])


def copy_parameters(source: Any, target: Any) -> None:
    """Of modules whose parameters are in the same order."""
    pairs = list(zip(source.parameters(), target.parameters(), strict=True))
    for theirs, ours in pairs:
        assert theirs.shape == ours.shape
        ours.data.copy_(theirs.data)


def test_dlrm_equals_torchrec() -> None:
    arch = pytest.importorskip("torchrec.models.dlrm")
    model, (dense, embeddings) = dlrm(), inputs()
    bottom, top = arch.DenseArch(4, [16, 8]), arch.OverArch(8 + 15, [16, 8, 1])
    copy_parameters(bottom, model.bottom)
    copy_parameters(top, model.top)
    expected = top(arch.InteractionArch(SLOTS)(bottom(dense[0]), torch.stack(embeddings, dim=1)))
    torch.testing.assert_close(model(dense, embeddings), expected, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(expected.sum(), embeddings)
    ours = torch.autograd.grad(model(dense, embeddings).sum(), embeddings)
    torch.testing.assert_close(ours, gradients, rtol=1e-6, atol=1e-6)


def test_dcnv2_equals_torchrec() -> None:
    arch = pytest.importorskip("torchrec.models.dlrm")
    cross = pytest.importorskip("torchrec.modules.crossnet").LowRankCrossNet((SLOTS + 1) * DIM, 2, 3)
    model, (dense, embeddings) = dcn(), inputs()
    bottom, top = arch.DenseArch(4, [16, 8]), arch.OverArch((SLOTS + 1) * DIM, [16, 8, 1])
    copy_parameters(bottom, model.bottom)
    copy_parameters(top, model.top)
    for layer in range(2):
        torch.nn.init.normal_(cross.bias[layer])  # begins as zeros, which would hide a missing one
        model.cross.down[layer].weight.data.copy_(cross.V_kernels[layer])
        model.cross.up[layer].weight.data.copy_(cross.W_kernels[layer])  # type: ignore[operator,union-attr]
        model.cross.up[layer].bias.data.copy_(cross.bias[layer])  # type: ignore[operator,union-attr]
    vectors = arch.InteractionDCNArch(SLOTS, cross)(bottom(dense[0]), torch.stack(embeddings, dim=1))
    torch.testing.assert_close(model(dense, embeddings), top(vectors), rtol=1e-6, atol=1e-6)


def test_dot_interaction_by_hand() -> None:
    vectors = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    assert DotInteraction(3)(vectors).tolist() == [[11.0, 17.0, 39.0]]


def test_a_cross_layer_by_hand() -> None:
    net = LowRankCrossNet(2, num_layers=1, rank=1)
    net.load_state_dict(
        {
            "down.0.weight": torch.tensor([[1.0, 1.0]]),
            "up.0.weight": torch.tensor([[2.0], [3.0]]),
            "up.0.bias": torch.tensor([1.0, 0.0]),
        }
    )
    # V x = 3; W V x + b = [7, 9]; times x, plus x.
    assert net(torch.tensor([[1.0, 2.0]])).tolist() == [[8.0, 20.0]]


@MODELS
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is not supported")
def test_scripted_and_read_again(make: Any) -> None:
    model, (dense, embeddings) = make(), inputs()
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(model), file)
    file.seek(0)
    read = torch.jit.load(file)
    torch.testing.assert_close(read(dense, embeddings), model(dense, embeddings))


@MODELS
def test_compiled_as_one_graph_with_batches_of_several_sizes(make: Any) -> None:
    model = make()
    # Graph capture and autograd as by default; without the C++ compiler, which may be absent.
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for batch in (BATCH, BATCH - 2):
        dense, embeddings = inputs(batch)
        expected = model(dense, embeddings)
        got = compiled(dense, embeddings)
        torch.testing.assert_close(got, expected)
        gradients = torch.autograd.grad(expected.sum(), embeddings)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), embeddings), gradients)


@MODELS
def test_autocast_to_bfloat16(make: Any) -> None:
    model, (dense, embeddings) = make(), inputs()
    expected = model(dense, embeddings)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(dense, embeddings)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=0.1, atol=0.1)
    gradients = torch.autograd.grad(got.sum(), embeddings)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


@pytest.mark.parametrize("kind", [DLRM, DCNv2])
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.filterwarnings("ignore:.*torch.jit.* is not supported")
def test_without_dense_features(kind: Any) -> None:
    model, (_, embeddings) = kind(0, SLOTS, DIM, **SIZES), inputs()
    logits = model([], embeddings)
    assert logits.shape == (BATCH, 1)
    torch.testing.assert_close(torch.jit.script(model)([], embeddings), logits)


@MODELS
def test_every_parameter_has_a_gradient(make: Any) -> None:
    model = make()
    model(*inputs(64)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DLRM(4, 5, 16, **SIZES), r"bottom_mlp_sizes=\[16, 8\] must end with the embedding dim 16"),
        (lambda: DLRM(4, 5, 8, bottom_mlp_sizes=(8,), top_mlp_sizes=(4,)), r"top_mlp_sizes=\[4\] must end"),
        (lambda: DLRM(4, 0, 8), "num_embeddings is 0"),
        (lambda: LowRankCrossNet(4, 1, 0), "rank is 0"),
        (lambda: make_mlp(4, [], relu_at_end=False), "sizes is empty"),
    ],
)
def test_sizes_that_do_not_fit(make: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()
