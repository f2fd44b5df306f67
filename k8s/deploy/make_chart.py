"""Writes a Helm chart from the manifests of `base`: `python k8s/deploy/make_chart.py FOLDER`.

The manifests stay the only source: the chart is their text, with values for what installations change.
"""

from __future__ import annotations

import sys
from pathlib import Path

_BASE = Path(__file__).with_name("base")
# In the order in which they are replaced: text of the manifests, and what stands for it in the templates.
_VALUES = {
    "persia-system": "{{ .Release.Namespace }}",
    "image: persiaml/persia-k8s-operator": "image: {{ .Values.operatorImage }}",
    '"persiaml/persia-cpu-runtime:latest"': "{{ .Values.cpuImage | quote }}",
    '"persiaml/persia-cuda-runtime:latest"': "{{ .Values.cudaImage | quote }}",
    "replicas: 2": "replicas: {{ .Values.operatorReplicas }}",
}
_DEFAULTS = """\
operatorImage: persiaml/persia-k8s-operator
operatorReplicas: 2 # one works, the other waits
cpuImage: persiaml/persia-cpu-runtime:latest # of roles that name no image
cudaImage: persiaml/persia-cuda-runtime:latest
server: true # the REST service; its token is the Secret persia-server-token
"""
_CHART = """\
apiVersion: v2
name: persia
description: PersiaJob, its operator and its REST service
version: 0.1.0
"""


def make_chart(folder: Path) -> None:
    """The definition goes to `crds`, which Helm installs first and never deletes; the namespace is Helm's."""
    for name in ("crds", "templates"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "Chart.yaml").write_text(_CHART)
    (folder / "values.yaml").write_text(_DEFAULTS)
    (folder / "crds" / "crd.yaml").write_text((_BASE / "crd.yaml").read_text())
    for name in ("operator-rbac.yaml", "operator.yaml", "server-rbac.yaml", "server.yaml"):
        text = (_BASE / name).read_text()
        for old, new in _VALUES.items():
            text = text.replace(old, new)
        if name.startswith("server"):
            text = f"{{{{- if .Values.server }}}}\n{text}{{{{- end }}}}\n"
        (folder / "templates" / name).write_text(text)


if __name__ == "__main__":
    make_chart(Path(sys.argv[1]))
