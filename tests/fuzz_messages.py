"""Mutates what peers and storages send to Python, and decodes it: it is read, or refused by a typed error.

python -m tests.fuzz_messages --seconds 600 [--seed N]

The native decoders have libFuzzer targets of their own: `./run fuzz`.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from persia.checkpoint.protocol import Report, Request, State, Verb
from persia.errors import CorruptionError, UnavailableError
from persia.messaging.discovery import EventKind, ServiceEvent, ServiceInfo
from persia.messaging.payloads import EndOfStream, FlowReply, IdsRequest, ReplyStatus, SubmittedBatch
from persia.messaging.subjects import EMBEDDING_WORKER
from persia.packets.packet import Base, BaseKind, Packet
from persia.storage.checksummed_json import decode_pointer, encode_pointer
from persia.storage.manifest import DenseSection, EmbeddingSection, FileEntry, Manifest, ServerEntry
from persia.storage.position import Position
from tests.unit.checkpoint.conftest import sealed

_DUMP = "dump-20260131T120000Z-1a2b3c4d"
_POSITION = Position("20260131T120000Z-1a2b3c4d", 2)
_ROWS = FileEntry(path=f"{_DUMP}/embeddings-0-0.emb", num_bytes=10, checksum="00", num_rows=3, pages="11")
_SERVICE = ServiceInfo(
    role=EMBEDDING_WORKER,
    index=0,
    replicas=2,
    incarnation=7,
    address="127.0.0.1:1",
    slot_modes=("synchronous",),
)
_MANIFEST = Manifest(
    step=7,
    dense=DenseSection(dump_id=_DUMP, created_at="2026-01-01T00:00:00Z", files={"dense.pt": _ROWS}),
    embeddings=EmbeddingSection(
        dump_id=_DUMP,
        created_at="2026-01-01T00:00:00Z",
        train_config="00ff",
        servers=(ServerEntry(step=9, num_rows=3),),
        files=(_ROWS,),
        packets=_POSITION,
        optimizer={"name": "SGD"},
    ),
)
_RESTART = Packet(
    position=_POSITION, changed_after=1.0, cut_at=2.0, base=Base(kind=BaseKind.NOTHING, reason="start")
)


@dataclass(frozen=True)
class Decoder:
    """A decoder, what it reads without an error, and whether a checksum ends that."""

    decode: Callable[[bytes], Any]
    seeds: tuple[bytes, ...]
    has_checksum: bool = False


DECODERS = {
    "ids request": Decoder(IdsRequest.decode, (IdsRequest(0, 2, b"features").encode(),)),
    "flow reply": Decoder(
        FlowReply.decode,
        (FlowReply(ReplyStatus.FULL, 5).encode(), FlowReply(ReplyStatus.ERROR, message="why").encode()),
    ),
    "submitted batch": Decoder(
        SubmittedBatch.decode, (SubmittedBatch(2, 3, 4, 1, 0, 2, True, b"dense").encode(),)
    ),
    "end of stream": Decoder(
        EndOfStream.decode,
        (EndOfStream(0, 2, 5).encode(), EndOfStream(1, 2, 5, error="ValueError: x").encode()),
    ),
    "service info": Decoder(ServiceInfo.decode, (_SERVICE.encode(),)),
    "discovery event": Decoder(ServiceEvent.decode, (ServiceEvent(EventKind.JOINED, _SERVICE).encode(),)),
    "checkpoint request": Decoder(
        Request.decode, (Request(verb=Verb.DUMP, operation=_DUMP, arguments={"directory": "/d"}).encode(),)
    ),
    "checkpoint report": Decoder(
        Report.decode,
        (
            Report(state=State.RUNNING, done_bytes=4).encode(),
            Report(state=State.FAILED, error=UnavailableError("gone")).encode(),
        ),
    ),
    "manifest": Decoder(lambda content: Manifest.decode(content, "m"), (_MANIFEST.encode(),), True),
    "packet": Decoder(lambda content: Packet.decode(content, "p"), (_RESTART.encode(),), True),
    "pointer": Decoder(lambda content: decode_pointer(content, "latest"), (encode_pointer(_DUMP),)),
}

# What JSON may hold and a careless reader does not expect.
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**400),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), "", "0", "a" * 5000, "../../etc/passwd", "\0", "\ud800"),
    *([], {}, [[]], [None] * 50, {"": None}, {"path": {}}, [{"path": 1}], "persia packet"),
)


def mutated(decoder: Decoder, generator: random.Random) -> bytes:
    """One of its seeds with a few changes, of the bytes or of the JSON in them."""
    content = generator.choice(decoder.seeds)
    if generator.random() < 0.6 and content.startswith(b"{"):
        values = json.loads(content)
        for _ in range(generator.randrange(1, 4)):
            _change_value(values, generator)
        if decoder.has_checksum and generator.random() < 0.9:
            values.pop("checksum", None)
            return sealed(values)
        return json.dumps(values).encode()
    changed = bytearray(content)
    for _ in range(generator.randrange(1, 6)):
        _change_bytes(changed, generator)
    return bytes(changed)


def _change_value(values: dict[str, Any], generator: random.Random) -> None:
    """At a random place, reached from the top."""
    place: Any = values
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = generator.choice(keys)
        if isinstance(place[key], (dict, list)) and generator.random() < 0.7:
            place = place[key]
            continue
        if isinstance(place, dict) and generator.random() < 0.2:
            del place[key]
        else:
            place[key] = copy.deepcopy(generator.choice(_VALUES))
        return


def _change_bytes(content: bytearray, generator: random.Random) -> None:
    at = generator.randrange(len(content) + 1)
    match generator.randrange(5):
        case 0:
            content[at : at + 1] = bytes([generator.randrange(256)])
        case 1:
            del content[at : at + generator.randrange(1, 40)]
        case 2:
            content[at:at] = generator.randbytes(generator.randrange(1, 20))
        case 3:
            content[at : at + 8] = generator.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(8, "little")
        case 4:
            content[at:at] = generator.choice((b"[" * 3000, b'{"a":' * 3000, b"1" * 5000, b"\xff\xfe", b"\0"))


def fuzz(name: str, generator: random.Random, *, num_messages: int) -> int:
    """Decodes so many messages; how many of them were good. AssertionError shows one that broke a decoder."""
    decoder, num_good = DECODERS[name], 0
    for _ in range(num_messages):
        content = mutated(decoder, generator)
        try:
            decoder.decode(content)
            num_good += 1
        except CorruptionError:
            pass
        except Exception as failure:
            raise AssertionError(f"{name}: {type(failure).__name__}: {failure}\n{content!r}") from failure
    return num_good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of all decoders together")
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="to repeat a run")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    generator = random.Random(options.seed)
    for name in DECODERS:
        started, messages, good = time.monotonic(), 0, 0
        while (took := time.monotonic() - started) < options.seconds / len(DECODERS):
            good += fuzz(name, generator, num_messages=200)
            messages += 200
        print(f"{name}: {messages} messages in {took:.1f} s, {good} good", flush=True)


if __name__ == "__main__":
    main()
