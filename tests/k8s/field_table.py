"""The table of fields in the documentation: `python tests/k8s/field_table.py` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from persia_k8s.job import JobSpec, RoleSpec
from persia_k8s.schema import structural_schema

_SHARED = ("embeddingParameterServer", "embeddingWorker", "dataloader", "nnWorker", "inference")


def field_table() -> str:
    """Markdown. The fields that all roles share stand once, as those of ROLE."""
    # Listed once under ROLE, or the table would repeat the shared fields for each of five roles.
    own = list(_rows(structural_schema(RoleSpec)))
    rows = [
        (path, line)
        for path, line in _rows(structural_schema(JobSpec))
        if not (path.split(".")[0] in _SHARED and (path.partition(".")[2], line) in own)
    ]
    rows += [(f"ROLE.{path}", line) for path, line in own]
    table = [f"| `{path}` | {line} |" for path, line in rows]
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *table]) + "\n"


def _rows(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Path and the other cells of all fields, depth first, in the order of declaration."""
    for name, field in schema["properties"].items():
        default = "required" if name in schema.get("required", ()) else _default(field.get("default"))
        yield name, f"{_type(field)} | {default} | {field['description']}"
        # Values of Kubernetes' own types have fields without descriptions.
        if all("description" in item for item in field.get("properties", {}).values()):
            for path, line in _rows({"properties": {}, **field}):
                yield f"{name}.{path}", line


def _type(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "maximum" in field:
        return f"{field['type']} from {field['minimum']} to {field['maximum']}"
    return f"{field['type']} >= {field['minimum']}" if "minimum" in field else str(field["type"])


def _default(value: Any) -> str:
    if value is None or value in ({}, []):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(field_table(), end="")
