"""The order of a streamed batch, and when the stream ends: pure bookkeeping, no clocks, threads or sockets.

`batch_id = sequence * num_loaders + loader_index`, and a batch goes to rank `batch_id % world_size`. That
alone fixes which sequences of a loader this rank gets, so a rank knows the next batch_id of every loader, can
merge the loaders into one total order, and knows the end as soon as every loader that concerns it has told
how many batches it sent.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from persia.errors import FailedPreconditionError, InvalidArgumentError

__all__ = ["Arrival", "LoaderShare", "StreamOrder"]


class Arrival(enum.Enum):
    """What an announced batch_id is to this rank."""

    NEXT = "next"
    REPEATED = "repeated"  # seen before: the reply got lost, or the loader was started again


@dataclasses.dataclass(frozen=True)
class LoaderShare:
    """A loader's sequences for one rank: `first_sequence` (None: none), then every `stride`-th."""

    loader_index: int
    num_loaders: int
    first_sequence: int | None
    stride: int

    @classmethod
    def of(cls, loader_index: int, num_loaders: int, rank: int, world_size: int) -> LoaderShare:
        """Solves `(sequence * num_loaders + loader_index) % world_size == rank`."""
        stride = world_size // math.gcd(num_loaders, world_size)
        first = next(
            (s for s in range(stride) if (s * num_loaders + loader_index) % world_size == rank), None
        )
        return cls(loader_index, num_loaders, first, stride)

    def batch_id(self, position: int) -> int:
        """The batch_id of this rank's `position`-th batch from the loader."""
        if self.first_sequence is None:
            raise InvalidArgumentError(f"data loader {self.loader_index} sends nothing to this rank")
        return (self.first_sequence + position * self.stride) * self.num_loaders + self.loader_index

    def count(self, num_batches: int) -> int:
        """How many of the loader's `num_batches` batches, to all ranks together, are this rank's."""
        if self.first_sequence is None or num_batches <= self.first_sequence:
            return 0
        return (num_batches - 1 - self.first_sequence) // self.stride + 1


@dataclasses.dataclass
class _LoaderProgress:
    share: LoaderShare
    num_announced: int = 0
    num_taken: int = 0
    num_expected: int | None = None  # known once the loader announced its end
    num_sent: int | None = None


class StreamOrder:
    """Counts what every loader announced to this rank, and what the rank took. The owner locks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._loaders: list[_LoaderProgress] = []

    @property
    def num_loaders(self) -> int | None:
        """Known from the first message of any loader on."""
        return len(self._loaders) or None

    def introduce(self, loader_index: int, num_loaders: int) -> None:
        """Every message of a loader says how many there are; all must say the same."""
        if not 0 <= loader_index < num_loaders:
            raise InvalidArgumentError(
                f"data loader index {loader_index} is not below its replica size {num_loaders}"
            )
        if not self._loaders:
            shares = (
                LoaderShare.of(i, num_loaders, self._rank, self._world_size) for i in range(num_loaders)
            )
            self._loaders = [_LoaderProgress(share) for share in shares]
        if len(self._loaders) != num_loaders:
            raise FailedPreconditionError(
                f"data loader {loader_index} says there are {num_loaders} loaders, "
                f"another said {len(self._loaders)}: start all of them with the same --replica-size"
            )

    def arrival(self, batch_id: int, loader_index: int) -> Arrival:
        """Judges a batch of an introduced loader; changes nothing. A gap means that batches were lost."""
        progress = self._loaders[loader_index]
        if batch_id % len(self._loaders) != loader_index or batch_id % self._world_size != self._rank:
            raise InvalidArgumentError(
                f"batch {batch_id} from data loader {loader_index} of {len(self._loaders)} "
                f"does not belong to rank {self._rank} of {self._world_size}"
            )
        expected = progress.share.batch_id(progress.num_announced)
        if batch_id < expected:
            return Arrival.REPEATED
        if batch_id > expected:
            raise FailedPreconditionError(
                f"rank {self._rank} expected batch {expected} from data loader {loader_index} "
                f"and got {batch_id}: this NN worker was started after the loader had begun; "
                "start the loader again with it"
            )
        if progress.num_expected is not None:
            raise FailedPreconditionError(
                f"batch {batch_id} from data loader {loader_index}, which announced its end after "
                f"{progress.num_sent} batches: send all batches of a job through one DataCtx"
            )
        return Arrival.NEXT

    def announced(self, loader_index: int) -> None:
        """The batch judged NEXT is queued."""
        self._loaders[loader_index].num_announced += 1

    def taken(self, loader_index: int) -> None:
        """The loader's oldest queued batch left the queue."""
        self._loaders[loader_index].num_taken += 1

    def end(self, loader_index: int, num_batches: int) -> None:
        """A loader sent `num_batches` to all ranks. Repeating it is fine, contradicting it is not."""
        progress = self._loaders[loader_index]
        expected = progress.share.count(num_batches)
        if progress.num_sent is not None and progress.num_sent != num_batches:
            raise FailedPreconditionError(
                f"data loader {loader_index} announced its end after {num_batches} batches, "
                f"and before after {progress.num_sent}"
            )
        if expected != progress.num_announced:
            raise FailedPreconditionError(
                f"data loader {loader_index} ended after {num_batches} batches, "
                f"{expected} of them for rank {self._rank}, which received {progress.num_announced}"
            )
        progress.num_sent, progress.num_expected = num_batches, expected

    def next_loader(self) -> int | None:
        """The loader of the smallest batch_id not taken yet, arrived or not; None at the end."""
        open_loaders = [p for p in self._loaders if not _is_done(p)]
        if not open_loaders:
            return None
        return min(open_loaders, key=lambda p: p.share.batch_id(p.num_taken)).share.loader_index

    def unfinished_loaders(self) -> list[int]:
        """Loaders that owe this rank batches or the announcement of their end."""
        return [p.share.loader_index for p in self._loaders if not _is_done(p) and p.num_expected is None]

    @property
    def finished(self) -> bool:
        """Every batch of this rank was taken. False until a loader has been heard of."""
        return bool(self._loaders) and all(_is_done(p) for p in self._loaders)


def _is_done(progress: _LoaderProgress) -> bool:
    return progress.share.first_sequence is None or progress.num_taken == progress.num_expected
