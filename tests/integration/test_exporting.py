"""`persia-launcher export` and `persia.nn.export(ctx)`: what they write predicts what the server predicts."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List  # noqa: UP035 - TorchScript reads these

import numpy as np
import pytest
import torch
import yaml
from torch._inductor import config as inductor

from persia.checkpoint.checkpoints import Source
from persia.config import SlotsConfig, parse_embedding_config
from persia.ctx import TrainCtx
from persia.embedding.data import IDTypeFeature, Label, NonIDTypeFeature, PersiaBatch
from persia.embedding.optim import SGD
from persia.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, StorageError
from persia.launcher.export import command
from persia.nn import export
from persia.serving import exporting
from persia.serving.embeddings import EmbeddedRows
from persia.serving.exporting import FORMATS, export_to
from persia.serving.predictor import Predictor
from persia.serving.scripts import load_script
from persia.serving.triton import config_text
from persia.storage.signature import Signature

SLOTS = {
    "slots_config": {
        "one": {"dim": 4},
        "root": {"dim": 4, "sqrt_scaling": True},
        "mean": {"dim": 3, "mean_scaling": True},
        "stack": {
            "dim": 4,
            "sqrt_scaling": True,
            "hash_stack_config": {"hash_stack_rounds": 3, "embedding_size": 50},
        },
        "raw": {"dim": 3, "embedding_summation": False, "sample_fixed_size": 4},
        "unused": {"dim": 4},
    },
    "feature_groups": {"both": ["one", "root"]},
}
NAMES = ("stack", "one", "root", "mean", "raw")  # another order than the config's
RAW = "raw"


class Tower(torch.nn.Module):
    """Sees each number of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.linear = torch.nn.Linear(2 + 4 + 4 + 4 + 3 + 4 * 4, 6)
        with torch.no_grad():
            self.linear.weight.copy_(torch.randn(self.linear.weight.shape, generator=generator))

    def forward(self, dense: List[torch.Tensor], embeddings: List[torch.Tensor]) -> torch.Tensor:  # noqa: UP006
        raw = embeddings[4].reshape(embeddings[4].shape[0], -1)
        pooled = [embeddings[0], embeddings[1], embeddings[2], embeddings[3]]
        return torch.sigmoid(self.linear(torch.cat(dense + pooled + [raw], dim=1)))


class ByName(Tower):
    def forward(  # type: ignore[override]
        self,
        dense: Dict[str, torch.Tensor],  # noqa: UP006
        embeddings: Dict[str, torch.Tensor],  # noqa: UP006
    ) -> List[torch.Tensor]:  # noqa: UP006
        flat = [dense["age"]] + [
            embeddings[name].reshape(embeddings[name].shape[0], -1)
            for name in ["stack", "one", "root", "mean", "raw"]
        ]
        hidden = self.linear(torch.cat(flat, dim=1))
        return [torch.tanh(hidden), hidden.sum(1)]


def batch(seed: int, *, size: int = 7, weighted: bool = False, requires_grad: bool = False) -> PersiaBatch:
    """Samples with no, one and several IDs, some beyond 2^63, some that no row has in `seed` 99."""
    random = np.random.default_rng(seed)
    ids = []
    for name in NAMES:
        lengths = random.integers(0, 7, size)
        values = random.integers(0, 60, lengths.sum()).astype(np.uint64) * np.uint64(2**58 + 12345)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        weights = random.normal(size=len(values)).astype(np.float32) if weighted and name != RAW else None
        ids.append(IDTypeFeature.from_csr(name, values, offsets, weights))
    age = NonIDTypeFeature(random.normal(size=(size, 2)).astype(np.float32), "age")
    labels = [Label(np.zeros((size, 1), np.float32))] if requires_grad else None
    return PersiaBatch(ids, [age], labels, requires_grad=requires_grad)


