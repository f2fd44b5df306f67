"""The systems under test, ours and the peers', behind one interface (`base.System`).

A system's module is imported only in the child process that measures it, so that a missing library costs
that system's rows and nothing else.
"""

from __future__ import annotations

import importlib

from benchmarks.systems.base import System, UnavailableError

__all__ = ["SYSTEMS", "System", "UnavailableError", "load_system"]

SYSTEMS = {
    "persia": "benchmarks.systems.persia_module:PersiaModule",
    "persia-arrays": "benchmarks.systems.persia_arrays:PersiaArrays",
    "persia-cluster": "benchmarks.systems.persia_cluster:PersiaCluster",
    "torch-tables": "benchmarks.systems.torch_tables:TorchTables",
    "torch-fused": "benchmarks.systems.torch_tables:TorchFused",
    "fbgemm": "benchmarks.systems.fbgemm:Fbgemm",
    "torchrec": "benchmarks.systems.torchrec_fused:TorchrecFused",
    "tfra": "benchmarks.systems.tfra:Tfra",
}
"""Name -> "module:class"."""


def load_system(name: str) -> type[System]:
    """The class of system `name`.

    Raises:
        UnavailableError: what it needs cannot be imported here; the message is the import error.
    """
    module_name, class_name = SYSTEMS[name].split(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        raise UnavailableError(f"{type(error).__name__}: {error}") from error
    system: type[System] = getattr(module, class_name)
    return system
