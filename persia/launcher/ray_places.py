"""Processes on the nodes of a Ray cluster, as a `ProcessGroup`: each in a place, which is an actor.

A place runs a process under a `Supervisor`, on the node where Ray has put it. When the actor dies, the
supervisor's watchdog ends the process, and Ray makes the place anew: elsewhere if the node has died. The
driver takes the process for dead, and decides whether to start it again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from persia.errors import FailedPreconditionError, NotFoundError, UnavailableError
from persia.launcher.nats_server import NATS
from persia.launcher.process_specs import OF_ONE_PROCESS
from persia.launcher.supervision import tell
from persia.launcher.supervisor import (
    OutputSink,
    ProcessGroup,
    ProcessSpec,
    SupervisedProcess,
    Supervisor,
)

Resources = Mapping[str, float]  # by Ray's names: CPU, GPU, memory in bytes, and the cluster's own

_WAITING_LINES = 1000  # a process that writes more than its driver reads has to wait
_POLL_S = 0.5
_PENDING_S = 10.0
# Options of a call that waits while Ray makes the place anew. Other calls fail then, and so tell of the loss.
_UNTIL_IT_IS_THERE = {"max_task_retries": -1}


class Run:
    """One start of a process, and what of its output is still to be read."""

    def __init__(self, spec: ProcessSpec, num_restarts: int) -> None:
        self._lines: queue.Queue[str] = queue.Queue(_WAITING_LINES)
        self._is_over = False
        # Detached, as Ray kills the children of an actor that ends: the watchdog must outlive the actor, to
        # end the process.
        self._supervisor = Supervisor(self._put, detach_watchdog=True)
        self.process = self._supervisor.start(spec, num_restarts)

    def poll(self) -> tuple[list[str], int | None]:
        """Waits a moment for output; returns it, and the exit code when everything was returned."""
        exit_code, found = self.process.exit_code, []
        try:
            found.append(self._lines.get(timeout=_POLL_S if exit_code is None else 0.0))
            while len(found) < _WAITING_LINES:
                found.append(self._lines.get_nowait())
        except queue.Empty:
            pass
        return found, None if found else exit_code

    def end(self) -> None:
        """Kills what runs. Its output is of no more use."""
        self._is_over = True
        self._supervisor.kill([self.process.name])
        self._supervisor.stop()  # its watchdog

    def _put(self, _name: str, line: str) -> None:
        # Waits for the driver to read, which slows a process down that writes too much, and ends when nothing
        # of the output is wanted any more.
        while not self._is_over:
            with contextlib.suppress(queue.Full):
                return self._lines.put(line, timeout=_POLL_S)


class Place:
    """Runs one process at a time. Calls name the run that they mean: those of an earlier one may be late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0  # of the latest run that was heard of; no earlier one runs
        self._run: Run | None = None  # of that number

    def free_address(self) -> tuple[str, int]:
        """Address of this node, and a port that is free."""
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as server:
            return host, server.getsockname()[1]

    def start(self, run: int, spec: ProcessSpec, num_restarts: int, folder: str) -> None:
        """Starts `spec`, which lacks the Python program and this node's environment, in `folder`."""
        with self._lock:
            if not self._is_new(run):
                return
            context = ray.get_runtime_context()
            if not context.runtime_env.get("working_dir"):  # where it is set, this process is in it
                _change_directory(folder)
            inherited = {name: value for name, value in os.environ.items() if name not in OF_ONE_PROCESS}
            own = {"PERSIA_BIND_HOST": ray.util.get_node_ip_address(), "RAY_ADDRESS": context.gcs_address}
            env = {**inherited, **own, **spec.env}
            self._run = Run(replace(spec, command=(sys.executable, *spec.command), env=env), num_restarts)

    def send_signal(self, run: int, number: int) -> None:
        """Signals the process. Of a run that is still to begin: it will not."""
        with self._lock:
            if not self._is_new(run) and self._run is not None and run == self._number:
                self._run.process.send_signal(signal.Signals(number))

    def poll(self, run: int) -> tuple[list[str], int | None] | None:
        """`Run.poll`. None: it does not run here, as Ray has made this place anew."""
        with self._lock:
            known = self._run if run == self._number else None
        # Without the lock: poll() waits for output, and signals must reach the process meanwhile.
        return None if known is None else known.poll()

    def _is_new(self, run: int) -> bool:
        """If so, ends what runs. The caller holds the lock."""
        if run <= self._number:
            return False
        known, self._number, self._run = self._run, run, None
        if known is not None:
            known.end()
        return True


def _change_directory(folder: str) -> None:
    try:
        os.chdir(folder)
    except OSError as error:
        host = ray.util.get_node_ip_address()
        raise NotFoundError(
            f"node {host} has no folder {folder} ({error.strerror}): share it among the nodes, or copy it "
            "with --copy-folder"
        ) from error


