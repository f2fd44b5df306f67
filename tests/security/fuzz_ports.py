"""Sends mutated messages to a job that trains: strangers to every port, then its own roles to the RPC ports.

python -m tests.security.fuzz_ports --messages 100000 [--seed N]

So many before authentication and so many after it. It fails if a process ends, the training stops, or memory
grows. What roles say over the broker is decoded in Python: `python -m tests.fuzz_messages`.
Methods that clear rows or configure servers are left out after authentication: they do what they are told.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.attacks import intruder
from benchmarks.attacks.job import AttackedJob, Watch, attacked_job
from persia.security import secret
from persia.security.secret import INFERENCE, TRAINER, WORKER
from tests.unit.test_rpc_security import Client

_GROWTH_BYTES = 96 << 20
_SHOWN_EVERY = 10_000
_HARMFUL = {"ConfigureServer", "ClearRows", "ConfigureWorker", "ClearEmbeddings"}
_LENGTHS = (0, 1, 7, 2**16, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def hello(generator: random.Random) -> bytes:
    """A first message that is almost right: of any role, length and version."""
    body = bytearray(bytes([1, generator.randrange(9)]) + bytes(6) + generator.randbytes(32))
    return intruder.frame(0, mutated(body, generator) if generator.random() < 0.7 else bytes(body))


def mutated(content: bytearray, generator: random.Random) -> bytes:
    for _ in range(generator.randrange(1, 5)):
        at = generator.randrange(len(content) + 1)
        match generator.randrange(4):
            case 0:
                content[at : at + 1] = generator.randbytes(1)
            case 1:
                del content[at : at + generator.randrange(1, 40)]
            case 2:
                content[at:at] = generator.randbytes(generator.randrange(1, 40))
            case 3:
                size = generator.choice((4, 8))
                number = generator.choice(_LENGTHS) % (1 << 8 * size)
                content[at : at + size] = number.to_bytes(size, "little")
    return bytes(content)


class Insider:
    """Connections to one port that prove a role. The server answers each message of a right length."""

    def __init__(self, job: AttackedJob, port: str, role: str) -> None:
        name = job.cluster.env["PERSIA_JOB_NAME"]
        self._key = secret.find().key("rpc", "*" if role == INFERENCE else name, role)
        self._role, self._port = role, int(job.ports[port].rpartition(":")[2])
        methods = intruder.SERVER_METHODS if port == "server" else intruder.WORKER_METHODS
        self._methods = {name: number for name, number in methods.items() if name not in _HARMFUL}
        self._client: Client | None = None
        self.num_connections = 0

    def send(self, generator: random.Random) -> None:
        name = generator.choice(list(self._methods))
        body = mutated(bytearray(intruder.body_of(name)), generator)
        claimed = len(body) if generator.random() < 0.95 else generator.choice(_LENGTHS)
        if self._client is None:
            self._client = Client(self._port, self._role, self._key)
            self.num_connections += 1
        self._client.socket.sendall(intruder.frame(self._methods[name], body, claimed=claimed))
        if claimed == len(body):  # which is answered, whatever is in it
            answer = intruder.HEADER.unpack(self._client.receive(intruder.HEADER.size))
            self._client.receive(answer[8])
        else:  # nothing that follows would be a message
            self.close()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


def by_strangers(job: AttackedJob, generator: random.Random) -> Callable[[], None]:
    ports = tuple(job.ports.items())

    def send() -> None:
        name, address = generator.choice(ports)
        is_rpc = name in ("server", "worker")
        message = hello(generator) if is_rpc and generator.random() < 0.5 else intruder.garbage(generator)
        intruder.throw(address, [message])

    return send


@contextlib.contextmanager
def by_roles(job: AttackedJob, generator: random.Random) -> Iterator[Callable[[], None]]:
    roles = (("server", WORKER), ("worker", TRAINER), ("worker", INFERENCE))
    insiders = [Insider(job, port, role) for port, role in roles]
    try:
        yield lambda: generator.choice(insiders).send(generator)
    finally:
        for insider in insiders:
            insider.close()


def attack(name: str, job: AttackedJob, send: Callable[[], None], num_messages: int) -> bool:
    """False: memory has grown too much."""
    before, begin, step = job.memory(), time.monotonic(), job.step
    with Watch(job) as watch:
        for number in range(1, num_messages + 1):
            send()
            if number % _SHOWN_EVERY == 0:
                job.require_alive()
                print(f"  {name}: {number:,} in {time.monotonic() - begin:.0f} s", flush=True)
        job.require_training()
    growth = {process: after - before[process] for process, after in job.memory().items()}
    grown = ", ".join(f"{process} {size / 2**20:+.1f} MiB" for process, size in growth.items())
    print(
        f"{num_messages:,} messages {name} in {time.monotonic() - begin:.0f} s: {job.step - step:,} batches "
        f"meanwhile, at most {watch.still_s:.1f} s without one; {grown}",
        flush=True,
    )
    return max(growth.values()) < _GROWTH_BYTES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000, help="before authentication, and after it")
    parser.add_argument("--seed", type=int, default=time.time_ns(), help="to repeat a run")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    generator = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, attacked_job(Path(folder) / "report") as job:
        fine = [attack("of strangers", job, by_strangers(job, generator), options.messages)]
        with by_roles(job, generator) as send:
            fine.append(attack("of the job's roles", job, send, options.messages))
    if not all(fine):
        sys.exit("memory grows")


if __name__ == "__main__":
    main()
