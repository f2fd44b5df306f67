"""Clients that know nothing of persia: tritonclient, plain gRPC, curl and raw HTTP with named tensors."""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import warnings
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from persia.embedding.data import hash_strings
from persia.errors import CorruptionError
from persia.serving.protocol import elements_of
from tests.ports import free_port

from .test_serving import TWO_SLOTS, Served, dump_trained, features

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the client's own
    triton = pytest.importorskip("tritonclient.grpc")

DENSE = {"age": np.full((2, 1), 0.5, np.float32), "price": np.full((2, 1), 0.25, np.float32)}
IDS = {"user": np.array([10, 20], np.int64), "item": np.array([10, 20], np.uint64)}
# 1 x user + 10 x item + 100 x age + 1000 x price, rows [1, 2] and [3, 4], those of items ten times as large.
EXPECTED = [3.0 + 300.0 + 300.0, 7.0 + 700.0 + 300.0]
NAMES = {"float32": "FP32", "int64": "INT64", "uint64": "UINT64", "int32": "INT32", "float64": "FP64"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "REPLICA_INDEX", "REPLICA_SIZE", "PERSIA_NATS_URL"):
            patch.delenv(name, raising=False)
        dump_trained(folder / "model")
        (folder / "slots.yml").write_text(yaml.safe_dump(TWO_SLOTS, sort_keys=False))
        port = free_port()
        arguments = ["--embedding-config", str(folder / "slots.yml"), "--http-port", str(port)]
        server = Served(folder, str(folder / "model"), *arguments, "--max-request-mib", "1")
    server.http = f"127.0.0.1:{port}"  # type: ignore[attr-defined]
    yield server
    assert server.stop() == 0


def tensors(values: dict[str, np.ndarray[Any, Any]]) -> list[Any]:
    made = []
    for name, array in values.items():
        made.append(triton.InferInput(name, list(array.shape), NAMES[array.dtype.name]))
        made[-1].set_data_from_numpy(array)
    return made


def infer(served: Served, values: dict[str, np.ndarray[Any, Any]]) -> list[float]:
    return list(served.client.infer("m", tensors(values)).as_numpy("output_0")[:, 0])


LENGTHS = {
    "user": np.array([20, 10, 20], np.uint64),
    "user.lengths": np.array([0, 3], np.int32),
    "user.weights": np.array([1, 2, 0], np.float32),
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, EXPECTED),
        ({"user": np.array([[10], [20]], np.int64)}, EXPECTED),
        ({"user": np.array([[10, 20], [20, 99]], np.int64)}, [EXPECTED[0] + 7, EXPECTED[1]]),
        (LENGTHS, [EXPECTED[0] - 3, EXPECTED[1] - 7 + 7 + 2 * 3]),
    ],
)
def test_tensors_by_name_over_grpc(served: Served, given: Any, expected: list[float]) -> None:
    assert infer(served, {**DENSE, **IDS, **given}) == expected
    assert infer(served, dict(reversed({**IDS, **DENSE, **given}.items()))) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"age": None}, "missing: age; unknown: none"),
        ({"shop": IDS["user"]}, "missing: none; unknown: shop"),
        ({"age.lengths": np.array([1, 1], np.int32)}, "unknown: age.lengths"),
        ({"age": np.zeros((2, 1))}, "input 'age' has datatype 'FP64': send FP32"),
        ({"user": np.zeros(2, np.float32)}, "input 'user' has datatype 'FP32': send INT64 or UINT64"),
        ({"age": np.zeros((2, 3), np.float32)}, "'age' is float32[2, 3]"),
        ({"age": np.full((2, 1), np.inf, np.float32)}, "'age' has NaN or Inf in sample 0"),
        ({"user": np.zeros(3, np.int64)}, "2 samples in a batch of 3"),
        ({**LENGTHS, "user.lengths": np.array([1, 1], np.int32)}, "end with the number of IDs (3)"),
        ({**LENGTHS, "user.lengths": np.array([-1, 4], np.int32)}, "never decrease"),
        ({"user.weights": np.ones(3, np.float32)}, "2 IDs and 3 weights"),
        ({"user": np.zeros((2, 1, 1), np.int64)}, "send [batch], [batch, k], or [n]"),
    ],
)
def test_what_is_wrong_is_refused_by_name(served: Served, given: Any, named: str) -> None:
    values = {name: array for name, array in {**DENSE, **IDS, **given}.items() if array is not None}
    with pytest.raises(triton.InferenceServerException, match="INVALID_ARGUMENT") as caught:
        infer(served, values)
    assert named in str(caught.value)
    body = {"inputs": [as_json(name, array) for name, array in values.items()]}
    status, answer = post(served, json.dumps(body).replace("Infinity", "1e999").encode())
    assert status == 400
    assert named in answer["error"]
    with pytest.raises(triton.InferenceServerException, match="age more than once"):
        served.client.infer("m", tensors({**DENSE, **IDS}) + tensors({"age": DENSE["age"]}))


