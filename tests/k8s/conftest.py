"""A control plane for the whole run; a namespace, a kubelet and an operator for each test that asks.

Imports what only the persia-k8s distribution needs inside the fixtures: the test modules say so when it is
not installed, and are skipped.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))  # the harness, by its name

from real_pods import data, localized, make_job, run_pods, toy, toy_job  # noqa: F401  (fixtures)

if TYPE_CHECKING:
    from control_plane import ControlPlane
    from harness import Kube, Namespace, OperatorProcess
    from kubelet import FakeKubelet


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    from control_plane import ControlPlane, find_binaries

    binaries = find_binaries()
    if isinstance(binaries, str):
        pytest.skip(binaries)
    with ControlPlane(tmp_path_factory.mktemp("control-plane"), binaries) as plane:
        yield plane


@pytest.fixture(scope="session")
def definer(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kube]:
    """The administrator at the server that serves PersiaJobs: a newer one, if there is one."""
    from control_plane import ADMIN
    from extensions_server import ExtensionsServer, find_program
    from harness import Kube

    with contextlib.ExitStack() as stack:
        server: ControlPlane | ExtensionsServer = control_plane
        if (program := find_program()) is not None:
            folder = tmp_path_factory.mktemp("extensions")
            server = stack.enter_context(ExtensionsServer(control_plane, program, folder))
        yield stack.enter_context(contextlib.closing(Kube(server.url, ADMIN, server.authority)))


@pytest.fixture(scope="session")
def kube(control_plane: ControlPlane, definer: Kube) -> Iterator[Kube]:
    """The administrator; the manifests of k8s/deploy are there, but for the Deployments."""
    from control_plane import ADMIN
    from harness import DEPLOY, Kube, wait_until

    admin = Kube(control_plane.url, ADMIN, control_plane.authority)
    for path in ("crd.yaml", "namespace.yaml", "operator-rbac.yaml", "server-rbac.yaml"):
        for manifest in yaml.safe_load_all((DEPLOY / path).read_text()):
            (definer if path == "crd.yaml" else admin).create(manifest)
    wait_until(lambda: admin.get("/apis/persia.com/v1/persiajobs")[0] == 200, 20, "the resource is served")
    yield admin
    admin.close()


@pytest.fixture
def namespace(kube: Kube) -> Iterator[Namespace]:
    from harness import Namespace

    space = Namespace.create(kube)
    yield space
    space.clear()


@pytest.fixture
def kubelet(kube: Kube, namespace: Namespace, tmp_path: Path) -> Iterator[FakeKubelet]:
    from kubelet import FakeKubelet

    with FakeKubelet(kube, tmp_path, [namespace.name]) as running:
        yield running
    assert running.failure is None
    kube.request("DELETE", "/api/v1/nodes/node-0")


@pytest.fixture(scope="module")
def operator_process(
    control_plane: ControlPlane, kube: Kube, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """One for all tests of a module: most of a test would be its start and its end."""
    from control_plane import OPERATOR
    from harness import OperatorProcess

    command = [sys.executable, "-m", "persia_k8s.cli", "operator"]
    log = tmp_path_factory.mktemp("operator") / "operator.log"
    process = OperatorProcess(command, control_plane.kubeconfig(OPERATOR), log)
    yield process
    process.stop()


@pytest.fixture
def operator(operator_process: OperatorProcess, namespace: Namespace) -> Iterator[OperatorProcess]:
    """Runs when the test begins, and must when it ends; with the rights of its manifests."""
    begin = len(operator_process.log)
    yield operator_process
    log = operator_process.log[begin:]
    assert operator_process.is_running, log
    assert "is forbidden: User" not in log, log  # of its rights; admission refuses pods in other words
    assert "Traceback" not in log, log
