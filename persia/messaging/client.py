"""The NATS client with the job's TLS: it sends no password to a broker that has not shown a certificate."""

from __future__ import annotations

import logging
import socket
import ssl

from nats.aio.client import Client
from nats.errors import Error as NatsError

from persia.security.tls import TlsFiles

# The kernel breaks a connection whose other end it has not heard for so long. It would try ever more seldom
# otherwise: after a cut of 15 s, its next try may be 10 s away.
_SILENCE_MS = 4000
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),  # seconds, as the next
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS),
)


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
        self._detect_cuts()
        command: bytes = super()._connect_command()
        return command

    def _detect_cuts(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)  # none with web sockets
        connection = None if writer is None else writer.get_extra_info("socket")
        if connection is not None:
            for level, option, value in _SOCKET_OPTIONS:
                connection.setsockopt(level, option, value)


def _is_not_about_eof(record: logging.LogRecord) -> bool:
    return "eof_received() has no effect when using ssl" not in str(record.msg)
