"""The NATS client with the job's TLS: it sends no password to a broker that has not shown a certificate."""

from __future__ import annotations

import logging
import ssl

from nats.aio.client import Client
from nats.errors import Error as NatsError

from persia.security.tls import TlsFiles


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
        command: bytes = super()._connect_command()
        return command


def _is_not_about_eof(record: logging.LogRecord) -> bool:
    return "eof_received() has no effect when using ssl" not in str(record.msg)
