"""The sole importer of the compiled module, so that one place explains what to do when it is missing.

Everything else in the package imports from here; `persia/_core.pyi` describes what the names are.
"""

from __future__ import annotations

import sys

try:
    # By star: a list of the names here would repeat the stub, which a test compares with the module.
    from persia._core import *  # noqa: F403
    from persia._core import __version__ as __version__
except ImportError as error:
    raise ImportError(
        f"persia's compiled module for Python {sys.version_info.major}.{sys.version_info.minor} could not be "
        f"imported ({error}). Install the package with `pip install .` from its directory; do not run Python "
        "in a source tree that was not built, for its sources hide the installed package."
    ) from error
