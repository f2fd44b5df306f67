"""A synchronous NATS connection for threads.

In: calls of any thread, with bytes and a subject. Out: bytes of a peer, or a typed error. The rest of the
package is threads and blocking native calls, the NATS client is asyncio: one daemon thread runs a loop with
one connection. Requests end by their time-out, `close` by a few seconds, whatever the broker does.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import re
import ssl
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError, SlowConsumerError
from nats.errors import TimeoutError as NatsTimeoutError

from persia.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
    PersiaError,
    ResourceExhaustedError,
    UnavailableError,
)
from persia.logger import get_default_logger
from persia.messaging.client import NatsClient, PlainBrokerError
from persia.messaging.daemon_pool import DaemonPool
from persia.messaging.interface import Handler, Registration
from persia.messaging.loop_thread import CALL_MARGIN_S, LoopThread
from persia.messaging.receiver import Receiver, collect_replies, flush, raise_if_error_reply, send_error
from persia.messaging.subjects import Subjects
from persia.security import nats_login
from persia.security.secret import JOB
from persia.security.tls import job_tls
from persia.waiting import Attempts

_T = TypeVar("_T")

_CLOSE_GRACE_S = 1.0  # for each of: finishing handlers, flushing, disconnecting
# A broker that ends together with the job is no news: only a loss that lasts is reported.
_LOSS_REPORT_S = 2.0
_DEFAULT_MAX_PAYLOAD = 1 << 20
_AUTHORIZATION_VIOLATION = "authorization violation"  # the broker's text, in some case
_REFUSED_SUBJECT = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)

_CONNECT_OPTIONS: dict[str, Any] = {
    "connect_timeout": 2,
    "reconnect_time_wait": 0.2,
    # Without end: every caller has a deadline of its own, and a job survives a restart of its broker.
    "max_reconnect_attempts": -1,
    # Buffer of messages published while the broker is away; publishing fails when it is full.
    "pending_size": 256 << 20,
    # A broker that vanished with its machine closes no connection: only missing answers to pings show it.
    "ping_interval": 20,
}
_NO_ANSWER = "no answer; another program may use the port"


def _warn_if_small(max_payload: int, address: str) -> None:
    if max_payload <= _DEFAULT_MAX_PAYLOAD:
        get_default_logger().warning(
            "the NATS server at %s takes messages up to %d bytes only, too small for large batches: "
            "raise its max_payload, or use `persia-launcher nats-server`",
            address,
            max_payload,
        )


class NatsSession(contextlib.AbstractContextManager["NatsSession"]):
    """One connection of this process to the broker, for one job.

    Reconnects by itself. A request under way when the connection is lost fails with `UnavailableError` at
    once, as its reply may be lost: the caller repeats it, which is harmless to the peers.
    """

    def __init__(self, url: str, job_name: str, *, name: str, role: str = JOB) -> None:
        """`name` labels the connection on the broker and in logs; nothing is sent before `connect`.

        It logs in as `role` of persia.security.secret, unless `url` has a user of its own.
        """
        self.subjects = Subjects(job_name)
        self._url = url
        self._role = role
        self._address = _checked_address(url)
        self._name = name
        self._client = NatsClient(job_tls())
        self._refusals = _Refusals(self._address, role)
        self._thread = LoopThread(name, self._refusals.raise_if_denied)
        self._last_error = _NO_ANSWER
        self._is_admitted = False
        self._end: asyncio.Future[None] | None = None  # kept: the loop holds tasks weakly
        self._waiting: dict[asyncio.Task[Any], str] = {}  # for the broker, by request; on the loop
        self._receivers: set[Receiver] = set()  # on the loop
        self._loss_report: asyncio.TimerHandle | None = None  # on the loop
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._notifier = DaemonPool(1, f"persia-nats-{name}-reconnect")

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def connect(self, deadline_s: float) -> None:
        """Connects, waiting for a broker that is not there yet.

        Raises `UnavailableError` if no broker answers within `deadline_s` seconds, and at once
        `PermissionDeniedError` if it refuses the credentials of this process.
        """
        self._thread.start()
        # The broker would otherwise see the connection break, and peers would miss the last messages.
        atexit.register(self.close)
        try:
            self._call(self._connect(deadline_s), deadline_s)
        except BaseException:
            self.close()
            raise
        _warn_if_small(self._client.max_payload, self._address)

    @property
    def is_connected(self) -> bool:
        """False while the broker is away: no request can be answered then."""
        return bool(self._client.is_connected)

    @property
    def num_reconnects(self) -> int:
        """How often a lost connection was restored."""
        return int(self._client.stats["reconnects"])

    def request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        """Sends `payload` and returns the reply.

        Raises `UnavailableError` when `subject` has no listener, which it says, or the connection is lost,
        `DeadlineExceededError` when no reply came in `timeout_s`, and the error of the peer's handler when it
        raised a `PersiaError`.
        """
        self._check_size(subject, payload)
        return self._call(self._request(subject, payload, timeout_s), timeout_s)

    def interrupt(self, subject: str) -> None:
        """Requests that wait for a reply on `subject` raise `UnavailableError` now.

        For one whose listener has connected again: the broker may have sent them to its lost connection.
        """
        with contextlib.suppress(RuntimeError):  # the session is closed
            self._thread.loop.call_soon_threadsafe(self._end_waits, lambda sent: sent == subject)

    def request_many(
        self, subject: str, payload: bytes, window_s: float, *, enough: Callable[[bytes], bool] | None = None
    ) -> list[bytes]:
        """Asks all who listen on `subject`; returns the replies of the next `window_s` seconds in order.

        Returns earlier when there is no listener, or when `enough(reply)` is true.
        """
        self._check_size(subject, payload)

        async def collect() -> list[bytes]:
            replies = await collect_replies(self._client, subject, payload, window_s, enough)
            self._refusals.raise_if_refused("publish", subject)
            return replies

        return self._call(collect(), window_s)

    @property
    def max_payload(self) -> int:
        """Bytes of a message that the broker takes; known once connected."""
        return self._client.max_payload

    def publish(self, subject: str, payload: bytes) -> None:
        """Sends `payload` to all listeners, at most once; returns when the broker has it.

        While the broker is away the message waits for it, and this returns at once.
        """
        self._check_size(subject, payload)
        self._call(self._publish(subject, payload), CALL_MARGIN_S)

    def respond(self, subject: str, handler: Handler, *, max_concurrency: int = 8) -> Registration:
        """Answers each request on `subject` with the bytes that `handler(payload)` returns.

        A coroutine function runs on the session's loop and must not block it; any other function runs on
        threads and may block. At most `max_concurrency` requests are handled at a time, without regard to
        other subjects; further ones wait. A handler that raises answers with that error, one that returns
        None does not answer.
        """
        return self._register(
            Receiver(self._client, subject, handler, replies=True, max_concurrency=max_concurrency)
        )

    def subscribe(self, subject: str, callback: Callable[[bytes], None]) -> Registration:
        """Calls `callback(payload)` for each message on `subject`, in order, on a thread of its own."""
        return self._register(Receiver(self._client, subject, callback, replies=False, max_concurrency=1))

    def on_reconnect(self, callback: Callable[[], None]) -> Registration:
        """Calls `callback()` on a thread each time that a lost connection is restored."""
        self._reconnect_callbacks.append(callback)
        return Registration(lambda: self._reconnect_callbacks.remove(callback))

    def close(self) -> None:
        """Finishes the requests being handled, flushes, disconnects. Idempotent; ends in seconds."""
        if self._thread.close(self._shut_down):
            atexit.unregister(self.close)
            self._notifier.close()

    # ---- called by threads

    def _call(self, coroutine: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        try:
            return self._thread.call(coroutine, timeout_s)
        except PersiaError:  # some are an OSError, too
            raise
        except (NatsError, OSError) as error:
            raise UnavailableError(f"NATS at {self._address}: {error or type(error).__name__}") from error

    def _check_size(self, subject: str, payload: bytes) -> None:
        limit = self._client.max_payload
        if len(payload) > limit:
            raise InvalidArgumentError(
                f"{subject}: a message of {len(payload)} bytes is above the limit of the NATS server at "
                f"{self._address}, {limit} bytes: send smaller batches, or raise max_payload "
                "(persia-launcher nats-server --max-payload)"
            )

    def _register(self, receiver: Receiver) -> Registration:
        # Both run on the loop, which alone uses `_receivers`: the set needs no lock.
        async def start() -> None:
            await receiver.start()
            self._receivers.add(receiver)
            if self._refusals.is_refused("subscription", receiver.subject):
                await stop()
            self._refusals.raise_if_refused("subscription", receiver.subject)

        async def stop() -> None:
            self._receivers.discard(receiver)
            await receiver.stop(_CLOSE_GRACE_S)

        def unregister() -> None:
            with contextlib.suppress(FailedPreconditionError, UnavailableError):  # closed with the session
                self._call(stop(), 3 * _CLOSE_GRACE_S)

        self._call(start(), CALL_MARGIN_S)
        return Registration(unregister)

    # ---- on the loop

    async def _connect(self, deadline_s: float) -> None:
        task = asyncio.ensure_future(
            self._client.connect(
                self._url,
                name=self._name,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                **_CONNECT_OPTIONS,
                **_login_options(self._url, self._role),
            )
        )
        waiting = f"the NATS server at {self._address}"
        attempts = Attempts(deadline_s, pause_s=1.0, waiting_for=lambda: f"{waiting} ({self._last_error})")
        for wait_s in attempts:
            refused = asyncio.ensure_future(self._refusals.denial.wait())
            await asyncio.wait({task, refused}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            refused.cancel()
            if task.done():
                task.result()
                self._is_admitted = True
                return
            if self._refusals.denied is not None:
                break
        task.cancel()
        await asyncio.wait({task})
        await self._disconnect()  # closes the socket of the last attempt
        raise self._refusals.denied or UnavailableError(
            f"no NATS server at {self._address} after {deadline_s:g} s ({self._last_error}): "
            "start one with `persia-launcher nats-server`, or correct PERSIA_NATS_URL"
        )

    async def _request(self, subject: str, payload: bytes, timeout_s: float) -> bytes:
        try:
            with self._ended_by_disconnect(subject, request=subject):
                message = await self._client.request(subject, payload, timeout=timeout_s)
        except NoRespondersError:
            error = UnavailableError(f"no listener on {subject}: its service has not started, or has ended")
            error.has_no_listener = True
            raise error from None
        except (NatsTimeoutError, asyncio.TimeoutError):
            raise DeadlineExceededError(f"no reply on {subject} within {timeout_s:g} s") from None
        raise_if_error_reply(subject, message)
        return message.data

    @contextlib.contextmanager
    def _ended_by_disconnect(self, subject: str, *, request: str = "") -> Iterator[None]:
        """The block waits for an answer of the broker, which a lost connection never brings.

        `request`: its subject, if the broker's refusal of it also ends the wait. It does not end a flush, for
        which the client would take the next answer as an error; that answer is on its way.
        """
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = request
        try:
            yield
        except asyncio.CancelledError:
            self._refusals.raise_if_refused("publish", subject)
            error = UnavailableError(f"{subject}: a connection to NATS at {self._address} was lost")
            error.is_lost = True
            raise error from None
        finally:
            self._waiting.pop(task, None)
        self._refusals.raise_if_refused("publish", subject)

    def _end_waits(self, is_over: Callable[[str], bool]) -> None:
        for task, sent in tuple(self._waiting.items()):
            if is_over(sent):
                task.cancel()

    async def _publish(self, subject: str, payload: bytes) -> None:
        await self._client.publish(subject, payload)
        with self._ended_by_disconnect(subject):
            await flush(self._client, int(CALL_MARGIN_S))

    async def _shut_down(self) -> None:
        # Together: the grace is that of the session, however many subjects it listens on.
        stops = [receiver.stop(_CLOSE_GRACE_S) for receiver in self._receivers]
        await asyncio.gather(*stops, return_exceptions=True)
        with contextlib.suppress(NatsError, OSError, asyncio.TimeoutError):
            if self._client.is_connected:
                await asyncio.wait_for(self._client.flush(), _CLOSE_GRACE_S)
            if self._client.is_connected or self._client.is_reconnecting:
                await asyncio.wait_for(self._client.close(), _CLOSE_GRACE_S)

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or _NO_ANSWER  # a time-out has no text
        if self._refusals.notice(error, is_admitted=self._is_admitted):
            # The client would try the same credentials again for ever. Before, `connect` reports the refusal.
            if self._refusals.denied is not None and self._is_admitted and self._end is None:
                get_default_logger().error("%s", self._refusals.denied)
                self._end = asyncio.ensure_future(self._disconnect())
            self._end_waits(partial(self._refusals.is_refused, "publish"))
        elif isinstance(error, SlowConsumerError):
            full = ResourceExhaustedError(f"{error.subject}: too many messages wait for this receiver")
            get_default_logger().error("%s; one was refused", full)
            await send_error(self._client, Msg(self._client, reply=error.reply), full)
        else:
            get_default_logger().debug("NATS at %s: %s", self._address, error or type(error).__name__)

    async def _disconnect(self) -> None:
        with contextlib.suppress(NatsError, OSError):  # the broker has closed the connection, perhaps
            await self._client.close()

    async def _on_disconnected(self) -> None:
        self._cancel_loss_report()
        self._loss_report = self._thread.loop.call_later(_LOSS_REPORT_S, self._report_loss)
        # The client would let them wait for their time-outs: a reply to a lost connection is never repeated.
        self._end_waits(lambda _: True)

    def _report_loss(self) -> None:
        if self._thread.is_open and self._refusals.denied is None:
            get_default_logger().warning("lost the connection to NATS at %s, reconnecting", self._address)

    def _cancel_loss_report(self) -> None:
        if self._loss_report is not None:
            self._loss_report.cancel()
            self._loss_report = None

    async def _on_reconnected(self) -> None:
        self._cancel_loss_report()
        get_default_logger().info("connected to NATS at %s again", self._address)
        # Not on the loop: callbacks call the session, which waits for the loop.
        for callback in tuple(self._reconnect_callbacks):
            self._notifier.submit(_run_reconnect_callback, callback)


class _Refusals:
    """What the broker refuses this process: its credentials, or uses of subjects. Used on the loop."""

    def __init__(self, address: str, role: str) -> None:
        self._address, self._role = address, role
        self._uses: set[tuple[str, str]] = set()  # (publish or subscription, subject)
        self.denied: PermissionDeniedError | None = None  # the credentials are refused
        self.denial = asyncio.Event()

    def notice(self, error: Exception, *, is_admitted: bool) -> bool:
        """Whether `error` of the client is a refusal. `is_admitted`: the broker has accepted this process."""
        if _AUTHORIZATION_VIOLATION in str(error).lower():
            self._deny(
                f"refuses the secret of role {self._role!r}: set PERSIA_JOB_SECRET or "
                "PERSIA_JOB_SECRET_FILE to the secret of the host that runs the server "
                "(`persia-launcher secret show` there), or name a user in PERSIA_NATS_URL"
            )
            return True
        # A connection that was restored may meet a broker that has not read new certificates yet.
        if isinstance(error, PlainBrokerError) or (isinstance(error, ssl.SSLError) and not is_admitted):
            self._deny(
                f"and this process do not agree on TLS ({error}): set PERSIA_TLS_DIR for both, to folders "
                "with certificates of one CA (`persia-launcher certificates create`)"
            )
            return True
        if match := _REFUSED_SUBJECT.search(str(error)):
            self._uses.add((match[1], match[2]))
        return match is not None

    def _deny(self, reason: str) -> None:
        self.denied = self.denied or PermissionDeniedError(f"the NATS server at {self._address} {reason}")
        self.denial.set()

    def is_refused(self, use: str, subject: str) -> bool:
        """Whether the broker has refused to `use` ("publish" or "subscription") the subject."""
        return (use, subject.lower()) in self._uses  # the client writes errors in lower case

    def raise_if_refused(self, use: str, subject: str) -> None:
        """PermissionDeniedError if the broker has refused this use of the subject."""
        if self.is_refused(use, subject):
            raise PermissionDeniedError(
                f"{subject}: the NATS server at {self._address} refuses this {use} to role {self._role!r}; "
                "docs/security.md lists what each role may do"
            )

    def raise_if_denied(self) -> None:
        """PermissionDeniedError if the broker has refused the credentials. On any thread."""
        if self.denied is not None:
            raise PermissionDeniedError(str(self.denied))


def _run_reconnect_callback(callback: Callable[[], None]) -> None:
    try:
        callback()
    except PersiaError as error:
        get_default_logger().warning("after the connection to NATS was lost: %s", error)
    except Exception:
        get_default_logger().exception("after the connection to NATS was lost")


def _login_options(url: str, role: str) -> dict[str, Any]:
    """How the client logs in. A user in the URL comes first, with the usual reply subjects."""
    if urlsplit(url).username is not None:
        return {}
    login = nats_login(role)
    return {"user": login.user, "password": login.password, "inbox_prefix": login.inbox_prefix}


def _checked_address(url: str) -> str:
    """`url` without credentials, as it may be logged."""
    parts = urlsplit(url)
    address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    if parts.scheme not in ("nats", "tls") or not parts.hostname:
        raise InvalidArgumentError(
            f"NATS URL {address!r} (PERSIA_NATS_URL) is not like nats://127.0.0.1:4222"
        )
    return address
