"""torchrun without its own tracebacks, which would bury that of the rank that failed.

Run as `python -m persia.launcher.torchrun`, with torchrun's arguments.
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as run_torchrun


def main() -> None:
    """Ends with 1 when a rank has failed, and with 128 + its number after a signal."""
    try:
        run_torchrun()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"ended with exit code {failure.exitcode}; its error is above"
        if failure.exitcode < 0:
            how = f"was ended by {failure.signal_name()}"
        # The first rank to fail is the cause; the others were ended for it.
        sys.exit(f"persia-launcher: rank {rank} {how}")
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


if __name__ == "__main__":
    main()
