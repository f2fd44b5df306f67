"""Types of `argparse` options: a wrong value ends with what is right, not minutes later with a traceback."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path

__all__ = ["core", "dim", "folder", "number", "whole"]


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number in these bounds, which it may equal."""
    wanted = f"from {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number {wanted}")
        return value

    return parse


dim = whole(1, 65_536)  # as slots may have


def number(above: float, most: float = math.inf) -> Callable[[str], float]:
    """A number above the one, and not above the other."""
    wanted = f"above {above:g}" if most == math.inf else f"above {above:g}, up to {most:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and above < value <= most):
            raise argparse.ArgumentTypeError(f"{text!r}: give a number {wanted}")
        return value

    return parse


def folder(text: str) -> Path:
    """A directory that exists."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no directory: make it, or give another")
    return path


def core(text: str) -> int:
    """The number of a core that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    if text not in map(str, allowed):
        raise argparse.ArgumentTypeError(f"{text!r}: give one of this process's cores {allowed}")
    return int(text)
