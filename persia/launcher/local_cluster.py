"""Broker and servers of a job on this machine, on free ports, for `persia.helper` and `persia.testing`.

Nothing is replaced by a fake: a `LocalCluster` runs the same commands that a production job runs, so a test
against it covers start order, discovery, the wire and the ends of processes as well.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from persia.config import (
    load_embedding_config,
    load_global_config,
    parse_embedding_config,
    parse_global_config,
)
from persia.errors import ConfigError, DeadlineExceededError, NotFoundError, UnavailableError
from persia.launcher.nats_server import start_local_nats
from persia.launcher.process_specs import ProcessSpecs, job_environment
from persia.launcher.resizing import Resizer, ResizeState
from persia.launcher.supervisor import ManagedProcess, Supervisor
from persia.messaging.discovery import Directory
from persia.messaging.session import NatsSession
from persia.messaging.subjects import EMBEDDING_PARAMETER_SERVER, EMBEDDING_WORKER
from persia.security import install
from persia.security.secret import TRAINER
from persia.utils import dump_yaml
from persia.waiting import Attempts

_T = TypeVar("_T")
_Config = str | os.PathLike[str] | Mapping[str, Any]

_PROBE_S = 0.2


class LocalNats:
    """A NATS server on a free port, as a context manager."""

    def __init__(self) -> None:
        self.url = ""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LocalNats:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="persia-"))
            self._supervisor = stack.enter_context(Supervisor())
            self.url = start_local_nats(self._supervisor, Path(folder))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def kill(self) -> None:
        """Kills the server, as a crash would."""
        (process,) = self._supervisor.processes
        _kill(process)

    def restart(self) -> None:
        """Starts it again on its port; kills it first when it runs."""
        (process,) = self._supervisor.processes
        _kill(process)
        self._supervisor.start(process.spec)


class LocalCluster:
    """NATS, embedding parameter servers and embedding workers, ready for loaders and NN workers when entered.

    Processes have names: "nats", "embedding-parameter-server-0", "embedding-worker-0", "data-loader-0",
    "nn-worker". `env` holds the variables that a script needs to join the job, for a process of your own or
    for `monkeypatch`. Leaving the cluster ends everything that runs.
    """

    def __init__(
        self,
        *,
        embedding_config: _Config,
        global_config: _Config | None = None,
        parameter_servers: int = 1,
        embedding_workers: int = 1,
        env: Mapping[str, str] | None = None,
        start_deadline_s: float = 240.0,
    ) -> None:
        """`embedding_config` and `global_config` are files or their contents.

        Starts `parameter_servers` and `embedding_workers`, which have `start_deadline_s` seconds to be ready.
        `env` is added to the environment of every process.
        Raises ConfigError here rather than in a server, whose output would have to be searched for it.
        """
        _check(embedding_config, parse_embedding_config, load_embedding_config)
        loaded = _check(global_config or {}, parse_global_config, load_global_config)
        self._has_standbys = loaded.embedding_parameter_server_config.standbys > 0
        # Written to files when the cluster starts: processes read them as those of production do.
        self._configs = {"embedding_config": embedding_config, "global_config": global_config or {}}
        self._num_replicas = {
            EMBEDDING_PARAMETER_SERVER: parameter_servers,
            EMBEDDING_WORKER: embedding_workers,
        }
        self._extra_env = dict(env or {})
        _check_tls(self._extra_env)
        self._start_deadline_s = start_deadline_s
        # Random, so that clusters that share a broker by accident do not meet.
        self._job_name = f"test-{secrets.token_hex(4)}"
        self._stack = contextlib.ExitStack()
        self.nats_url = ""

    def __enter__(self) -> LocalCluster:
        # When the start fails, the stack ends what has been started.
        with contextlib.ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def join(self, role: str = TRAINER) -> None:
        """Gives native clients that this process makes from now on a role in the cluster's job."""
        install(role, self._job_name)

    @property
    def env(self) -> dict[str, str]:
        """The whole environment for a process that joins the job."""
        return dict(self._specs.env)

    @property
    def processes(self) -> list[ManagedProcess]:
        """Everything that was started, ended or not."""
        return self._supervisor.processes

    @property
    def session(self) -> NatsSession:
        """A connection to the job's broker."""
        return self._session

    def start_loader(
        self,
        script: str | os.PathLike[str],
        *arguments: str,
        replica_index: int = 0,
        replica_size: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> ManagedProcess:
        """Starts a data loader, named by its index."""
        spec = self._specs.data_loader(os.fspath(script), arguments, replica_index, replica_size, env or {})
        return self._supervisor.start(spec)

    def start_nn_worker(
        self,
        script: str | os.PathLike[str],
        *arguments: str,
        nproc: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> ManagedProcess:
        """Starts the training script with `nproc` ranks."""
        return self._supervisor.start(self._specs.nn_worker(os.fspath(script), arguments, nproc, env or {}))

    def add_embedding_worker(self) -> None:
        """Starts one more embedding worker beside those that run, and returns when it is ready."""
        # Each worker tells the number that it knows, which is its own index and one; others take the largest.
        index = self._num_replicas[EMBEDDING_WORKER]
        process = self._supervisor.start(self._specs.server(EMBEDDING_WORKER, index, index + 1))
        self._num_replicas[EMBEDDING_WORKER] = index + 1
        self._await_ready(EMBEDDING_WORKER, pid=process.pid, index=index)

    def resize(self, parameter_servers: int) -> ResizeState:
        """Changes the number of parameter servers while the job trains; returns when it has changed.

        The processes have other names then, such as "embedding-parameter-server-0-of-3".
        """
        return self._resizer.resize(parameter_servers)

    def rebalance(self) -> ResizeState:
        """Replaces the parameter servers by as many, among which the measured load is even."""
        return self._resizer.resize(0, rebalances=True)

    def wait(self, process: ManagedProcess, timeout_s: float = 120.0) -> int:
        """Waits until `process` has ended and returns its exit code.

        Raises `DeadlineExceededError` with its output when it still runs after `timeout_s`.
        """
        exit_code = process.wait(timeout_s)
        if exit_code is None:
            raise DeadlineExceededError(f"{process.name} still runs after {timeout_s:g} s:\n{process.output}")
        return exit_code

    def kill(self, name: str) -> None:
        """Kills a process, as a crash would, and waits for its end."""
        _kill(self._find(name))

    def stop(self, name: str, timeout_s: float = 10.0) -> int:
        """Ends a process by SIGTERM; returns its exit code."""
        process = self._find(name)
        process.send_signal(signal.SIGTERM)
        return self.wait(process, timeout_s)

    def restart(self, name: str) -> None:
        """Kills a process when it runs, and starts it again as before; waits until a server is ready."""
        old = self._find(name)
        # Killed rather than stopped: a restart in tests stands for a crash.
        _kill(old)
        new = self._supervisor.start(old.spec)
        role, _, index = name.partition("-of-")[0].rpartition("-")
        if role in self._num_replicas:
            self._await_ready(role, pid=new.pid, index=int(index))

    def logs(self, name: str) -> str:
        """What a process has written, its last 2,000 lines."""
        return self._find(name).output

    def _start(self, stack: contextlib.ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="persia-")))
        self._supervisor = stack.enter_context(Supervisor())
        self.nats_url = start_local_nats(self._supervisor, folder)
        self._specs = self._make_specs(folder)
        servers = {}
        for role, replicas in self._num_replicas.items():
            for index in range(replicas):
                spec = self._specs.server(role, index, replicas)
                servers[role, index] = self._supervisor.start(spec)
                if role == EMBEDDING_PARAMETER_SERVER and self._has_standbys:
                    self._supervisor.start(self._specs.server(role, index, replicas, standby=True))
        # After the servers are started, which connect by themselves: the cluster is ready sooner.
        self._session = stack.enter_context(NatsSession(self.nats_url, self._job_name, name="local-cluster"))
        self._session.connect(self._start_deadline_s)
        num_servers = self._num_replicas[EMBEDDING_PARAMETER_SERVER]
        self._resizer = Resizer(self._supervisor, self._session, self._specs, num_servers)
        for (role, index), process in servers.items():
            self._await_ready(role, pid=process.pid, index=index)

    def _make_specs(self, folder: Path) -> ProcessSpecs:
        files = {}
        for key, config in self._configs.items():
            if isinstance(config, Mapping):
                files[key] = str(folder / f"{key}.yml")
                dump_yaml(dict(config), files[key])
            else:
                files[key] = os.fspath(config)
        # As variables rather than options: scripts find the configs as well.
        paths = {f"PERSIA_{key.upper()}": path for key, path in files.items()}
        extra = {**paths, **self._extra_env}
        env = job_environment(nats_url=self.nats_url, job_name=self._job_name, extra=extra)
        return ProcessSpecs(env=env, **files)

    def _await_ready(self, role: str, *, pid: int, index: int) -> None:
        directory = Directory(self._session)
        for _ in Attempts(self._start_deadline_s):
            info = directory.probe(role, index, _PROBE_S)
            # By its pid: the predecessor of a restarted server may still answer.
            if info is not None and info.pid == pid:
                return
            # A server that has failed will not get ready: its output tells why, and waiting on tells nothing.
            for process in self._supervisor.processes:
                is_needed = process.name.startswith(role) and not self._resizer.is_expendable(process.name)
                if is_needed and process.exit_code is not None:
                    raise UnavailableError(
                        f"{process.name} ended with exit code {process.exit_code}:\n{process.output}"
                    )
        raise DeadlineExceededError(f"{role} {index} is not ready after {self._start_deadline_s:g} s")

    def _find(self, name: str) -> ManagedProcess:
        names = [process.name for process in self._supervisor.processes]
        if name not in names:
            raise NotFoundError(f"no process {name!r} in this cluster: {', '.join(names)}")
        return self._supervisor.processes[names.index(name)]


def _kill(process: ManagedProcess) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(10.0)


def _check_tls(extra: Mapping[str, str]) -> None:
    # This process runs the broker, and is a client of it: it has to have the same certificates.
    name = "PERSIA_TLS_DIR"
    if name in extra and extra[name] != os.environ.get(name, ""):
        raise ConfigError(
            f"env has {name}={extra[name]!r}, and this process {os.environ.get(name)!r}: set it in "
            "os.environ, which all processes of the cluster inherit"
        )


def _check(config: _Config, parse: Callable[[Mapping[str, Any]], _T], load: Callable[[str], _T]) -> _T:
    return parse(config) if isinstance(config, Mapping) else load(os.fspath(config))