def as_json(name: str, array: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "datatype": NAMES[array.dtype.name],
        "shape": array.shape,
        "data": array.ravel().tolist(),
    }


def post(
    served: Served, body: bytes, path: str = "/v2/models/m/infer", **headers: str
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(served.http, timeout=240)  # type: ignore[attr-defined]
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        header = answer.headers.get("Inference-Header-Content-Length")
        found = json.loads(content[: None if header is None else int(header)])
        if header is not None:
            found["binary"] = content[int(header) :]
        return answer.status, found
    finally:
        connection.close()


def test_plain_grpc_with_typed_contents_and_strings(served: Served) -> None:
    messages = triton.service_pb2
    strings = {"user": [b"anna", b"bert"], "item": [b"x", b"y"]}
    with grpc.insecure_channel(served.address) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=messages.ModelInferRequest.SerializeToString,
            response_deserializer=messages.ModelInferResponse.FromString,
        )
        request = messages.ModelInferRequest(model_name="m", id="7")
        for name, array in DENSE.items():
            request.inputs.add(name=name, datatype="FP32", shape=[2, 1]).contents.fp32_contents.extend(
                array[:, 0].tolist()
            )
        for name, given in strings.items():
            request.inputs.add(name=name, datatype="BYTES", shape=[2]).contents.bytes_contents.extend(given)
        reply = call(request, timeout=240)
    assert reply.id == "7"
    # The hashes are those of training: the same IDs sent as numbers get the same answer, rows or not.
    ids = {name: hash_strings(given) for name, given in strings.items()}
    expected = infer(served, {**DENSE, **ids})
    assert np.frombuffer(reply.raw_output_contents[0], np.float32).tolist() == expected


