"""Runs a rank's script so that it ends with torchrun, also when torchrun is killed.

torchrun gives every rank a session of its own, which a signal to torchrun's process group does not reach.
This is the script that torchrun runs, with the user's script and its arguments. Imports nothing of persia.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Binds this process to its parent, and becomes the user's script."""
    # Kept across exec. Sent when the parent's thread ends that started this process: torchrun's main thread.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])


if __name__ == "__main__":
    main()
