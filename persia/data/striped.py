"""One data loader's share of ordered batches, with a position that any number of loaders resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any, Protocol

from persia.embedding.checks import at_least, type_name
from persia.embedding.data import PersiaBatch
from persia.errors import FailedPreconditionError, InvalidArgumentError


class Batches(Protocol):
    """Batches in a fixed order: `ParquetBatches`, `SplitBinaryBatches`, or a class of your own.

    One with a method `of_epoch(epoch)` that returns such batches has an order of its own in each epoch.
    """

    def __len__(self) -> int:
        """The number of batches that `read(0)` yields."""

    def read(self, first: int = 0) -> Iterator[Any]:
        """The raw data of batch `first` and of those after it."""

    def make(self, rows: Any, *, requires_grad: bool, meta: bytes | None = None) -> PersiaBatch:
        """The batch of what `read` yields; called for a loader's own share."""


def of_epoch(batches: Any, epoch: int) -> Any:
    """`batches` in the order of an epoch; as they are if they have one order."""
    return batches.of_epoch(epoch) if hasattr(batches, "of_epoch") else batches


class StripedBatches:
    """Every `num_stripes`-th batch of all epochs: what one of several data loaders sends.

    An iteration yields the batches that are left, and continues where the last one was stopped. It raises
    InvalidArgumentError where `batches.read` yields fewer or more batches than `len(batches)`.

    `state_dict` is the position after the batch that was yielded last. Loaded by the loaders of another run,
    in whatever number, the states of all stripes make each batch come once.

    Args:
        batches: batches in a fixed order; the same in all loaders.
        stripe: number of this loader, from 0.
        num_stripes: number of loaders.
        epochs: passes over the batches.
        requires_grad: of the batches; False for an evaluation.
        first: how many batches of this stripe to leave out, such as `DataCtx.resume` returns.

    Examples:
        >>> share, first = (ctx.replica_index, ctx.replica_size), ctx.resume()
        >>> for batch in StripedBatches(SplitBinaryBatches("criteo"), *share, first=first):
        ...     ctx.send_data(batch)
    """

    def __init__(
        self,
        batches: Batches,
        stripe: int = 0,
        num_stripes: int = 1,
        *,
        epochs: int = 1,
        requires_grad: bool = True,
        first: int = 0,
    ) -> None:
        at_least(1, "num_stripes", num_stripes)
        if at_least(0, "stripe", stripe) >= num_stripes:
            raise InvalidArgumentError(f"stripe={stripe} must be below num_stripes={num_stripes}")
        self._batches, self._requires_grad = batches, requires_grad
        self._epochs = at_least(1, "epochs", epochs)
        self._stripe, self._num_stripes = stripe, num_stripes
        # Batches are numbered over all epochs. Of these, all below `next` and those in `done` were yielded by
        # earlier runs; of the others, in order, every num_stripes-th is this one's.
        self._next, self._done, self._num_yielded = 0, frozenset[int](), at_least(0, "first", first)

    def __iter__(self) -> Iterator[PersiaBatch]:
        size = len(self._batches)
        begin = self._stripe + self._num_yielded * self._num_stripes
        numbers: Iterator[int] = count(self._next + begin, self._num_stripes)  # without counting up to there
        if self._done:
            numbers = islice(_left(self._next, self._done), begin, None, self._num_stripes)
        number = next(numbers)
        while number < size * self._epochs:
            batches = of_epoch(self._batches, number // size)
            found, end = number - 1, number - number % size + size
            for found, rows in enumerate(batches.read(number % size), start=number):
                if found == end:  # it would be taken for the first one of the next epoch
                    raise _wrong_length(batches, size, "yields more")
                if found == number:
                    batch = batches.make(rows, requires_grad=self._requires_grad)
                    self._num_yielded += 1
                    yield batch
                    number = next(numbers)
            if number < end:  # else this would read for ever
                raise _wrong_length(batches, size, f"ends before batch {found + 1 - end + size}")

    def state_dict(self) -> dict[str, Any]:
        """The position, of numbers and lists only."""
        return {
            "num_batches": len(self._batches),
            "next": self._next,
            "done": sorted(self._done),
            "stripe": [self._stripe, self._num_stripes],
            "num_yielded": self._num_yielded,
        }

    def load_state_dict(self, states: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continues after `states`, those of all stripes of the earlier run, in any order.

        Raises:
            FailedPreconditionError: states of another number of batches.
            InvalidArgumentError: a stripe is missing, is there twice, or is of another run.
        """
        given = [states] if isinstance(states, Mapping) else list(states)
        if not given:
            raise InvalidArgumentError("states is empty: pass that of each stripe of the earlier run")
        head = given[0]
        num_stripes = head["stripe"][1]
        for state in given:
            if state["num_batches"] != len(self._batches):
                raise FailedPreconditionError(
                    f"the state is of {state['num_batches']} batches, there are {len(self._batches)}: "
                    "use the same files and batch_size"
                )
            same = (
                all(state[key] == head[key] for key in ("next", "done")) and state["stripe"][1] == num_stripes
            )
            if not same:
                raise InvalidArgumentError("states are of different runs: pass those of one run")
        found = sorted(state["stripe"][0] for state in given)
        if found != list(range(num_stripes)):
            raise InvalidArgumentError(
                f"states has the stripes {found} of {num_stripes}: pass that of each stripe once"
            )
        yielded = {state["stripe"][0]: state["num_yielded"] for state in given}
        done = set(head["done"])
        reach = max(yielded.values()) * num_stripes
        for position, number in enumerate(islice(_left(head["next"], done.copy()), reach)):
            if position // num_stripes < yielded[position % num_stripes]:
                done.add(number)
        following = head["next"]
        while following in done:
            done.remove(following)
            following += 1
        self._next, self._done, self._num_yielded = following, frozenset(done), 0


def _left(first: int, done: set[int] | frozenset[int]) -> Iterator[int]:
    return (number for number in count(first) if number not in done)


def _wrong_length(batches: object, size: int, found: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{type_name(batches)} has {size} batches by its len(), but its read() {found}: return from len() "
        "the number of batches that read(0) yields"
    )
