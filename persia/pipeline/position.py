"""Which batches of a job are trained: the position of its data, stored with each checkpoint.

A batch's batch_id is its number in the data of the job: loader `i` of `n` sends the numbers `i`, `i + n`,
`i + 2n`, ... This holds across restarts, so a position is a set of numbers, and means the same to any number
of loaders and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from persia.messaging.payloads import Stripes


@dataclass(frozen=True)
class DataPosition:
    """The set of trained batches: the union of its stripes.

    There is one stripe for each number of loaders and ranks under which the job has run, until a later one
    covers it. Within a stripe each loader's batches are trained in order.
    """

    stripes: Stripes = ()

    def __contains__(self, number: int) -> bool:
        return any(number < stripe[number % len(stripe)] for stripe in self.stripes)

    def first_missing(self, index: int, replicas: int) -> int:
        """How many batches loader `index` of `replicas` need not send before its first one that is missing.

        Takes time for the spread of the bounds, not for the length of the data.
        """
        position = 0
        for stripe in self.stripes:
            # The residues that numbers of this loader can have.
            common = math.gcd(replicas, len(stripe))
            bound = min(stripe[index % common :: common])
            position = max(position, -(-(bound - index) // replicas))
        while position * replicas + index in self:
            position += 1
        return position

    def count_missing(self, index: int, replicas: int, end: int) -> int:
        """How many of the numbers `index`, `index + replicas`, ... below `end` are missing.

        Takes time for the spread of the bounds, not for the length of the data.
        """
        low = max((min(stripe) for stripe in self.stripes), default=0)  # all below are there
        high = max((max(stripe) for stripe in self.stripes), default=0)  # none from here on
        num_below = len(range(index, min(low, end), replicas))
        spread = range(index + num_below * replicas, min(high, end), replicas)
        known = num_below + sum(number in self for number in spread)
        return len(range(index, end, replicas)) - known

    def joined(self, stripe: Sequence[int]) -> DataPosition:
        """The union with `stripe`."""
        bounds, others = tuple(stripe), []
        for other in self.stripes:
            if len(other) == len(bounds):
                bounds = tuple(map(max, other, bounds))
            else:
                others.append(other)
        kept = [other for other in others if max(other) > min(bounds)]
        return DataPosition((*kept, bounds) if any(bounds) else tuple(kept))


def stripe_of(bounds: Sequence[Sequence[int]]) -> list[int]:
    """The stripe of what ranks have trained: `bounds[rank][loader]`, all numbers below from that loader."""
    ranks, loaders = len(bounds), len(bounds[0])
    return [bounds[number % ranks][number % loaders] for number in range(math.lcm(ranks, loaders))]
