"""What many PersiaJobs cost the operator and the API server.

    PYTHONPATH=.:tests/k8s python tests/k8s/measure_jobs.py [JOBS]

There is no kubelet, so that the jobs wait for their servers: nothing changes any more, which is when an
operator should be quiet.
"""

from __future__ import annotations

import re
import ssl
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import yaml
from control_plane import ADMIN, OPERATOR, ControlPlane, find_binaries
from harness import DEPLOY, Kube, Namespace, OperatorProcess, job_manifest, wait_until

SETTLE_S, QUIET_S = 240.0, 60.0


def requests(plane: ControlPlane) -> float:
    """All requests that the API server has answered so far, without events.

    The controller manager warns of each disruption budget without pods every 15 s; a kubelet would end that.
    """
    request = urllib.request.Request(f"{plane.url}/metrics", headers={"Authorization": f"Bearer {ADMIN}"})
    context = ssl.create_default_context(cafile=str(plane.authority))
    with urllib.request.urlopen(request, timeout=60, context=context) as answer:
        text = answer.read().decode()
    lines = re.findall(r"^apiserver_request_total\{(.*)\} (\S+)$", text, re.MULTILINE)
    return sum(float(number) for labels, number in lines if 'resource="events"' not in labels)


def rate(plane: ControlPlane) -> float:
    before, begun = requests(plane), time.monotonic()
    time.sleep(QUIET_S)
    return (requests(plane) - before) / (time.monotonic() - begun)


def main(num_jobs: int) -> None:
    binaries = find_binaries()
    assert not isinstance(binaries, str), binaries
    with tempfile.TemporaryDirectory() as name, ControlPlane(Path(name), binaries) as plane:
        kube = Kube(plane.url, ADMIN, plane.authority)
        for path in ("crd.yaml", "namespace.yaml", "operator-rbac.yaml"):
            for manifest in yaml.safe_load_all((DEPLOY / path).read_text()):
                kube.create(manifest)
        wait_until(lambda: kube.get("/apis/persia.com/v1/persiajobs")[0] == 200, 60, "the resource is served")
        command = [sys.executable, "-m", "persia_k8s.cli", "operator"]
        operator = OperatorProcess(command, plane.kubeconfig(OPERATOR), Path(name) / "operator.log")
        try:
            base = rate(plane)
            space, begun, first = Namespace.create(kube), time.monotonic(), requests(plane)
            for number in range(num_jobs):
                space.apply(job_manifest(f"job-{number}"))

            def all_seen() -> bool:
                time.sleep(1)
                jobs = space.list("persiajobs").values()
                return all("conditions" in job.get("status", {}) for job in jobs)

            wait_until(all_seen, 3600, "all jobs have been started")
            took_s, sent = time.monotonic() - begun, requests(plane) - first
            time.sleep(SETTLE_S)
            steady = rate(plane) - base
            print(
                f"{num_jobs} jobs: started in {took_s:.0f} s with {sent / num_jobs:.0f} requests each (all "
                f"clients); then {steady:.1f} requests a second more than without jobs ({base:.1f}); the "
                f"operator has {operator.memory_mib:.0f} MiB"
            )
        finally:
            operator.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 500)
