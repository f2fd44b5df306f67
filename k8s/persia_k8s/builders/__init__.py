"""Manifests of a job's objects. Pure: the same job and arguments give the same manifests.

Each manifest carries a hash of itself, by which the operator sees whether what runs is what the spec asks
for.
"""

from persia_k8s.builders.manifest import Images, Manifest, Scale, label_selector, spec_hash
from persia_k8s.builders.rows import HOLD_S, rows_location, rows_pod, rows_pod_name
from persia_k8s.builders.servers import stateful_set
from persia_k8s.builders.services import disruption_budget, services
from persia_k8s.builders.training import training_pod

__all__ = [
    "HOLD_S",
    "Images",
    "Manifest",
    "Scale",
    "disruption_budget",
    "label_selector",
    "rows_location",
    "rows_pod",
    "rows_pod_name",
    "services",
    "spec_hash",
    "stateful_set",
    "training_pod",
]
