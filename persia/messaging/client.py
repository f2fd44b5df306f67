"""The NATS client with the job's TLS: it sends no password to a broker that has not shown a certificate.

It notices when the network to the broker is cut.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct

from nats.aio.client import Client
from nats.errors import Error as NatsError

from persia.security.tls import TlsFiles

_CHECK_S = 1.0
_NUM_UNANSWERED = 4  # checks in a row, after which a connection is cut
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),  # seconds, as the next
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
)
# Of struct tcp_info (linux/tcp.h): tcpi_probes, tcpi_unacked, and the milliseconds tcpi_last_data_sent,
# tcpi_last_data_recv and tcpi_last_ack_recv.
_TCP_INFO = struct.Struct("=3xB4x16xI16xI4xII")


class CutDetector:
    """Breaks a connection whose other end owes an answer, and was not heard for 4 to 5 s.

    The kernel would try ever more seldom: after a cut of 15 s, its next try may be 10 s away. Its
    TCP_USER_TIMEOUT would also break the connection to a broker that does not read for a while, whose kernel
    answers.
    """

    def __init__(self, transport: asyncio.WriteTransport, loop: asyncio.AbstractEventLoop) -> None:
        """Checks `transport` on `loop` until it is closed."""
        self._transport, self._loop = transport, loop
        self._connection = transport.get_extra_info("socket")
        self._num_unanswered = 0
        for level, option, value in _KEEPALIVE:
            self._connection.setsockopt(level, option, value)
        loop.call_later(_CHECK_S, self.check)

    def check(self) -> None:
        try:
            info = self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:  # it is closed
            return
        self._num_unanswered = self._num_unanswered + 1 if _is_unanswered(info) else 0
        if self._num_unanswered < _NUM_UNANSWERED:
            self._loop.call_later(_CHECK_S, self.check)
        else:
            self._transport.abort()


def _is_unanswered(tcp_info: bytes) -> bool:
    """Whether something was sent, and nothing heard since, nor since the last check."""
    num_probes, num_unacknowledged, sent_ms, data_ms, ack_ms = _TCP_INFO.unpack(tcp_info)
    heard_ms = min(data_ms, ack_ms)
    # What a full peer drops is sent ever more seldom, and each time the peer answers that it is full.
    awaits_answer: bool = num_probes > 0 or (num_unacknowledged > 0 and sent_ms < heard_ms)
    return awaits_answer and heard_ms >= 1000 * _CHECK_S


class PlainBrokerError(NatsError):
    """The broker does not encrypt, and this process has to."""

    def __str__(self) -> str:
        return "the server does not encrypt, and this process must"


class NatsClient(Client):
    """`tls` None: as the URL says: tls:// with the certificates of the system, nats:// as the broker asks."""

    def __init__(self, tls: TlsFiles | None) -> None:
        super().__init__()
        # Said at the end of each connection; the client's streams do not know that they are encrypted.
        logging.getLogger("asyncio").addFilter(_is_not_about_eof)
        self._tls = tls

    @property
    def ssl_context(self) -> ssl.SSLContext:
        # Asked for at each connection, so that a restored one uses new certificates.
        return super().ssl_context if self._tls is None else self._tls.client_context()

    def _connect_command(self) -> bytes:
        # Made after the handshake and before the first byte is sent, the password in it.
        server = self._current_server
        is_wanted = self._tls is not None or (server is not None and server.uri.scheme == "tls")
        if is_wanted and not self._server_info.get("tls_required"):
            raise PlainBrokerError
        if (writer := getattr(self._transport, "_io_writer", None)) is not None:  # none with web sockets
            CutDetector(writer.transport, asyncio.get_running_loop())
        command: bytes = super()._connect_command()
        return command

    async def _process_pong(self) -> None:
        # The client fails to answer a flush that has given up, and would read nothing more.
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()


def _is_not_about_eof(record: logging.LogRecord) -> bool:
    return "eof_received() has no effect when using ssl" not in str(record.msg)
