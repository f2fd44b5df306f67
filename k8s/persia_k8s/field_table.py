"""The table of fields in the documentation: `python -m persia_k8s.field_table` prints it."""

from __future__ import annotations

from dataclasses import replace

from persia_k8s.job import JobSpec, RoleSpec
from persia_k8s.schema import FieldRow, field_rows

__all__ = ["field_table"]

_SHARED = ("embeddingParameterServer.", "embeddingWorker.", "dataloader.", "nnWorker.", "inference.")


def field_table() -> str:
    """Markdown. The fields that all roles share stand once, as those of ROLE."""
    own = set(field_rows(RoleSpec))
    rows = []
    for row in field_rows(JobSpec):
        head, _, tail = row.path.partition(".")
        if not (f"{head}." in _SHARED and replace(row, path=tail) in own):
            rows.append(row)
    rows += field_rows(RoleSpec, "ROLE.")
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *map(_line, rows)]) + "\n"


def _line(row: FieldRow) -> str:
    return f"| `{row.path}` | {row.type} | {row.default} | {row.description} |"


if __name__ == "__main__":
    print(field_table(), end="")
