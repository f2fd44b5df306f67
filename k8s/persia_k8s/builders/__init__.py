"""Manifests of a job's objects. Pure: the same job and arguments give the same manifests.

Each manifest carries a hash of itself, by which the operator sees whether what runs is what the spec asks
for.
"""

from persia_k8s.builders.manifest import Images, Manifest, Scale, label_selector, spec_hash
from persia_k8s.builders.pods import HOLD_S, rows_location, rows_pod, rows_pod_name, training_pod
from persia_k8s.builders.servers import disruption_budget, services, stateful_set

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
