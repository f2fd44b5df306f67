"""Runs seeds in processes of their own, some at a time."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from benchmarks.simulation.library import Library
from benchmarks.simulation.scenario import Digests, Outcome, run_seed, undisturbed

# What killed processes of the simulation held is not freed: real ones end now and then.
_SEEDS_A_PART, _PARTS_A_PROCESS = 10, 10


def _run_some(expected: Digests, seeds: range) -> tuple[list[Outcome], float]:
    begin = time.process_time()
    sys.setswitchinterval(1000)  # one thread runs at a time: there is nothing to switch to
    gc.disable()  # seeds leave little
    library = Library()
    outcomes = [run_seed(library, seed, expected=expected) for seed in seeds]
    return outcomes, time.process_time() - begin


def pool_of(processes: int) -> ProcessPoolExecutor:
    """Processes for seeds. Forked from one that has no threads: a fork of this one would collect objects of
    the engine whose threads it does not have.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.simulation.seeds"])
    return ProcessPoolExecutor(processes, mp_context=context)


def run_seeds(seeds: range, processes: int) -> tuple[list[Outcome], float]:
    """The outcomes of all seeds, each run in a process beside others, and the processor time in s."""
    with pool_of(1) as pool:
        expected = pool.submit(_undisturbed).result()
    parts = [seeds[i : i + _SEEDS_A_PART] for i in range(0, len(seeds), _SEEDS_A_PART)]
    outcomes: list[Outcome] = []
    processor_s = 0.0
    # A worker that dies, by an assertion of the native half for instance, is an error here and no hang.
    for first in range(0, len(parts), processes * _PARTS_A_PROCESS):
        with pool_of(processes) as pool:
            some = parts[first : first + processes * _PARTS_A_PROCESS]
            for part, part_s in pool.map(partial(_run_some, expected), some):
                outcomes += part
                processor_s += part_s
    return outcomes, processor_s


def _undisturbed() -> Digests:
    return undisturbed(Library())