class PlacedProcess(SupervisedProcess):
    """A process in a place, for the driver."""

    def __init__(
        self,
        spec: ProcessSpec,
        sink: OutputSink,
        on_exit: Callable[[PlacedProcess], None],
        num_restarts: int,
        place: Any,
        run: int,
    ) -> None:
        """`place`: the actor."""
        super().__init__(spec, sink, num_restarts)
        self.is_place_lost = False  # the reason of its end
        self._on_exit, self._place, self._run = on_exit, place, run
        self._has_begun = False
        self._signal = 0  # that it got before it had begun
        self._is_noticed = threading.Event()  # the begin, or that signal
        threading.Thread(target=self._follow, name=f"persia-follow-{spec.name}", daemon=True).start()

    def send_signal(self, number: signal.Signals) -> None:
        """Of a process that waits for its place: the end, at once."""
        if self.exit_code is None:
            if not self._has_begun:
                self._signal = number
                self._is_noticed.set()
            self._tell_place(number)

    def _tell_place(self, number: signal.Signals) -> None:
        with contextlib.suppress(Exception):  # of a lost cluster, which `_follow` tells
            options = {} if self._has_begun else _UNTIL_IT_IS_THERE
            self._place.send_signal.options(**options).remote(self._run, int(number))

    def _follow(self) -> None:
        try:
            self._exit_code = self._await_end()
        except CancelledError:
            self._exit_code = -self._signal
        except Exception as error:  # of any kind: the job waits for this end
            self._exit_code = 1
            self._tell_place(signal.SIGKILL)
            self._add_line(f"it is given up: {error}")
        finally:
            self._on_exit(self)
            self._ended.set()

    def _await_end(self) -> int:
        start = self._place.start.options(**_UNTIL_IT_IS_THERE)
        what = self._run, self.spec, self.num_restarts, os.getcwd()
        _result(lambda: start.remote(*what), f"a place for {self.name}", is_noticed=self._is_noticed)
        self._has_begun = True
        while (polled := self._poll()) is not None:
            lines, exit_code = polled
            for line in lines:
                self._add_line(line)
            if exit_code is not None:
                return exit_code
        self.is_place_lost = True
        return -signal.SIGKILL

    def _poll(self) -> tuple[list[str], int | None] | None:
        """None: the place is lost."""
        try:
            polled: tuple[list[str], int | None] | None = ray.get(self._place.poll.remote(self._run))
        except RayActorError as error:
            self._add_line(f"its Ray actor is gone: {error}")
            return None
        except ConnectionError as error:
            raise UnavailableError(f"the Ray cluster is lost: {error}") from error
        return polled


class PlacedProcesses(ProcessGroup[PlacedProcess]):
    """Processes of a job, each in the place with its name."""

    def __init__(self, sink: OutputSink, places: Mapping[str, Any]) -> None:
        super().__init__(sink)
        self._places, self._runs = places, itertools.count(1)

    def _make(self, spec: ProcessSpec, num_restarts: int) -> PlacedProcess:
        place = self._places[spec.name]
        return PlacedProcess(spec, self._sink, self._ended.put, num_restarts, place, next(self._runs))

    def has_lost_place(self, ended: SupervisedProcess) -> bool:
        return any(process is ended and process.is_place_lost for process in self.processes)

    def is_running(self, name: str) -> bool:
        return any(process.name == name and process.exit_code is None for process in self.processes)

    def free_address(self, name: str) -> tuple[str, int]:
        """Of the node where the process is or will be. Waits until Ray has a place for it."""
        call = self._places[name].free_address.options(**_UNTIL_IT_IS_THERE)
        address: tuple[str, int] = _result(call.remote, f"a place for {name}")
        return address


def reserve(needs: Mapping[str, Resources], strategy: str) -> dict[str, Any]:
    """A place for each name, with its share of one placement group, and one for the broker beside the first.

    Waits until the cluster has them all.
    """
    # One group for all: with places one by one two jobs could each hold half of a cluster, and wait for ever.
    group = placement_group([dict(need) for need in needs.values()], strategy=strategy)
    _result(group.ready, "places for the job", lambda: f" ({_shortage(needs)})")
    places = {name: _make_place(group, index, need) for index, (name, need) in enumerate(needs.items())}
    return {NATS: _make_place(group, 0, {}), **places}


def _make_place(group: Any, index: int, need: Resources) -> Any:
    """An actor in a bundle of the group, with `need` of its resources."""
    known = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    amounts = {known[name]: amount for name, amount in need.items() if name in known}
    return (
        ray.remote(Place)
        .options(
            **{"num_cpus": 0, **amounts},
            resources={name: amount for name, amount in need.items() if name not in known},
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            max_restarts=-1,  # how often a process is started again is for the driver to decide
            max_concurrency=8,
        )
        .remote()
    )


def _result(
    call: Callable[[], Any],
    what: str,
    more: Callable[[], str] = lambda: "",
    is_noticed: threading.Event | None = None,
) -> Any:
    """Of a remote call. While there is none, the user reads now and then that `what` is awaited, and `more`.

    CancelledError: `is_noticed` was set before there was one.
    """
    noticed = is_noticed or threading.Event()
    try:
        # Not ray.get, which would lose what a handler of signals raises.
        future = call().future()
        future.add_done_callback(lambda _: noticed.set())
        while not noticed.wait(_PENDING_S):
            tell(f"waiting for the Ray cluster to have {what}{more()}")
        if future.done():
            return future.result()
    except RayTaskError as error:  # of our own code
        raise FailedPreconditionError(f"Ray could not start {what}: {error.cause}") from error
    except RayError as error:
        reason = str(error).strip().rpartition("\n")[2]  # before it is a traceback
        raise FailedPreconditionError(
            f"Ray could not start {what}: {reason}; the nodes need the same persia"
        ) from error
    except Exception as error:  # of many classes
        raise UnavailableError(f"the Ray cluster is lost: {error}") from error
    raise CancelledError


def _shortage(needs: Mapping[str, Resources]) -> str:
    total: Counter[str] = Counter()
    for need in needs.values():
        total.update(need)
    free, all_ = ray.available_resources(), ray.cluster_resources()
    return "; ".join(
        f"{name}: {amount:g} needed, {free.get(name, 0):g} free of {all_.get(name, 0):g}"
        for name, amount in total.items()
    )
