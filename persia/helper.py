"""A whole job around a block of a script, a notebook or a test: servers, and functions as processes.

    with PersiaServiceCtx(data_loader_func=load, embedding_config={"slots_config": {...}}):
        with TrainCtx(...) as ctx:      # in this process; or as nn_worker_func, in processes of its own
            ...

For one process without servers no helper is needed: a context without PERSIA_NATS_URL is embedded. Where only
loading needs processes of its own, `embedding_worker_replica_num=0, embedding_parameter_replica_num=0` starts
no server, and the context is embedded all the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle

from persia import env
from persia.embedding.checks import at_least
from persia.errors import ConfigError, DeadlineExceededError, InvalidArgumentError, UnavailableError
from persia.launcher.local_cluster import LocalCluster
from persia.launcher.supervisor import ManagedProcess
from persia.logger import get_default_logger
from persia.messaging.subjects import DATA_LOADER, NN_WORKER

__all__ = ["PersiaServiceCtx", "ensure_persia_service"]

_DEFAULT_GLOBAL_CONFIG: Mapping[str, Any] = {
    "common_config": {"metrics_config": {"enable_metrics": False}},
    "embedding_worker_config": {"forward_buffer_size": 1000},
}
_POLL_S = 0.2
_NUM_SHOWN_LINES = 40
_VERDICT_S = 10.0  # for a process that has told others of its error to end
# Those by which contexts in the block find the job; all others stay as they are.
_VARIABLES = (
    "PERSIA_NATS_URL",
    "PERSIA_JOB_NAME",
    "PERSIA_EMBEDDING_CONFIG",
    "PERSIA_GLOBAL_CONFIG",
    "PERSIA_EMBEDDED",
)


class PersiaServiceCtx:
    """Runs a job on this machine while its block runs; everything has ended when the block is left.

    Inside, the environment of this process names the job, so that contexts join it. When a server ends, or a
    function fails, UnavailableError is raised in the block (on the main thread, at once; elsewhere when the
    block ends) with the last lines of the process. With `nn_worker_func`, leaving the block waits for it.

    Args:
        data_loader_func: called in `data_loader_replica_num` processes; sends batches through a DataCtx.
        nn_worker_func: called in `nproc_per_node` processes, the ranks; trains in a TrainCtx.
        embedding_config, embedding_config_path: the slots, as a mapping or a file; one of them is needed.
        global_config, global_config_path: settings of the servers; by default metrics are off.
        data_loader_replica_num, nproc_per_node, embedding_worker_replica_num,
            embedding_parameter_replica_num: numbers of processes. The last two may both be 0: embeddings then
            live in the process that trains, one rank, which the loaders' processes feed.
        embedding_worker_port, embedding_parameter_server_port, nats_server_port: accepted for scripts of the
            published system; servers take free ports, and find each other by discovery.
        start_deadline_s: seconds until the servers must be ready.

    Raises InvalidArgumentError and ConfigError for what cannot work, before anything starts.
    """

    def __init__(
        self,
        data_loader_func: Callable[[], object] | None = None,
        nn_worker_func: Callable[[], object] | None = None,
        embedding_config: Mapping[str, Any] | None = None,
        embedding_config_path: str | os.PathLike[str] | None = None,
        global_config: Mapping[str, Any] | None = None,
        global_config_path: str | os.PathLike[str] | None = None,
        data_loader_replica_num: int = 1,
        nproc_per_node: int = 1,
        embedding_worker_replica_num: int = 1,
        embedding_parameter_replica_num: int = 1,
        embedding_worker_port: int = 7777,
        embedding_parameter_server_port: int = 8888,
        nats_server_port: int = 4222,
        *,
        start_deadline_s: float = 240.0,
    ) -> None:
        is_embedded = embedding_worker_replica_num == embedding_parameter_replica_num == 0
        least_servers = 0 if is_embedded else 1
        for name, number, least in (
            ("data_loader_replica_num", data_loader_replica_num, 1),
            ("nproc_per_node", nproc_per_node, 1),
            ("embedding_worker_replica_num", embedding_worker_replica_num, least_servers),
            ("embedding_parameter_replica_num", embedding_parameter_replica_num, least_servers),
        ):
            at_least(least, name, number)
        if is_embedded and nproc_per_node > 1:
            raise InvalidArgumentError(
                f"nproc_per_node is {nproc_per_node}: without servers each would train embeddings of its own"
            )
        self._functions = {"data_loader_func": data_loader_func, "nn_worker_func": nn_worker_func}
        self._num_loaders, self._num_ranks = data_loader_replica_num, nproc_per_node
        # Functions are pickled by the names of their modules, which the children must find.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._cluster = LocalCluster(
            embedding_config=_one_config("embedding_config", embedding_config, embedding_config_path),
            global_config=_one_config(
                "global_config", global_config, global_config_path, _DEFAULT_GLOBAL_CONFIG
            ),
            parameter_servers=embedding_parameter_replica_num,
            embedding_workers=embedding_worker_replica_num,
            env={"PYTHONPATH": path, "PERSIA_EMBEDDED": "1" if is_embedded else "0"},
            start_deadline_s=start_deadline_s,
        )
        self._stack = contextlib.ExitStack()
        self._nn_worker: ManagedProcess | None = None
        self._failure: UnavailableError | None = None
        self._lock = threading.Lock()  # held while the block is interrupted, and where it ends
        self._stopping = threading.Event()
        self._failed = threading.Event()

    def __enter__(self) -> PersiaServiceCtx:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="persia-")))
            # Left in reverse order: the watch ends before the servers do, and takes their end for no failure.
            stack.enter_context(self._cluster)
            # Restored in any case: later contexts of this process must not look for a job that has ended.
            stack.callback(_set_environment, {name: os.environ.get(name) for name in _VARIABLES})
            _set_environment({name: self._cluster.env.get(name) for name in _VARIABLES})
            self._start_functions(folder)
            in_main = threading.current_thread() is threading.main_thread()
            watch = threading.Thread(target=self._watch, args=(in_main,), name="persia-service", daemon=True)
            watch.start()
            stack.callback(watch.join, 5.0)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._failure is None:
                self.wait()
            elif isinstance(error, UnavailableError):
                self._await_verdict(error)
            with self._lock:
                self._stopping.set()
        except (KeyboardInterrupt, UnavailableError):
            if self._failure is None:
                raise
        finally:
            self._stopping.set()
            self._stack.close()
        # An error of the block is its own, but for those that come from the process which has failed.
        if self._failure is not None and isinstance(error, UnavailableError) and error is not self._failure:
            raise self._failure from error
        if self._failure is not None and (error is None or isinstance(error, KeyboardInterrupt)):
            raise self._failure from None

    @property
    def nats_url(self) -> str:
        """The job's broker."""
        return self._cluster.nats_url

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns once `nn_worker_func` has ended in all ranks; at once without one.

        Raises UnavailableError when a process of the job fails, DeadlineExceededError after `timeout_s`.
        """
        # In steps, so that the failure of another process ends the wait.
        waited = 0.0
        while self._nn_worker is not None and self._nn_worker.exit_code is None and not self._failed.is_set():
            if timeout_s is not None and waited >= timeout_s:
                raise DeadlineExceededError(f"nn_worker_func still runs after {timeout_s:g} s")
            self._nn_worker.wait(_POLL_S)
            waited += _POLL_S
        if self._nn_worker is not None and self._nn_worker.exit_code not in (None, 0):
            self._failed.wait(5 * _POLL_S)  # the watch says what else has failed before it
        if self._failure is not None:
            raise self._failure

    def logs(self, name: str) -> str:
        """What a process has written: "nats", "embedding-worker-0", "data-loader-0", "nn-worker", ..."""
        return self._cluster.logs(name)

    def _await_verdict(self, error: UnavailableError) -> None:
        """The watch says which process has failed, and where; under load its end may take a while."""
        if not self._failed.is_set():
            get_default_logger().warning(
                "the block ended with: %s; up to %g s for a process that has caused it to end",
                error,
                _VERDICT_S,
            )
            self._failed.wait(_VERDICT_S)

    def _start_functions(self, folder: Path) -> None:
        # In a folder of its own, which comes first on its path: ours holds modules named like others.
        script = folder / "run_function.py"
        script.write_text("import pickle, sys\npickle.load(open(sys.argv[1], 'rb'))()\n")
        files = {
            name: _pickled(function, folder / f"{name}.pickle")
            for name, function in self._functions.items()
            if function is not None
        }
        if "data_loader_func" in files:
            for index in range(self._num_loaders):
                self._cluster.start_loader(
                    script, files["data_loader_func"], replica_index=index, replica_size=self._num_loaders
                )
        # Loaders first: ranks wait for them, and would report that no loader has joined.
        if "nn_worker_func" in files:
            self._nn_worker = self._cluster.start_nn_worker(
                script, files["nn_worker_func"], nproc=self._num_ranks
            )

    def _watch(self, interrupt: bool) -> None:
        while not self._stopping.wait(_POLL_S):
            failed = next((p for p in self._cluster.processes if _has_failed(p)), None)
            if failed is None:
                continue
            lines = "\n".join(f"    {line}" for line in failed.output.splitlines()[-_NUM_SHOWN_LINES:])
            with self._lock:
                # The block has ended meanwhile; its servers end in order, which is no failure.
                if self._stopping.is_set():
                    return
                self._failure = UnavailableError(
                    f"{failed.name} ended with exit code {failed.exit_code}:\n{lines}"
                )
                self._failed.set()
                get_default_logger().error("%s", self._failure)
                # A real signal, which also ends what blocks; the block's end turns it into the failure.
                if interrupt and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return


ensure_persia_service = PersiaServiceCtx  # the published name


def _one_config(
    name: str,
    mapping: Mapping[str, Any] | None,
    path: str | os.PathLike[str] | None,
    default: Mapping[str, Any] | None = None,
) -> Mapping[str, Any] | str | os.PathLike[str]:
    if mapping is not None and path is not None:
        raise InvalidArgumentError(f"{name} and {name}_path are both given: keep one")
    given = path if mapping is None else mapping
    if given is None and default is None:
        raise ConfigError(f"the job needs its slots: pass {name} or {name}_path")
    return given if given is not None else default or {}


def _pickled(function: Callable[[], object], path: Path) -> str:
    if not callable(function):
        raise InvalidArgumentError(f"{path.stem} is {function!r}: pass a function without arguments")
    # cloudpickle, because functions of a notebook have no module that a child could import.
    path.write_bytes(cloudpickle.dumps(function))
    return str(path)


def _has_failed(process: ManagedProcess) -> bool:
    """Functions end when they have done their work; servers have no reason to end."""
    if process.name.startswith(f"{DATA_LOADER}-"):
        return process.exit_code not in (None, 0, os.EX_TEMPFAIL)  # EX_TEMPFAIL: a rank has failed
    return process.exit_code is not None and not (process.name == NN_WORKER and process.exit_code == 0)


def _set_environment(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # Rank and replica are cached when they are first read.
    env.reload_env()
