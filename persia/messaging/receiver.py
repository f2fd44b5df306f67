"""One subscription: hands messages to a handler, a bounded number at a time, and sends its replies.

Apart from the session because of its one subtle duty: whatever a handler does, the peer that asked gets an
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from persia import errors
from persia.errors import InternalError, PersiaError, ResourceExhaustedError, UnavailableError
from persia.logger import get_default_logger
from persia.messaging.daemon_pool import DaemonPool
from persia.messaging.interface import Handler
from persia.waiting import Attempts

_NO_RESPONDERS = "503"  # the broker's status for a request without listeners
# Marks an error reply: its value is the error's class, the payload the message.
ERROR_HEADER = "Persia-Error"
MAX_ERROR_BYTES = 4096  # an error may quote a message of many megabytes

# A requester has few requests in flight and each waits for its reply, so what is queued here is bounded by
# the peers. The limits are the backstop: a message beyond them is refused with an error reply, not dropped.
_PENDING_MESSAGES_LIMIT = 65_536
_PENDING_BYTES_LIMIT = 1 << 30
_FLUSH_S = 10


class Receiver:
    """Handles the messages of one subject. All methods but the constructor run on the session's loop."""

    def __init__(
        self, client: Client, subject: str, handler: Handler, *, replies: bool, max_concurrency: int
    ) -> None:
        self.subject = subject
        self._client = client
        self._handler = handler
        self._replies = replies
        self._on_loop = inspect.iscoroutinefunction(handler)
        # Of this subject alone: handlers that wait for room must not keep those of other subjects waiting.
        self._pool = DaemonPool(max_concurrency, f"persia-{subject}")
        self._permits = asyncio.Semaphore(max_concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Subscribes; when it returns, the broker knows of the interest."""
        self._subscription = await self._client.subscribe(
            self.subject,
            cb=self._on_message,
            pending_msgs_limit=_PENDING_MESSAGES_LIMIT,
            pending_bytes_limit=_PENDING_BYTES_LIMIT,
        )
        # A request that is sent after this must find a listener: without one it fails at once.
        await flush(self._client, _FLUSH_S)

    async def stop(self, grace_s: float) -> None:
        """Takes no new messages and finishes those being handled; after `grace_s` they are refused."""
        await self._drain(grace_s)
        if self._tasks:
            _, unfinished = await asyncio.wait(self._tasks, timeout=grace_s)
            # Cancelled tasks answer with an error: the peer need not wait for its time-out.
            for task in unfinished:
                task.cancel()
            if unfinished:
                await asyncio.wait(unfinished, timeout=grace_s)
        self._pool.close()

    async def _drain(self, grace_s: float) -> None:
        """Unsubscribes, and hands the messages received before that to the handler."""
        if self._subscription is None:
            return
        drain = asyncio.ensure_future(self._subscription.drain())  # type: ignore[no-untyped-call]
        for wait_s in Attempts(grace_s):
            # A lost connection does not end the drain, which asks the broker for a sign.
            if drain.done() or not self._client.is_connected:
                break
            await asyncio.wait({drain}, timeout=wait_s)
            if drain.done():
                break  # the next attempt would block the loop for the rest of its pause
        drain.cancel()
        with contextlib.suppress(NatsError, OSError, asyncio.TimeoutError, asyncio.CancelledError):
            await drain

    async def _on_message(self, message: Msg) -> None:
        # The client calls this for one message at a time: waiting here holds up this subject only.
        await self._permits.acquire()
        task = asyncio.get_running_loop().create_task(self._handle(message))
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._permits.release()

    async def _handle(self, message: Msg) -> None:
        try:
            reply = await self._invoke(message.data)
        except asyncio.CancelledError:
            await send_error(self._client, message, UnavailableError("the receiver is shutting down"))
            return
        except Exception as error:
            self._log(error)
            await send_error(self._client, message, error)
            return
        if self._replies and reply is not None:
            await self._reply(message, reply)

    async def _invoke(self, payload: bytes) -> bytes | None:
        if self._on_loop:
            result = self._handler(payload)
        else:
            result = await asyncio.wrap_future(self._pool.submit(self._handler, payload))
        return await result if inspect.isawaitable(result) else result

    async def _reply(self, message: Msg, reply: bytes) -> None:
        # Publishing it would raise, and the requester would wait for its time-out without knowing why.
        if len(reply) > self._client.max_payload:
            limit = self._client.max_payload
            error = ResourceExhaustedError(
                f"the reply has {len(reply)} bytes, the NATS server allows {limit}"
            )
            await send_error(self._client, message, error)
            return
        await _publish_reply(self._client, message.reply, reply, None)

    def _log(self, error: Exception) -> None:
        # A PersiaError explains itself; anything else is a bug whose traceback is wanted.
        logger = get_default_logger()
        logger.warning(
            "%s: %s", self.subject, error, exc_info=None if isinstance(error, PersiaError) else error
        )


async def flush(client: Client, timeout_s: int) -> None:
    """Returns once the broker has taken, or refused, all that `client` has sent."""
    # Twice: the client writes its first ping at once, but messages before it from another task, which has run
    # by the time of the second.
    for _ in range(2):
        await client.flush(timeout=timeout_s)


async def collect_replies(
    client: Client, subject: str, payload: bytes, window_s: float, enough: Callable[[bytes], bool] | None
) -> list[bytes]:
    """Asks all who listen on `subject`: see `NatsSession.request_many`."""
    replies: list[bytes] = []
    done = asyncio.Event()

    async def collect(message: Msg) -> None:
        if (message.headers or {}).get("Status") == _NO_RESPONDERS:
            done.set()
            return
        replies.append(message.data)
        if enough is not None and enough(message.data):
            done.set()

    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, cb=collect)
    try:
        await client.publish(subject, payload, reply=inbox)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(done.wait(), window_s)
    finally:
        with contextlib.suppress(NatsError):
            await subscription.unsubscribe()
    return replies


async def send_error(client: Client, message: Msg, error: Exception) -> None:
    """Answers `message`, when it is a request, with an error reply."""
    known = isinstance(error, PersiaError)
    name = type(error).__name__ if known else InternalError.__name__
    text = str(error) if known else f"{type(error).__name__}: {error}"
    await _publish_reply(client, message.reply, text.encode()[:MAX_ERROR_BYTES], {ERROR_HEADER: name})


def raise_if_error_reply(subject: str, message: Msg) -> None:
    """Raises the error that `send_error` has put into a reply, by its class."""
    name = (message.headers or {}).get(ERROR_HEADER)
    if name is None:
        return
    # The name comes from the network: only our own classes may be looked up with it.
    error_class = getattr(errors, name) if name in errors.__all__ else InternalError
    raise error_class(f"{subject}: {message.data[:MAX_ERROR_BYTES].decode(errors='replace')}")


async def _publish_reply(client: Client, inbox: str, payload: bytes, headers: dict[str, str] | None) -> None:
    if not inbox:
        return
    try:
        await client.publish(inbox, payload, headers=headers)
    except (NatsError, OSError) as error:
        # The requester sees its own time-out or lost connection and repeats the request.
        get_default_logger().warning("a reply could not be sent: %s", error or type(error).__name__)
