"""Jobs that an older operator has started keep running when the definition and the operator are upgraded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

from control_plane import ADMIN, OPERATOR, ControlPlane, find_binaries
from harness import DEPLOY, Kube, Namespace, OperatorProcess, job_manifest, wait_until
from kubelet import FakeKubelet

# Before job secrets, pod templates, suspension and the scale subresource.
OLD = "a0b4bf9"
REPOSITORY = DEPLOY.parents[2]
FILES = ("crd.yaml", "namespace.yaml", "operator-rbac.yaml")
COMMAND = [sys.executable, "-m", "persia_k8s.cli", "operator"]
SERVING = {"inference": {"replicas": 1, "checkpoint": "/c"}, "nnWorker": None, "dataloader": None}


@pytest.fixture(scope="module")
def old_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder k8s/ of the older commit."""
    archive = subprocess.run(
        ["git", "archive", OLD, "k8s"], cwd=REPOSITORY, capture_output=True, check=False, timeout=60
    )
    if archive.returncode:
        pytest.skip(f"the history has no commit {OLD}: a shallow clone, or no clone at all")
    folder = tmp_path_factory.mktemp("old")
    # By the program: before Python 3.10.12 `tarfile` has no filter, and since 3.12 it warns without one.
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True, timeout=240)
    return folder / "k8s"


@pytest.fixture
def old_plane(old_sources: Path, tmp_path: Path) -> Iterator[ControlPlane]:
    """A control plane of its own: the others have today's definition."""
    binaries = find_binaries()
    if isinstance(binaries, str):
        pytest.skip(binaries)
    with ControlPlane(tmp_path, binaries) as plane:
        yield plane


def test_hosted_ci_fetches_the_older_commit_and_begins_with_the_demo() -> None:
    """In a shallow clone, the test below is skipped. After the tests, the demo would install nothing."""
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    steps = workflow["jobs"]["test"]["steps"]
    (checkout,) = (step for step in steps if "checkout" in step.get("uses", ""))
    assert checkout["with"]["fetch-depth"] == 0
    commands = [step["run"] for step in steps if "run" in step]
    assert commands[0] == "./run demo"
    assert "bash .ci/run" in commands


def install(kube: Kube, folder: Path) -> None:
    for name in FILES:
        for manifest in yaml.safe_load_all((folder / name).read_text()):
            kube.apply(manifest)
    wait_until(lambda: kube.get("/apis/persia.com/v1/persiajobs")[0] == 200, 60, "the resource is served")


def pod_uids(namespace: Namespace) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in namespace.list("pods").items()}


def test_jobs_of_an_older_operator_keep_running(
    old_plane: ControlPlane, old_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube = Kube(old_plane.url, ADMIN, old_plane.authority)
    install(kube, old_sources / "deploy" / "base")
    namespace = Namespace.create(kube)
    config = old_plane.kubeconfig(OPERATOR)
    with FakeKubelet(kube, tmp_path, [namespace.name]) as kubelet:
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", str(old_sources))
            old = OperatorProcess(COMMAND, config, tmp_path / "old.log")
        serving = job_manifest("serving", **SERVING)
        serving["spec"] = {name: value for name, value in serving["spec"].items() if value is not None}
        namespace.apply(job_manifest("job"))
        namespace.apply(serving)
        for name in ("job", "serving"):
            namespace.await_phase(name, "Running")
            assert "checkedGeneration" not in namespace.status(name)  # the operator is the older one
        old.stop()
        before = pod_uids(namespace)
        install(kube, DEPLOY)
        new = OperatorProcess(COMMAND, config, tmp_path / "new.log")
        try:
            for name in ("job", "serving"):
                namespace.await_(
                    lambda name=name: "checkedGeneration" in namespace.status(name), "it looks after the job"
                )
                # Another pass, with what the first has left.
                namespace.patch("persiajobs", name, {"spec": {"backoffLimit": 7}})
                generation = namespace.get("persiajobs", name)["metadata"]["generation"]
                namespace.await_(
                    lambda name=name, generation=generation: (
                        namespace.status(name)["checkedGeneration"] >= generation
                    ),
                    "it takes a change",
                )
                assert namespace.status(name)["phase"] == "Running"
                assert namespace.status(name)["tls"] is False
            assert pod_uids(namespace) == before
            kubelet.finish("job-nn-worker-0")
            kubelet.finish("job-dataloader-0")
            namespace.await_phase("job", "Succeeded")
            namespace.delete("persiajobs", "serving")
            namespace.await_(lambda: namespace.get("persiajobs", "serving") is None, "the other is deleted")
            assert "Traceback" not in new.log, new.log
            assert "forbidden" not in new.log, new.log
        finally:
            new.stop()
    kube.close()
