"""A few thousand mutated messages; `python -m tests.fuzz_messages` runs for longer."""

from __future__ import annotations

import random

import pytest

from tests.fuzz_messages import DECODERS, fuzz

MESSAGES = 800


@pytest.mark.parametrize("name", DECODERS)
def test_mutated_messages_are_read_or_refused(name: str) -> None:
    decoder = DECODERS[name]
    for seed in decoder.seeds:
        decoder.decode(seed)  # else all that is mutated would be refused for one reason
    good = fuzz(name, random.Random(name), num_messages=MESSAGES)
    assert 0 < good < MESSAGES
