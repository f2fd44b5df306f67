"""Runs a function that `persia.helper` has pickled into a file of its own: `python run_function.py FILE`.

The file is written and deleted by the process that starts this one, in a folder only its user can read.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

__all__ = ["main"]


def main() -> None:
    """Calls the function; its result is not kept."""
    pickle.loads(Path(sys.argv[1]).read_bytes())()


if __name__ == "__main__":
    main()
