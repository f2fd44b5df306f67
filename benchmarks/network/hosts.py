"""Hosts of a network on this machine: namespaces of the kernel, joined by a bridge. Needs root and `nft`.

A packet that is dropped here leaves no trace for its sender: no RST, and no link that is down.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

__all__ = ["Network", "why_no_network"]

_NUMBERS = itertools.count()  # of the networks of this process


def why_no_network() -> str:
    """Why this process cannot make a network; "" if it can."""
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if missing:
        return f"needs the commands {' and '.join(missing)} (packages iproute2 and nftables)"
    try:
        with Network(["one"]) as network:
            network.lose(0.5)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {' '.join(error.cmd)}: {error.stderr.strip()}"
    return ""


class Network(contextlib.AbstractContextManager["Network"]):
    """Hosts that reach each other at `address(host)`. Leaving it removes them: end their processes first."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = {host: f"10.0.0.{number}" for number, host in enumerate(hosts, start=1)}
        self._prefix = f"persia-{os.getpid()}-{next(_NUMBERS)}"
        self._switch = self._namespace("switch")

    def __enter__(self) -> Network:
        try:
            self._make(self._switch)
            _run(f"ip -n {self._switch} link add bridge up type bridge")
            for number, host in enumerate(self._hosts):
                self._add(host, f"port{number}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in (*self._hosts, "switch"):
            subprocess.run(("ip", "netns", "delete", self._namespace(host)), capture_output=True, check=False)

    def address(self, host: str) -> str:
        return self._hosts[host]

    def command_on(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        """Runs `command` on a host, in the process that runs it."""
        return ("ip", "netns", "exec", self._namespace(host), *command)

    def cut(self, host: str, other: str | None = None) -> None:
        """From now on, no packet passes between the two hosts, or between the host and all others."""
        if other is None:
            _run(f"ip -n {self._switch} link set {self._port(host)} nomaster")
            return
        for here, there in ((host, other), (other, host)):
            self._drop(here, f"ip saddr {self.address(there)}")

    def lose(self, fraction: float) -> None:
        """From now on, each host loses this part of the packets that come to it, by chance."""
        for host in self._hosts:
            self._drop(host, f'iifname != "lo" numgen random mod 10000 < {round(10_000 * fraction)}')

    def mend(self) -> None:
        """Ends all cuts and losses."""
        for host in self._hosts:
            _run(f"ip -n {self._switch} link set {self._port(host)} master bridge")
            self._nft(host, "flush chain inet faults input")

    def _add(self, host: str, port: str) -> None:
        namespace = self._namespace(host)
        self._make(namespace)
        _run(f"ip -n {self._switch} link add {port} type veth peer name eth0 netns {namespace}")
        _run(f"ip -n {self._switch} link set {port} master bridge up")
        _run(f"ip -n {namespace} address add {self.address(host)}/24 dev eth0")
        _run(f"ip -n {namespace} link set eth0 up")
        self._nft(host, "add table inet faults")
        self._nft(host, "add chain inet faults input { type filter hook input priority 0 ; }")

    def _make(self, namespace: str) -> None:
        _run(f"ip netns add {namespace}")
        _run(f"ip -n {namespace} link set lo up")

    def _drop(self, host: str, packets: str) -> None:
        self._nft(host, f"add rule inet faults input {packets} drop")

    def _nft(self, host: str, command: str) -> None:
        _run(" ".join(self.command_on(host, ("nft", command))).split(maxsplit=5))

    def _port(self, host: str) -> str:
        return f"port{list(self._hosts).index(host)}"

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"


def _run(command: str | Sequence[str]) -> None:
    words = command.split() if isinstance(command, str) else command
    subprocess.run(words, check=True, capture_output=True, text=True)
