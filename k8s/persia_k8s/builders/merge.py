"""Strategic merge of a pod template: what `kubectl patch` does, without its directives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Key by which Kubernetes identifies an item of each list in a pod. All other lists are replaced as a whole.
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "topologySpreadConstraints": "topologyKey",
    "hostAliases": "ip",
}


def merge(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `patch`; null removes a field. Neither is changed."""
    result = dict(base)
    for name, value in patch.items():
        old = result.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            result[name] = merge(old if isinstance(old, Mapping) else {}, value)
        elif isinstance(value, list) and isinstance(old, list) and name in _KEYS:
            result[name] = _merge_lists(old, value, _KEYS[name])
        else:
            result[name] = value
    return result


def _merge_lists(base: Sequence[Any], patch: Sequence[Any], key: str) -> list[Any]:
    items = list(base)
    # An item without its key is appended as it is: the API server names it in its refusal.
    places = {item.get(key): place for place, item in enumerate(items)}
    for item in patch:
        place = places.get(item.get(key)) if isinstance(item, Mapping) else None
        if place is None:
            items.append(item)
        else:
            items[place] = merge(items[place], item)
    return items