def test_strings_in_the_binary_form(served: Served) -> None:
    """What tritonclient sends for an array of strings."""
    strings = {"user": [b"anna", b""], "item": [b"x", "\N{SNOWMAN}".encode()]}
    inputs = tensors(DENSE)
    for name, given in strings.items():
        inputs.append(triton.InferInput(name, [2], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array(given, dtype=object))
    ids = {name: hash_strings(given) for name, given in strings.items()}
    found = list(served.client.infer("m", inputs).as_numpy("output_0")[:, 0])
    assert found == infer(served, {**DENSE, **ids})
    # Known IDs: that both are zeros would not show that they were hashed.
    raw = b"".join(len(one).to_bytes(4, "little") + one for one in (b"10", b"20"))
    assert elements_of("user", raw) == [b"10", b"20"]
    for broken in (raw[:-1], raw[:3], b"\xff\xff\xff\xff"):
        with pytest.raises(CorruptionError, match="are no BYTES elements"):
            elements_of("user", broken)


def test_reflection_tells_the_services_and_their_messages(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService"),
        ]
        services, described = stub.ServerReflectionInfo(iter(requests), timeout=240)
    names = {service.name for service in services.list_services_response.service}
    assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= names
    (content,) = described.file_descriptor_response.file_descriptor_proto
    methods = {method.name for method in FileDescriptorProto.FromString(content).service[0].method}
    assert {"ModelInfer", "ModelStatistics", "RepositoryIndex"} <= methods


def test_metadata_statistics_and_index(served: Served) -> None:
    infer(served, {**DENSE, **IDS})
    metadata = served.client.get_model_metadata("m")
    assert [(i.name, i.datatype, list(i.shape)) for i in metadata.inputs] == [
        ("user", "INT64", [-1, -1]),
        ("item", "INT64", [-1, -1]),
        ("age", "FP32", [-1, 1]),
        ("price", "FP32", [-1, 1]),
    ]
    statistics = served.client.get_inference_statistics("m").model_stats[0]
    assert statistics.inference_stats.success.count >= 1
    assert statistics.inference_count >= 2 * statistics.execution_count > 0
    (index,) = served.client.get_model_repository_index().models
    assert (index.name, index.version, index.state) == ("m", "1", "READY")
    base = f"http://{served.http}/v2"  # type: ignore[attr-defined]
    assert curl(base)["name"] == "persia"
    assert curl(f"{base}/health/live") == {"live": True}
    assert curl(f"{base}/health/ready") == curl(f"{base}/models/m/ready") == {"ready": True}
    own = curl(f"{base}/models/m")
    assert [i["name"] for i in own["inputs"]] == ["user", "item", "age", "price"]
    assert own["outputs"] == [{"name": "output_0", "datatype": "FP32", "shape": [-1, 1]}]
    assert curl(f"{base}/models/m/versions/1/stats")["model_stats"][0]["inference_count"] >= 2
    assert curl("-X", "POST", f"{base}/repository/index")[0]["state"] == "READY"
    assert "there is no model 'x'" in curl(f"{base}/models/x")["error"]


def curl(*arguments: str) -> Any:
    done = subprocess.run(["curl", "-sS", *arguments], capture_output=True, check=True, timeout=240)
    return json.loads(done.stdout)


def test_curl_and_the_binary_extension(served: Served) -> None:
    body = {"id": "r", "inputs": [as_json(name, array) for name, array in {**DENSE, **IDS}.items()]}
    url = f"http://{served.http}/v2/models/m/infer"  # type: ignore[attr-defined]
    answer = curl("-d", json.dumps(body), url)
    assert answer == {
        "model_name": "m",
        "model_version": "1",
        "id": "r",
        "outputs": [{"name": "output_0", "datatype": "FP32", "shape": [2, 1], "data": EXPECTED}],
    }
    # Nested lists, and 64-bit IDs that floats cannot hold.
    body["inputs"][0]["data"] = [[0.5], [0.5]]
    body["inputs"][3] = {"name": "item", "datatype": "UINT64", "shape": [2], "data": [2**63 + 1, 20]}
    assert curl("-d", json.dumps(body), url)["outputs"][0]["data"] == [EXPECTED[0] - 300.0, EXPECTED[1]]

    contents = [array.tobytes() for array in {**DENSE, **IDS}.values()]
    head = {"parameters": {"binary_data_output": True}, "inputs": []}
    for (name, array), content in zip({**DENSE, **IDS}.items(), contents, strict=True):
        described = {key: value for key, value in as_json(name, array).items() if key != "data"}
        head["inputs"].append({**described, "parameters": {"binary_data_size": len(content)}})  # type: ignore[attr-defined]
    text = json.dumps(head).encode()
    message = b"".join([text, *contents])
    length = {"Inference-Header-Content-Length": str(len(text))}
    status, found = post(served, message, **length)
    assert (status, np.frombuffer(found["binary"], np.float32).tolist()) == (200, EXPECTED)
    # The bytes of a PersiaBatch are a tensor, too.
    batch = features("user", "item", "age", "price")
    tensor = {"name": "batch", "datatype": "BYTES", "shape": [1]}
    head = {"inputs": [{**tensor, "parameters": {"binary_data_size": len(batch) + 4}}]}
    text = json.dumps(head).encode()
    message = text + len(batch).to_bytes(4, "little") + batch
    status, found = post(served, message, **{"Inference-Header-Content-Length": str(len(text))})
    assert (status, found["outputs"][0]["data"]) == (200, EXPECTED)


def test_damaged_requests_over_http_are_the_clients_fault(served: Served) -> None:
    good = {"inputs": [as_json(name, array) for name, array in {**DENSE, **IDS}.items()]}
    text = json.dumps(good).encode()
    for body, headers in (
        (b"", {}),
        (b"[]", {}),
        (b'{"inputs": 3}', {}),
        (b'{"inputs": [3]}', {}),
        (b"[" * 100_000, {}),
        (text, {"Inference-Header-Content-Length": "99999999"}),
        (text, {"Inference-Header-Content-Length": "-1"}),
        (text, {"Inference-Header-Content-Length": "x"}),
        (text, {"Inference-Header-Content-Length": "9" * 5000}),
        (json.dumps({**good, "outputs": [{"name": [1]}]}).encode(), {}),
        (text + b"more", {"Inference-Header-Content-Length": str(len(text))}),
    ):
        assert post(served, body, **headers)[0] == 400, body[:40]
    assert post(served, b"x" * (2 << 20))[0] == 413
    values: list[Any] = [
        None,
        -1,
        2**70,
        1.5,
        "x",
        [],
        {},
        [[1], [2, 3]],
        True,
        [2**31, 2**31],
        "BYTES",
        [None, 1],
    ]
    chance = random.Random(0)
    for _ in range(300):
        request = json.loads(text)
        tensor = chance.choice(request["inputs"])
        tensor[chance.choice(("name", "datatype", "shape", "data", "parameters"))] = chance.choice(values)
        status, answer = post(served, json.dumps(request).encode())
        # Some changes are harmless, such as of parameters.
        assert status == 400 or (status == 200 and "outputs" in answer), (tensor, status, answer)
    assert post(served, text)[1]["outputs"][0]["data"] == EXPECTED
