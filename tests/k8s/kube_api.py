"""Plain HTTPS requests to the API server, independent of the client library that is under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import urllib3


class Api:
    """Requests as one user. Thread-safe."""

    def __init__(self, url: str, token: str, authority: Path) -> None:
        """`authority`: the certificate that has signed the server's."""
        self._url = url
        self._token = token
        self._pool = urllib3.PoolManager(ca_certs=str(authority), maxsize=8)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        kind: str = "application/json",
        accept: str = "application/json",
    ) -> tuple[int, Any]:
        """Returns the HTTP status and the answer."""
        response = self._pool.request(
            method,
            self._url + path,
            body=None if body is None else json.dumps(body),
            headers={"Accept": accept, "Content-Type": kind, "Authorization": f"Bearer {self._token}"},
            timeout=60,
            retries=False,
        )
        try:
            return response.status, json.loads(response.data or b"{}")
        except ValueError:  # of a group that is not served, or not yet
            return response.status, {"message": response.data.decode(errors="replace")}

    def get(self, path: str) -> tuple[int, Any]:
        return self.request("GET", path)

    def merge(self, path: str, patch: Any) -> tuple[int, Any]:
        return self.request("PATCH", path, patch, "application/merge-patch+json")

    def close(self) -> None:
        self._pool.clear()
