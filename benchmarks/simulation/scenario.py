"""One seed: a job, faults at random moments, and what must hold meanwhile and afterwards."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory

from benchmarks.simulation.job import Job
from benchmarks.simulation.kernel import Kernel
from benchmarks.simulation.library import Library
from benchmarks.simulation.stand_ins import simulated

# Virtual seconds: when faults end, when the job must have trained all, and until there are two copies again.
_FAULTS_END_S = 40.0
_LIMIT_S = 240.0
_LIMIT_OF_ROLL_BACKS_S = 600.0  # a server forgets the dump of a rank that has died after a minute
_SETTLED_S = 60.0
_APPLIED_S = 0.25  # until it has applied the log that it has: longer than threads pause
_MEMORY = "/dev/shm"  # for checkpoints, where there is one
# Shares of the seeds: with reads beside the training, and with a second parameter server.
_READS = 0.3
_TWO_SERVERS = 0.2
_TWO_LOADERS = 8  # one seed in so many has two data loaders
_ROLLS_BACK = 0.1  # takes checkpoints and goes back to them


@dataclass
class Outcome:
    seed: int
    failure: str = ""  # empty: everything held
    elapsed_s: float = 0.0  # virtual
    faults: Counter[str] = field(default_factory=Counter)
    has_lost_rows: bool = False  # which the rank was told
    num_roll_backs: int = 0
    digests: tuple[int, ...] = ()  # by server


class Faults:
    """Faults of one seed, drawn when their time has come."""

    def __init__(self, job: Job, outcome: Outcome) -> None:
        self.job, self.kernel, self.outcome = job, job.kernel, outcome
        self._random = self.kernel.random
        self._num_active = 0
        kinds: dict[str, tuple[float, Callable[[], str | None]]] = {
            "kill a server": (3, self._kill_server),
            "freeze": (2, self._freeze),
            "cut a link": (2, self._cut_link),
            "cut a host off": (2, self._cut_host),
            "restart the broker": (1, self._restart_broker),
            "kill a worker": (1, lambda: self._kill("worker 0", "worker 1")),
            "kill a loader": (1, lambda: self._kill(*job.loader_names)),
        }
        if job.directory:
            kinds["kill the rank"] = (1, lambda: self._kill("rank"))
            kinds["kill a server and its standby"] = (1, self._kill_pair)
        # Each seed has its own mixture: one kind alone finds other things than all together.
        self._kinds = {
            name: (weight * self._random.choice((0.0, 0.3, 1.0, 3.0)), act)
            for name, (weight, act) in kinds.items()
        }

    def start(self) -> None:
        kernel, rng = self.kernel, self._random
        kernel.spikes = rng.choice((0.0, 0.0, 0.02, 0.1))
        breaks = rng.choice((0.0, 0.0, 0.003, 0.02))
        kernel.library.weather(rng.choice((500_000, 2_000_000, 20_000_000)), kernel.spikes, breaks)
        # The first within the start of the job, too.
        kernel.later(rng.uniform(0.0, 8.0), self._next)

    def _next(self) -> None:
        if self.kernel.elapsed_s > _FAULTS_END_S or self.job.is_trained:
            return
        weights = [weight for weight, _ in self._kinds.values()]
        if sum(weights) > 0:
            name = self._random.choices(tuple(self._kinds), weights)[0]
            target = self._kinds[name][1]()
            if target is not None:
                self.outcome.faults[name] += 1
                self.kernel.log("FAULT: %s: %s", name, target)
        self.kernel.later(self._random.expovariate(1 / 3.0), self._next)

    def _length_s(self) -> float:
        return self._random.choice((0.1, 1.0, 3.0, 8.0, 15.0)) * self._random.uniform(0.5, 1.0)

    def _begin(self) -> bool:
        """Whether a fault that may cost a copy may begin: one at a time, while there are two copies."""
        if self._num_active or not self.job.has_two_copies():
            return False
        self._num_active += 1
        self.job.may_lose_rows |= not self.job.reaches_broker()
        return True

    def _end(self) -> None:
        self._num_active -= 1

    def _kill_server(self) -> str | None:
        if not self._begin():
            return None
        self.kernel.later(0.0, self._end)
        return self._kill(*self.job.server_names)

    def _kill_pair(self) -> str | None:
        if len(self.job.trained) == self.job.num_batches:  # the rank may hear of it no more
            return None
        self.job.may_lose_rows = True
        pair = self._random.choice(self.job.pairs)
        return " and ".join(filter(None, map(self._kill, pair))) or None

    def _kill(self, *names: str) -> str | None:
        process = self.job.roles[self._random.choice(names)].process
        if process is None or process.is_dead:
            return None
        process.kill()
        return process.name

    def _freeze(self) -> str | None:
        names = (*self.job.roles, *self.job.server_names)  # those more often
        process = self.job.roles[self._random.choice(names)].process
        if process is None or process.is_dead or process.is_frozen or not self._begin():
            return None
        length_s = self._length_s()
        process.freeze(True)

        def thaw() -> None:
            process.freeze(False)
            self._end()

        self.kernel.later(length_s, thaw)
        return f"{process.name} for {length_s:.1f} s"

    def _cut(self, links: list[tuple[int, int]]) -> str | None:
        if not self._begin():
            return None
        length_s = self._length_s()
        for host, other in links:
            self.kernel.cut(host, other, True)

        def heal() -> None:
            for host, other in links:
                self.kernel.cut(host, other, False)
            self._end()

        self.kernel.later(length_s, heal)
        return f"{links} for {length_s:.1f} s"

    def _hosts(self) -> list[int]:
        return [role.host for role in self.job.roles.values()] + [self.job.broker.process.host]

    def _cut_link(self) -> str | None:
        host, other = self._random.sample(self._hosts(), 2)
        return self._cut([(host, other)])

    def _cut_host(self) -> str | None:
        host = self._random.choice(self._hosts())
        return self._cut([(host, other) for other in self._hosts() if other != host])

    def _restart_broker(self) -> str | None:
        if not self.job.broker.is_up:
            return None
        # Then the death of a server costs both copies if the standby cannot tell in time that it has died.
        self.job.may_lose_rows |= not self.job.has_two_copies()
        length_s = min(5.0, self._length_s())
        self.job.broker.restart(length_s)
        return f"for {length_s:.1f} s"


Digests = dict[int, tuple[int, ...]]  # by the number of servers


def undisturbed(library: Library) -> Digests:
    """The digests of the rows without faults."""
    digests = {}
    for num_servers in (1, 2):
        outcome = run_seed(library, 0, expected=None, num_servers=num_servers)
        if outcome.failure:
            raise AssertionError(f"without faults: {outcome.failure}")
        digests[num_servers] = outcome.digests
    return digests


def run_seed(
    library: Library,
    seed: int,
    *,
    expected: Digests | None,
    trace: bool = False,
    num_servers: int | None = None,
) -> Outcome:
    """`expected`: the digests of the rows that nothing disturbed; None to find them out, without faults."""
    has_faults = expected is not None
    outcome = Outcome(seed)
    kernel = Kernel(library, seed, trace=trace)
    with simulated(kernel), ExitStack() as stack:
        rng = kernel.random
        job = Job(
            kernel,
            deadline_s=rng.choice((2, 3, 4)),
            reads=has_faults and rng.random() < _READS,
            num_servers=num_servers or 1 + (rng.random() < _TWO_SERVERS),
            num_loaders=1 + (has_faults and seed % _TWO_LOADERS == 5),  # not drawn: seeds stay what they are
        )
        if has_faults and rng.random() < _ROLLS_BACK:
            folder = TemporaryDirectory(dir=_MEMORY if os.path.isdir(_MEMORY) else None)
            job.directory = stack.enter_context(folder)
        if has_faults:
            Faults(job, outcome).start()
        job.start()
        try:
            _check(job, outcome, expected)
            outcome.failure = outcome.failure or library.violation().decode()
        finally:
            outcome.elapsed_s, outcome.num_roll_backs = kernel.elapsed_s, job.num_roll_backs
            kernel.close()
    return outcome


def _check(job: Job, outcome: Outcome, expected: Digests | None) -> None:
    kernel = job.kernel

    def is_done() -> bool:
        outcome.has_lost_rows = job.has_lost_rows
        return job.is_trained or job.has_lost_rows

    is_ended = kernel.run(is_done, _LIMIT_OF_ROLL_BACKS_S if job.directory else _LIMIT_S)
    if kernel.failure:
        outcome.failure = kernel.failure
        return
    if not is_ended:
        outcome.failure = f"no end after {kernel.elapsed_s:.0f} s: trained {job.trained}"
        return
    if outcome.has_lost_rows:
        return
    if job.trained != list(range(job.num_batches)):
        outcome.failure = f"trained {job.trained}"
        return
    # Then there are two copies again, and both have the bits of a run that nothing disturbed.
    kernel.run(job.has_two_copies, kernel.elapsed_s + _SETTLED_S)
    outcome.has_lost_rows = job.has_lost_rows
    if outcome.has_lost_rows and not kernel.failure:
        return
    if not job.has_two_copies():
        outcome.failure = kernel.failure or "there are no two copies after a minute without faults"
        return
    outcome.failure = _compare(job, outcome, expected) or _count(job)


def _compare(job: Job, outcome: Outcome, expected: Digests | None) -> str:
    digests: dict[str, int] = {}
    names = job.server_names

    def measure(name: str) -> None:
        server = job.server_of(name)
        process = job.roles[name].process
        assert server is not None
        assert process is not None
        job.kernel.spawn(process, lambda: digests.__setitem__(name, server.digest()))

    # The standby has its log, and applies it behind the primary.
    job.kernel.run(lambda: False, job.kernel.elapsed_s + _APPLIED_S)
    for index, pair in enumerate(job.pairs):
        if len(primaries := job.primaries(index)) != 1:
            return f"{len(primaries)} primaries of {pair}"
    for name in names:
        measure(name)
    job.kernel.run(lambda: len(digests) == len(names), job.kernel.elapsed_s + 1.0)
    found = [tuple(digests.get(pair[copy], 0) for pair in job.pairs) for copy in (0, 1)]
    outcome.digests = found[0]
    wanted = found[0] if expected is None else expected[job.num_servers]
    return "" if found == [wanted, wanted] else f"rows differ: {digests} instead of {wanted}"


def _count(job: Job) -> str:
    for worker in job.workers:
        registered = worker.count("num_registered")
        ended = [
            worker.count(f"num_{what}")
            for what in ("returned", "released", "expired", "buffered", "in_flight")
        ]
        if registered != sum(ended):
            return f"registered {registered} and not {ended}"
    return ""
