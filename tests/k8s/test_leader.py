"""Two operators with one lease, with the rights of the manifests: one works, the other takes over."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

import urllib3
from control_plane import OPERATOR, ControlPlane
from harness import Kube, Namespace, OperatorProcess, job_manifest, wait_until
from persia_k8s import leader

from tests.ports import free_port

LEASE = "persia-system/persia-operator"
PATH = "/apis/coordination.k8s.io/v1/namespaces/persia-system/leases/persia-operator"


@pytest.fixture
def pair(control_plane: ControlPlane, kube: Kube, tmp_path: Path) -> Iterator[list[OperatorProcess]]:
    """The first has the lease; the second answers its probe and waits."""
    operators: list[OperatorProcess] = []
    try:
        for awaited in ("lease acquired", "waiting for lease"):
            port = free_port()
            options = [f"--lease={LEASE}", f"--liveness-port={port}"]
            command = [sys.executable, "-m", "persia_k8s.cli", "operator", *options]
            log = tmp_path / f"operator-{len(operators)}.log"
            operator = OperatorProcess(command, control_plane.kubeconfig(OPERATOR), log)
            operators.append(operator)
            wait_until(lambda operator=operator, text=awaited: text in operator.log, 60, awaited)
        assert urllib3.request("GET", f"http://127.0.0.1:{port}/healthz").status == 200
        assert "lease acquired" not in operators[1].log
        yield operators
    finally:
        for operator in operators:
            if operator.is_running:
                operator.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_second_operator_takes_over(
    kube: Kube, namespace: Namespace, pair: list[OperatorProcess], number: signal.Signals
) -> None:
    first, second = pair
    first.stop(number)
    # After the end of the lease, which is 15 s; at once where the holder has released it.
    if number == signal.SIGTERM:
        holder = kube.get(PATH)[1]["spec"]["holderIdentity"]
        assert not holder.endswith(f"_{first.pid}"), "it is released"
    wait_until(lambda: "lease acquired" in second.log, 120, "it takes over")
    namespace.apply(job_manifest())
    namespace.await_(lambda: len(namespace.list("pods")) == 3, "it works")
    assert "forbidden" not in second.log.lower(), second.log


def test_an_operator_that_cannot_renew_its_lease_ends(kube: Kube, pair: list[OperatorProcess]) -> None:
    """So that it never works beside the one that has taken the lease."""
    first, _ = pair

    def is_taken() -> bool:
        return kube.merge(PATH, {"spec": {"holderIdentity": "another"}})[0] == 200 and not first.is_running

    wait_until(is_taken, 60, "the first operator ends")
    assert "is lost" in first.log
    kube.request("DELETE", PATH)


def test_an_operator_whose_request_hangs_ends_before_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may take 30 s, and the lease is free after 15 s."""
    hangs, ended = threading.Event(), threading.Event()

    class Cluster:
        def lease(self, *_place: str) -> None:
            if threading.current_thread() is not threading.main_thread():
                hangs.set()
                ended.wait(60)

        def put_lease(self, _lease: dict[str, Any]) -> bool:
            return True

    for name, seconds in (("_RENEW_S", 0.01), ("_CHECK_S", 0.01), ("_GIVE_UP_S", 0.2)):
        monkeypatch.setattr(leader, name, seconds)
    monkeypatch.setattr(os, "_exit", lambda _code: ended.set())
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # that of pytest stays
    leadership = leader.Leadership(Cluster(), "namespace", "lease")  # type: ignore[arg-type]
    leadership.acquire(0)
    assert hangs.wait(60)
    assert ended.wait(60), "it waits for the request"
    leadership._stop.set()
