"""Fetching the UCI files over HTTPS: bounded in time, retried, trusted only with the right checksum."""

from __future__ import annotations

import http.client
import os
import random
import time
import urllib.request
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from adult import ChecksumError, verify
from dataset import DataError

MAX_BYTES = 16 << 20  # Four times the larger file: a server that sends more is not sending Adult.
NUM_ATTEMPTS = 4
TIMEOUT_S = 20.0
CHUNK_BYTES = 64 << 10


class DownloadError(DataError):
    """The file could not be fetched; the message says what was tried and what to do instead."""


def fetch(name: str, home_url: str, cache: Path, first_pause_s: float = 1.0) -> bytes:
    """The verified content of `home_url + name`, from `cache` when an earlier run left it there.

    Raises DownloadError after NUM_ATTEMPTS, each bounded by TIMEOUT_S of silence.
    """
    cached = cache / name
    if cached.is_file():
        content = cached.read_bytes()
        verify(name, content, str(cached))
        return content
    content = _download_with_retry(name, home_url + name, first_pause_s)
    cache.mkdir(parents=True, exist_ok=True)
    aside = cache / f"{name}.partial"
    aside.write_bytes(content)
    os.replace(aside, cached)
    return content


def _download_with_retry(name: str, url: str, first_pause_s: float) -> bytes:
    pause_s = first_pause_s
    for attempt in range(1, NUM_ATTEMPTS + 1):
        try:
            content = _download(name, url)
            verify(name, content, url)
            return content
        except (OSError, http.client.HTTPException, ChecksumError, DownloadError) as error:
            last_error = error
        if attempt < NUM_ATTEMPTS:
            wait_s = pause_s * random.uniform(0.5, 1.5)
            print(f"{url}: {last_error}; retry {attempt} of {NUM_ATTEMPTS - 1} in {wait_s:.1f} s")
            time.sleep(wait_s)
            pause_s *= 2
    raise DownloadError(
        f"{url} could not be fetched in {NUM_ATTEMPTS} attempts; the last error was: {last_error}. Without a "
        "network, let ADULT_SOURCE name a folder with adult.data and adult.test"
    )


def _download(name: str, url: str) -> bytes:
    content = bytearray()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response, Progress(*columns) as progress:
        length = response.headers.get("Content-Length")
        task = progress.add_task(name, total=float(length) if length else None)
        while chunk := response.read(CHUNK_BYTES):
            content += chunk
            progress.update(task, advance=len(chunk))
            if len(content) > MAX_BYTES:
                raise DownloadError(f"{url}: more than {MAX_BYTES} bytes, which cannot be {name}")
    return bytes(content)
