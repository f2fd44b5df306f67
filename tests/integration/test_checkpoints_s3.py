"""Checkpoints on S3: an endpoint of this process, which real servers write to and which may refuse."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from persia.checkpoint.checkpoints import Checkpoints, DumpRequest, Source
from persia.checkpoint.peers import find_servers
from persia.config import parse_embedding_config
from persia.embedding.optim import Adagrad
from persia.errors import CorruptionError, StorageError
from persia.nn import EmbeddingBagCollection
from persia.storage.location import Location

pytestmark = [
    # Of libraries that only these tests use.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
    pytest.mark.skipif(
        any(not __import__("importlib.util").util.find_spec(name) for name in ("moto", "s3fs")),
        reason="./run test runs it in an environment of its own, with persia[test-s3]",
    ),
]

SLOTS = {"slots_config": {"user": {"dim": 8}}}
Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Endpoint:
    """S3, real but for where it keeps its objects. Refuses the next `refusals` requests of kind `refused`."""

    def __init__(self, app: Wsgi) -> None:
        self._app = app
        self.refused = ("PUT", ".emb")  # method, part of the key
        self.refusals = 0
        self.num_refused = 0
        self.client: Any = None

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, name = self.refused
        is_meant = environ["REQUEST_METHOD"] == method and name in environ["PATH_INFO"]
        if not (is_meant and self.refusals > 0):
            return self._app(environ, start)
        self.refusals -= 1
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        self.num_refused += 1
        start("503 Slow Down", [("Content-Type", "text/xml")])
        return [b"<Error><Code>SlowDown</Code><Message>slow down</Message></Error>"]

    def list_keys(self) -> set[str]:
        return {item["Key"] for item in self.client.list_objects_v2(Bucket="models").get("Contents", [])}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    """With the bucket "models"; the environment leads clients there, those of new processes as well."""
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    endpoint = Endpoint(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, endpoint, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # s3fs itself tries again
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    endpoint.client = boto3.client("s3")
    endpoint.client.create_bucket(Bucket="models")
    yield endpoint
    endpoint.client.close()
    # Objects outlive the server, as they are in this process.
    urllib.request.urlopen(f"http://127.0.0.1:{server.port}/moto-api/reset", data=b"", timeout=10).close()
    server.shutdown()
    thread.join(120)
    server.server_close()
    type(Location.of("s3://models").file_system).clear_instance_cache()


def make_bags(num_rows: int = 5000) -> EmbeddingBagCollection:
    bags = EmbeddingBagCollection(parse_embedding_config(SLOTS), optimizer=Adagrad(lr=0.1), num_threads=1)
    pooled = bags(torch.arange(num_rows), torch.ones(1, num_rows, dtype=torch.int64))
    pooled.square().sum().backward()
    return bags


def lookup(bags: EmbeddingBagCollection, num_rows: int = 5000) -> torch.Tensor:
    bags.eval()
    result: torch.Tensor = bags(torch.arange(num_rows), torch.ones(1, num_rows, dtype=torch.int64))
    bags.train()
    return result


def test_servers_write_and_read_the_bucket(s3: Endpoint, local_cluster: Any, tmp_path: Path) -> None:
    bags = make_bags()
    bags.dump(tmp_path / "rows")
    cluster = local_cluster(embedding_config=SLOTS, parameter_servers=2)
    checkpoints = Checkpoints(lambda: find_servers(cluster.session, 20), deadline_s=30)
    checkpoints.load(Source(tmp_path / "rows"))
    for step in (1, 2, 3):
        checkpoints.dump(
            DumpRequest("s3://models/m", dense={"dense.pt": b"%d" % step}, step=step, keep_last=2)
        )
    source = Source("s3://models/m")
    assert (source.manifest.step, source.dense("dense.pt")) == (3, b"3")
    assert {key.split("/")[1] for key in s3.list_keys()} == {
        "latest",
        "step-000000000002",
        "step-000000000003",
    }
    checkpoints.load(source)
    checkpoints.dump(DumpRequest("s3://models/again"))
    other = make_bags(1)
    other.load("s3://models/again")
    assert torch.equal(lookup(other), lookup(bags))
    with pytest.raises(
        StorageError, match="embedding-parameter-server . of 2.*s3://no-such-bucket/m.*could not"
    ):
        checkpoints.dump(DumpRequest("s3://no-such-bucket/m"))


def test_a_service_that_recovers_is_tried_again(s3: Endpoint) -> None:
    bags = make_bags()
    s3.refusals = 2
    bags.dump("s3://models/m")
    assert s3.num_refused == 2
    other = make_bags(1)
    other.load("s3://models/m")
    assert torch.equal(lookup(other), lookup(bags))


def test_a_service_that_does_not_recover_costs_nothing_that_was_there(s3: Endpoint) -> None:
    bags = make_bags()
    bags.dump("s3://models/m")
    before, keys = lookup(bags), s3.list_keys()
    bags(torch.arange(10), torch.ones(1, 10, dtype=torch.int64)).sum().backward()
    s3.refusals = 1000
    with pytest.raises(StorageError, match=r"s3://models/m/dump-.*\.emb could not be written: .*slow down"):
        bags.dump("s3://models/m")
    s3.refusals = 0
    assert s3.num_refused >= 5
    assert s3.list_keys() == keys
    bags.load("s3://models/m")
    assert torch.equal(lookup(bags), before)


def test_a_manifest_that_is_refused_leaves_the_checkpoint_that_was_there(
    s3: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)  # five tries of ours are enough to wait for
    bags = make_bags()
    bags.dump("s3://models/m")
    before, keys = lookup(bags), s3.list_keys()
    bags(torch.arange(10), torch.ones(1, 10, dtype=torch.int64)).sum().backward()
    s3.refused, s3.refusals = ("PUT", "manifest.json"), 1000
    with pytest.raises(
        StorageError, match=r"manifest\.json could not be written: .*checkpoint before this dump is unchanged"
    ):
        bags.dump("s3://models/m")
    s3.refusals = 0
    assert s3.list_keys() > keys, "the manifest might still come"
    other = make_bags(1)
    other.load("s3://models/m")
    assert torch.equal(lookup(other), before)
    bags.dump("s3://models/m")
    assert len(s3.list_keys()) == len(keys), "no leftovers"
    other.load("s3://models/m")
    assert torch.equal(lookup(other), lookup(bags))


def test_reads_that_are_refused_in_the_middle_of_a_load_change_nothing(
    s3: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    make_bags().dump("s3://models/m")
    bags = make_bags(10)
    before = lookup(bags)
    s3.refused, s3.refusals = ("GET", "embeddings-0-0.emb"), 1000
    with pytest.raises(StorageError, match=r"embeddings-0-0\.emb could not be read: .*slow down"):
        bags.load("s3://models/m")
    s3.refusals = 2
    assert torch.equal(lookup(bags), before)
    bags.load("s3://models/m")
    assert s3.refusals == 0, "it was tried again"
    assert not torch.equal(lookup(bags), before)


def test_damage_in_the_bucket_is_named(s3: Endpoint) -> None:
    bags = make_bags()
    bags.dump("s3://models/m")
    (key, *_) = sorted(key for key in s3.list_keys() if key.endswith(".emb"))
    content = bytearray(s3.client.get_object(Bucket="models", Key=key)["Body"].read())
    content[len(content) // 2] ^= 4
    s3.client.put_object(Bucket="models", Key=key, Body=bytes(content))
    with pytest.raises(CorruptionError, match=f"s3://models/{key}, bytes"):
        bags.load("s3://models/m")