def trained(directory: Path, model: torch.nn.Module) -> list[PersiaBatch]:
    """Dumps a checkpoint, and returns batches with many IDs that have rows."""
    with TrainCtx(
        SGD(0.1),
        torch.optim.SGD(model.parameters(), 0.1),
        model=model,
        mixed_precision=False,
        slots=SLOTS,
    ) as ctx:
        for seed in range(6):
            found = ctx.get_embedding_from_data(batch(seed, requires_grad=True))
            output = ctx.forward(found)[0]
            first = output[0] if isinstance(output, list) else output
            ctx.backward(first.pow(2).mean())
        ctx.dump_checkpoint(str(directory), with_jit_model=True, step=6)
        expected = export(ctx)
        assert "persia" not in str(expected.state_dict().keys())
    return [batch(3), batch(99, size=20), batch(4, weighted=True, size=9), batch(5, size=1)]


@pytest.fixture(scope="module", params=[Tower, ByName])
def checkpoint(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_NATS_URL"):
            patch.delenv(name, raising=False)
        batches = trained(folder / "model", request.param())
    source = Source(folder / "model")
    predictor = Predictor(load_script(source), EmbeddedRows(source, slots()), signature=source.signature)
    return folder / "model", [(one, predictor.predict(one)) for one in batches], request.param


def slots() -> SlotsConfig:
    return parse_embedding_config(SLOTS)


def arguments(one: PersiaBatch) -> list[Any]:
    """Those of an exported module."""
    order = {feature.name: feature for feature in one.id_type_features}
    ids = [torch.from_numpy(np.array(order[name].ids).view(np.int64)) for name in NAMES]
    lengths = [torch.from_numpy(np.diff(np.array(order[name].offsets)).astype(np.int64)) for name in NAMES]
    weights = [order[name].weights for name in NAMES]
    dense = [torch.from_numpy(np.array(one.non_id_type_features[0].data))]
    if all(weight is None for weight in weights):
        return [dense, ids, lengths]
    made = [
        torch.ones(len(i)) if w is None else torch.from_numpy(np.array(w))
        for i, w in zip(ids, weights, strict=True)
    ]
    return [dense, ids, lengths, made]


def arrays_of(outputs: Any) -> list[np.ndarray[Any, Any]]:
    listed = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return [output.detach().numpy() for output in listed]


def assert_same(found: Any, expected: list[np.ndarray[Any, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def run_apart(script: str, *given: str) -> None:
    """In a process that cannot import persia."""
    script = "import sys; sys.modules['persia'] = None\n" + script
    found = subprocess.run(
        [sys.executable, "-c", script, *given], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr


def save_inputs(path: Path, answers: Any) -> None:
    torch.save([(arguments(one), [torch.from_numpy(o) for o in outputs]) for one, outputs in answers], path)


LOADERS = {
    "torch": "model = torch.jit.load(sys.argv[1] + '/model.pt')",
    "torch-export": "model = torch.export.load(sys.argv[1] + '/model.pt2').module()",
    "aoti": "model = torch._inductor.aoti_load_package(sys.argv[1] + '/model.pt2')",
}
COMPARE = """
import torch
{load}
for inputs, expected in torch.load(sys.argv[2], weights_only=True):
    if len(inputs) == 4 and "{kind}" != "torch":
        continue  # a graph has no weights
    with torch.no_grad():
        found = model(*inputs)
    found = list(found) if isinstance(found, (list, tuple)) else [found]
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        # Not to the bit, as tests/unit/nn/test_export.py compares within a process: in another one, a matrix
        # product adds up in another order now and then, and compiled code always.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
"""


def written(checkpoint: Any, tmp_path: Path, kind: str) -> Path:
    """Skips what cannot be had here; a dense model that takes names is not traced from its TorchScript."""
    location, _, model = checkpoint
    try:
        FORMATS[kind][0]()
    except FailedPreconditionError as failure:
        pytest.skip(str(failure))
    output = tmp_path / kind
    if model is ByName and kind in ("torch-export", "aoti", "onnx"):
        with pytest.raises(FailedPreconditionError, match=r"persia.nn.export\(ctx\)"):
            export_to(str(location), output, kind, slots(), name="ads")
        pytest.skip("its TorchScript takes dicts, which torch's converter refuses")
    export_to(str(location), output, kind, slots(), name="ads")
    return output


@pytest.mark.parametrize("kind", LOADERS)
def test_a_process_without_persia_gets_the_same_outputs(checkpoint: Any, tmp_path: Path, kind: str) -> None:
    output = written(checkpoint, tmp_path, kind)
    save_inputs(tmp_path / "inputs.pt", checkpoint[1])
    run_apart(COMPARE.format(load=LOADERS[kind], kind=kind), str(output), str(tmp_path / "inputs.pt"))


def test_onnx_is_within_1e_6(checkpoint: Any, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    output = written(checkpoint, tmp_path, "onnx")
    session = onnxruntime.InferenceSession(output / "model.onnx")
    names = json.loads((output / "inputs.json").read_text())["inputs"]
    assert names == ["age", *NAMES, *(f"{name}.lengths" for name in NAMES)]
    num_compared = 0
    for one, expected in checkpoint[1]:
        inputs = arguments(one)
        if len(inputs) == 3:
            flat = [tensor.numpy() for tensors in inputs for tensor in tensors]
            found = session.run(["output_0"], dict(zip(names, flat, strict=True)))
            np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-6)
            num_compared += 1
    assert num_compared == 3


def test_a_context_exports_its_job(tmp_path: Path) -> None:
    one = batch(2)
    model = ByName()
    with TrainCtx(
        SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), model=model, mixed_precision=False, slots=SLOTS
    ) as ctx:
        with pytest.raises(FailedPreconditionError, match="does not name the features"):
            export(ctx)
        found = ctx.get_embedding_from_data(batch(2, requires_grad=True))
        ctx.backward(ctx.forward(found)[0][0].pow(2).mean())
        ctx.dump_checkpoint(str(tmp_path / "model"), with_jit_model=True)
        plain = export(ctx, directory=tmp_path / "rows")
        for wrong in ({"min_norm": 1.0}, {"min_updates": 1}, {"ids": {"one": torch.arange(3)}}):
            with pytest.raises(InvalidArgumentError, match="a context is exported whole"):
                export(ctx, **wrong)  # type: ignore[arg-type]
    source = Source(tmp_path / "model")
    predictor = Predictor(load_script(source), EmbeddedRows(source, slots()), signature=source.signature)
    expected = predictor.predict(one)
    with torch.no_grad():
        assert_same(arrays_of(plain(*arguments(one))), expected)
        # Traced from the module itself, dicts and all.
        each = [{0: torch.export.Dim.DYNAMIC} for _ in NAMES]
        shapes = ([{0: torch.export.Dim.DYNAMIC}], each, each)
        program = torch.export.export(plain, tuple(arguments(batch(5))), dynamic_shapes=shapes)
        assert_same(arrays_of(program.module()(*arguments(one))), expected)


def test_triton_runs_the_repository_without_persia(checkpoint: Any, tmp_path: Path) -> None:
    output = written(checkpoint, tmp_path, "triton")
    folder = output / "ads"
    assert sorted(path.name for path in (folder / "6").iterdir()) == ["inputs.json", "model.pt", "model.py"]
    # A stand-in for the module that Triton brings, with what its documentation says of these names.
    (tmp_path / "triton_python_backend_utils.py").write_text(
        """
class Tensor:
    def __init__(self, name, array): self._name, self._array = name, array
    def name(self): return self._name
    def as_numpy(self): return self._array
class TritonError:
    def __init__(self, message): self._message = message
    def message(self): return self._message
class InferenceResponse:
    def __init__(self, output_tensors=(), error=None): self.tensors, self.error = output_tensors, error
def get_input_tensor_by_name(request, name):
    return next((tensor for tensor in request if tensor.name() == name), None)
"""
    )
    save_inputs(tmp_path / "inputs.pt", checkpoint[1])
    run_apart(TRITON, str(output / "ads"), str(tmp_path / "inputs.pt"), str(tmp_path), *NAMES)


TRITON = """
import numpy as np, torch
folder, inputs, stub, *names = sys.argv[1:]
sys.path[:0] = [stub, folder + '/6']
import triton_python_backend_utils as utils
from model import TritonPythonModel
model = TritonPythonModel()
model.initialize({'model_repository': folder, 'model_version': '6'})
def request(dense, ids, lengths, weights=None):
    made = [utils.Tensor('age', dense[0].numpy())]
    for place, name in enumerate(names):
        made.append(utils.Tensor(name, ids[place].numpy()))
        made.append(utils.Tensor(name + '.lengths', lengths[place].numpy().astype(np.int32)))
        if weights is not None and name != 'raw':
            made.append(utils.Tensor(name + '.weights', weights[place].numpy()))
    return made
cases = torch.load(inputs, weights_only=True)
answers = model.execute([request(*given) for given, _ in cases])
for answer, (_, expected) in zip(answers, cases):
    assert answer.error is None, answer.error.message()
    assert [t.name() for t in answer.tensors] == [f'output_{i}' for i in range(len(expected))]
    for found, other in zip(answer.tensors, expected):
        np.testing.assert_allclose(found.as_numpy(), other.numpy(), rtol=1e-5, atol=1e-5)
good = request(*cases[0][0])
def refused(change, message):
    ok, bad = model.execute([good, change])
    assert ok.error is None and message in bad.error.message(), bad.error.message()
refused(good[1:], 'no input age')
refused([utils.Tensor('age', np.full((7, 2), np.nan, np.float32)), *good[1:]], 'NaN')
refused([utils.Tensor('age', np.zeros((6, 2), np.float32)), *good[1:]], 'different numbers of samples')
refused([t for t in good if t.name() != 'one.lengths'], 'different numbers of samples')
refused([*good, utils.Tensor('one.weights', np.zeros(1, np.float32))], 'weights')
refused([utils.Tensor('one.lengths', np.full(7, -1, np.int32)), *good], '0 or more')
"""


def test_triton_s_schema_knows_the_config(checkpoint: Any) -> None:
    schema = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    from google.protobuf import text_format

    signature = Source(checkpoint[0]).signature
    assert signature is not None
    text = config_text("ads", signature, [torch.zeros(3, 6), torch.zeros(3, dtype=torch.int64)])
    config = text_format.Parse(text, schema.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("ads", "python", 0)
    inputs = {tensor.name: tensor for tensor in config.input}
    assert list(inputs) == [
        *(f"{name}{kind}" for name in NAMES for kind in ("", ".lengths", ".weights")),
        "age",
    ]
    assert inputs["raw"].data_type == schema.TYPE_INT64
    assert not inputs["raw"].optional
    assert inputs["raw.lengths"].data_type == schema.TYPE_INT32
    assert inputs["raw.lengths"].optional
    assert (inputs["age"].data_type, list(inputs["age"].dims)) == (schema.TYPE_FP32, [-1, 2])
    assert [(o.name, o.data_type, list(o.dims)) for o in config.output] == [
        ("output_0", schema.TYPE_FP32, [-1, 6]),
        ("output_1", schema.TYPE_INT64, [-1]),
    ]


def test_what_cannot_be_exported_says_why(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = str(checkpoint[0])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InvalidArgumentError, match="is not empty"):
        export_to(location, tmp_path / "full", "torch", slots())
    with pytest.raises(InvalidArgumentError, match="format 'tf'"):
        export_to(location, tmp_path / "out", "tf", slots())
    with pytest.raises(ResourceExhaustedError, match="max_bytes=100"):
        export_to(location, tmp_path / "out", "torch", slots(), max_bytes=100)
    with pytest.raises(InvalidArgumentError, match="--model-name 'a/b'"):  # before rows are read
        export_to(location, tmp_path / "out", "triton", slots(), name="a/b", on_bytes=pytest.fail)
    with monkeypatch.context() as patch:
        patch.setattr(Signature, "repeated", ["age"])
        with pytest.raises(InvalidArgumentError, match="are named age"):
            export_to(location, tmp_path / "out", "triton", slots(), on_bytes=pytest.fail)
    fewer = parse_embedding_config({"slots_config": {"one": {"dim": 4}}})
    with pytest.raises(FailedPreconditionError, match="has no such slot"):
        export_to(location, tmp_path / "out2", "torch", fewer)
    other = {**SLOTS, "slots_config": {**SLOTS["slots_config"], "one": {"dim": 8}}, "feature_groups": {}}
    with pytest.raises(FailedPreconditionError, match="slot one"):
        export_to(location, tmp_path / "out3", "torch", parse_embedding_config(other))
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(FailedPreconditionError, match="pip install onnx onnxscript"):
        export_to(location, tmp_path / "out4", "onnx", slots())
    no_compiler = inductor.patch({"cpp.cxx": ("/no/compiler",)})
    with no_compiler, pytest.raises(FailedPreconditionError, match=r"needs a C\+\+ compiler"):
        export_to(location, tmp_path / "out5", "aoti", slots())


@pytest.mark.parametrize("exists", [False, True])
def test_a_failed_export_leaves_no_files(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    output = tmp_path / "out"
    if exists:
        output.mkdir()
    before = list(tmp_path.rglob("*"))
    for target, failing, message in (
        ("torch.jit.save", no_save, "model.pt could not be written: .*unexpected pos"),
        ("shutil.disk_usage", lambda _: SimpleNamespace(free=100), "100 bytes free"),
        ("pathlib.Path.write_text", no_write, "out could not be written"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, failing)
            with pytest.raises(StorageError, match=message):
                export_to(str(checkpoint[0]), output, "torch", slots())
        assert list(tmp_path.rglob("*")) == before
    files = export_to(str(checkpoint[0]), output, "torch", slots())
    assert sorted(files) == sorted(output.iterdir())
    (tmp_path / "other").mkdir()
    assert output.stat().st_mode == (tmp_path / "other").stat().st_mode


def no_save(_: Any, path: Path) -> None:
    path.write_bytes(b"half")
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")  # torch's words


def no_write(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_command(checkpoint: Any, tmp_path: Path) -> None:
    (tmp_path / "slots.yml").write_text(yaml.safe_dump(SLOTS, sort_keys=False))
    (kind,) = [option for option in command.params if option.name == "kind"]
    assert list(kind.type.choices) == list(exporting.FORMATS)  # type: ignore[attr-defined]
    base = [sys.executable, "-m", "persia.launcher", "export", str(checkpoint[0]), str(tmp_path / "out")]
    config = ["--embedding-config", str(tmp_path / "slots.yml")]
    done = subprocess.run([*base, *config, "--format", "torch"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "out" / name) for name in ("model.pt", "inputs.json")]
    again = subprocess.run([*base, *config], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "is not empty" in again.stderr


NUM_ROWS, DIM = 400_000, 32
MEMORY = f"""
import resource, sys
import torch
from persia.checkpoint.checkpoints import Source
from persia.config import parse_embedding_config
from persia.nn.export_checkpoint import export_checkpoint
from persia.rows.reader import RowReader
slots = parse_embedding_config({{"slots_config": {{"one": {{"dim": {DIM}}}}}}})
source = Source(sys.argv[1])
torch.zeros(1) + 1
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
job = export_checkpoint(RowReader(source.location), source.signature, slots, torch.nn.Identity())
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(job.features.tables[0].rows))
"""


def test_memory_is_bounded_by_the_tables(tmp_path: Path) -> None:
    """A second copy of the rows would double it."""

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(1))

        def forward(self, dense: List[torch.Tensor], embeddings: List[torch.Tensor]) -> torch.Tensor:  # noqa: UP006
            return embeddings[0].sum(1) + self.bias

    model = Sum()
    one = {"slots_config": {"one": {"dim": DIM}}}
    with TrainCtx(
        SGD(0.1), torch.optim.SGD(model.parameters(), 0.1), model=model, mixed_precision=False, slots=one
    ) as ctx:
        ctx.set_embedding("one", np.arange(NUM_ROWS, dtype=np.uint64), np.ones((NUM_ROWS, DIM), np.float32))
        feature = IDTypeFeature("one", [np.arange(3, dtype=np.uint64)])
        ctx.forward(ctx.get_embedding_from_data(PersiaBatch([feature], requires_grad=False)))
        ctx.dump_checkpoint(str(tmp_path / "model"))
    found = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "model")], capture_output=True, text=True, check=True
    )
    before, after, num_rows = map(int, found.stdout.split())
    assert num_rows == NUM_ROWS + 1
    tables = NUM_ROWS * (4 * DIM + 8)
    # In KiB. Beside the tables: the block that is read, and keys twice while they are sorted.
    assert (after - before) * 1024 < tables + (32 << 20)
