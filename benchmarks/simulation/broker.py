"""A NATS broker and its sessions, simulated: the contracts of persia.messaging.session.NatsSession.

A session has one ordered stream to the broker and one back. Bytes wait while the link is cut. After some
seconds without an answer, either end closes the connection: what was under way is lost, and the session
connects again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.simulation.kernel import Kernel, Process, Thread
from persia.errors import DeadlineExceededError, InternalError, PersiaError, UnavailableError
from persia.messaging.interface import Handler, Registration
from persia.messaging.subjects import Subjects

_SILENCE_S = 4.0  # without an answer, until a client closes its connection
_BROKER_SILENCE_S = 8.0  # and until the broker does
_REPEAT_S = 0.1
_LATENCY_NS = 2_000_000
_SPIKE_NS = 400_000_000
_RECONNECT_S = (0.1, 2.0)
_FLUSH_S = 5.0
_JOB = "simulation"


class _Listener:
    def __init__(self, session: Session, subject: str, take: Callable[[bytes, Callable[[Any], None]], None]):
        self.session, self.subject, self.take = session, subject, take


class Broker:
    """One broker on a host of its own. It may be away for a while."""

    def __init__(self, kernel: Kernel, host: int) -> None:
        self.kernel = kernel
        self.process = Process(kernel, "broker", host)
        self.is_up = True
        self.sessions: list[Session] = []

    def restart(self, down_s: float) -> None:
        self.is_up = False
        for session in tuple(self.sessions):
            session.lose()
        self.kernel.later(down_s, self._start)

    def _start(self) -> None:
        self.is_up = True

    def listeners(self, subject: str) -> list[_Listener]:
        return [
            listener
            for session in self.sessions
            if session.is_known
            for listener in session.listeners
            if listener.subject == subject
        ]


class Session:
    """One connection of a process to the broker."""

    def __init__(self, broker: Broker, process: Process) -> None:
        self.subjects = Subjects(_JOB)
        self.kernel, self.broker, self.process = broker.kernel, broker, process
        self.listeners: list[_Listener] = []
        self.is_connected = True
        self.is_known = True  # to the broker, which delivers to it
        self.num_reconnects = 0
        self.connected_at = 0
        self._connection = 0
        self._last_arrival = [0, 0]
        self._outbox: list[Callable[[], None]] = []  # what waits for a connection
        self._waiting: dict[Callable[[], None], None] = {}  # what a lost connection ends
        self._on_reconnect: list[Callable[[], None]] = []
        broker.sessions.append(self)
        process.on_killed.append(self._on_killed)

    # ---- the connection

    def _is_cut(self) -> bool:
        cuts = self.kernel.cuts
        return bool(cuts) and (self.process.host, self.broker.process.host) in cuts

    def _travel(self, direction: int, arrive: Callable[[], None]) -> None:
        """`arrive` runs at the other end: 0 at the broker, 1 in this process."""
        kernel, draw = self.kernel, self.kernel.random.random
        latency = int(draw() * _LATENCY_NS)
        if draw() < kernel.spikes:
            latency += int(draw() * _SPIKE_NS)
        now, last = kernel.now, self._last_arrival
        last[direction] = arrival = max(last[direction] + 1, now + latency)
        kernel.at(arrival, partial(self._arrive, direction, arrive, now, self._connection))

    def _arrive(self, direction: int, arrive: Callable[[], None], sent_at: int, connection: int) -> None:
        if connection != self._connection:
            return
        if not self._is_cut():
            if direction == 0:
                arrive()
            else:
                self.process.take(arrive)
            return
        kernel, last = self.kernel, self._last_arrival
        silence_s = _SILENCE_S if direction == 0 else _BROKER_SILENCE_S
        if kernel.now - sent_at > silence_s * 1e9:
            return self.lose()
        again = kernel.after(_REPEAT_S)
        last[direction] = max(last[direction], again)
        kernel.at(again, partial(self._arrive, direction, arrive, sent_at, connection))

    def lose(self) -> None:
        """The connection is lost, and restored later."""
        if self.process.is_dead or not self.is_connected:
            return
        self.kernel.log("%s loses its connection to the broker", self.process.name)
        self._connection += 1
        self.is_connected = self.is_known = False
        waiting, self._waiting = self._waiting, {}
        for end in waiting:
            self.kernel.at(self.kernel.now, end, self.process)
        self._try_again()

    def _try_again(self) -> None:
        self.kernel.later(self.kernel.random.uniform(*_RECONNECT_S), self._connect, self.process)

    def _connect(self) -> None:
        if not self.broker.is_up or self._is_cut():
            return self._try_again()
        self.is_connected = self.is_known = True
        self.connected_at = self.kernel.now
        self.num_reconnects += 1
        self.kernel.log("%s is connected to the broker again", self.process.name)
        for send in self._outbox:
            self._travel(0, send)
        self._outbox = []
        for callback in tuple(self._on_reconnect):
            Thread(target=self._call_back, args=(callback,), process=self.process).start()

    def _call_back(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except PersiaError as error:
            self.kernel.log("after a lost connection: %s", error)

    def _on_killed(self) -> None:
        # The broker hears of it at once, unless the host is cut off.
        def forget() -> None:
            if self._is_cut() and self.kernel.now < until:
                return self.kernel.later(_REPEAT_S, forget)
            self.is_known = False
            if self in self.broker.sessions:
                self.broker.sessions.remove(self)

        until = self.kernel.after(_BROKER_SILENCE_S)
        self._connection += 1
        self.kernel.later(0.001, forget)

    def _send(self, send: Callable[[], None]) -> None:
        self.kernel.this_thread().check()
        if self.is_connected:
            self._travel(0, send)
        else:
            self._outbox.append(send)

    def _ask(
        self, subject: str, payload: bytes, take: Callable[[Any], None], no_listener: PersiaError | None
    ) -> None:
        """`take` gets the answers of all who listen, or `no_listener`."""

        def at_broker() -> None:
            listeners = self.broker.listeners(subject)
            if not listeners:
                self._travel(1, lambda: take(no_listener))
            for listener in listeners:
                listener.session._deliver(
                    listener, payload, lambda answer: self._travel(1, lambda: take(answer))
                )

        self._send(at_broker)

    # ---- Session

    def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        thread, answers = self.kernel.this_thread(), []

        def take(answer: Any) -> None:
            answers.append(answer)
            thread.wake()

        def lost() -> None:
            error = UnavailableError(f"{subject}: the connection was lost")
            error.is_lost = True
            take(error)

        no_listener = UnavailableError(f"no listener on {subject}")
        no_listener.has_no_listener = True
        self._ask(subject, payload, take, no_listener)
        if self.is_connected:
            self._waiting[lost] = None
        until = self.kernel.after(timeout_s)
        while not answers and self.kernel.now < until:
            thread.wait(until)
        self._waiting.pop(lost, None)
        if not answers:
            raise DeadlineExceededError(f"no reply on {subject} within {timeout_s:g} s")
        if isinstance(answers[0], PersiaError):
            raise answers[0]
        return answers[0]  # type: ignore[no-any-return]

    def interrupt(self, subject: str) -> None:
        """Requests end by their time-outs."""

    def request_many(
        self, subject: str, payload: bytes, window_s: float, *, enough: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        thread = self.kernel.this_thread()
        replies: list[bytes] = []
        is_done = False

        def take(answer: Any) -> None:
            nonlocal is_done
            if is_done or isinstance(answer, PersiaError):
                return
            if answer is None:
                is_done = True
            else:
                replies.append(answer)
                is_done = enough is not None and enough(answer)
            if is_done:
                thread.wake()

        self._ask(subject, payload, take, None)
        until = self.kernel.after(window_s)
        while not is_done and self.kernel.now < until:
            thread.wait(until)
        is_done = True
        return replies

    def publish(self, subject: str, payload: bytes) -> None:
        thread, ended = self.kernel.this_thread(), []

        def end(error: bool) -> None:
            ended.append(error)
            thread.wake()

        def at_broker() -> None:
            for listener in self.broker.listeners(subject):
                listener.session._deliver(listener, payload, None)
            self._travel(1, lambda: end(False))

        def lost() -> None:
            end(True)

        self._send(at_broker)
        if not self.is_connected:
            return
        self._waiting[lost] = None
        until = self.kernel.after(_FLUSH_S)
        while not ended and self.kernel.now < until:
            thread.wait(until)
        self._waiting.pop(lost, None)
        if not ended or ended[0]:
            raise UnavailableError(f"{subject}: the connection was lost")

    def _deliver(self, listener: _Listener, payload: bytes, reply: Callable[[Any], None] | None) -> None:
        """From the broker to this session. `reply` goes back to the broker, and from there on."""

        def answer(result: Any) -> None:
            if reply is not None and result is not None:
                if self.is_connected:
                    self._travel(0, lambda: reply(result))
                else:
                    self._outbox.append(lambda: reply(result))

        def take() -> None:
            if listener in self.listeners:
                listener.take(payload, answer)

        self._travel(1, take)

    def respond(self, subject: str, handler: Handler, *, max_concurrency: int = 8) -> Registration:
        queue: list[tuple[bytes, Callable[[Any], None]]] = []
        num_running = 0

        def run() -> None:
            nonlocal num_running
            while queue:
                payload, answer = queue.pop(0)
                answer(_invoke(handler, payload))
            num_running -= 1

        def take(payload: bytes, answer: Callable[[Any], None]) -> None:
            nonlocal num_running
            if inspect.iscoroutinefunction(handler):
                return answer(_drive(handler(payload)))
            queue.append((payload, answer))
            if num_running < max_concurrency:
                num_running += 1
                Thread(target=run, process=self.process).start()

        return self._register(subject, take)

    def subscribe(self, subject: str, callback: Callable[[bytes], None]) -> Registration:
        queue: list[bytes] = []
        is_running = False

        def run() -> None:
            nonlocal is_running
            while queue:
                callback(queue.pop(0))
            is_running = False

        def take(payload: bytes, _answer: Callable[[Any], None]) -> None:
            nonlocal is_running
            queue.append(payload)
            if not is_running:
                is_running = True
                Thread(target=run, process=self.process).start()

        return self._register(subject, take)

    def _register(self, subject: str, take: Callable[[bytes, Callable[[Any], None]], None]) -> Registration:
        listener = _Listener(self, subject, take)
        self.listeners.append(listener)
        # The broker knows of it when this returns.
        self.kernel.sleep(0.001)

        def close() -> None:
            if listener in self.listeners:
                self.listeners.remove(listener)

        return Registration(close)

    def on_reconnect(self, callback: Callable[[], None]) -> Registration:
        self._on_reconnect.append(callback)
        return Registration(lambda: self._on_reconnect.remove(callback))

    def close(self) -> None:
        self.listeners.clear()
        self.is_known = False
        if self in self.broker.sessions:
            self.broker.sessions.remove(self)


def _invoke(handler: Handler, payload: bytes) -> Any:
    try:
        return handler(payload)
    except PersiaError as error:
        return error
    except Exception as error:
        Kernel.current.fail(f"a handler has raised {error!r}", error)
        return InternalError(repr(error))


def _drive(coroutine: Any) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a handler on the loop has waited")
