"""The OpenAPI document of the REST service."""

from __future__ import annotations

from typing import Any

from persia_k8s.crd import object_schema

_NAME = {"type": "string", "minLength": 1}
_NAMESPACE = {"type": "string", "default": "default"}
_RESULTS = {
    "type": "object",
    "required": ["success"],
    "properties": {"success": {"type": "boolean"}, "err_msg": {"type": "string", "nullable": True}},
}


def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.0, as Kubernetes' own."""
    spec = object_schema()["properties"]["spec"]
    identifier = _object({"job_name": _NAME, "namespace": _NAMESPACE}, required=["job_name"])
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "PersiaJob service",
            "version": "1",
            "description": "Apply, delete and look at the PersiaJobs of a Kubernetes cluster.",
        },
        "security": [{"token": []}],
        "paths": {
            "/apply": {
                "post": _operation(
                    "Create a job, or change its spec.",
                    _RESULTS,
                    body=_object({"job_identifier": identifier, "spec": spec}, ["job_identifier", "spec"]),
                )
            },
            "/delete": {"post": _operation("Delete a job with all it owns.", _RESULTS, body=identifier)},
            "/listjobs": {
                "get": _operation(
                    "Names and phases of the jobs.", _resources({"phase": {"type": "string"}}), ["namespace"]
                )
            },
            "/listpods": {
                "get": _operation(
                    "Names and phases of the pods of a job, or of all jobs.",
                    _resources({"phase": {"type": "string"}, "job_name": {"type": "string"}}),
                    ["namespace", "job_name"],
                )
            },
            "/podstatus": {
                "get": _operation(
                    "Status of a pod, as Kubernetes has it.",
                    _answer("body", {"type": "object"}),
                    ["namespace", "pod_name"],
                )
            },
            "/podlog": {
                "get": _operation(
                    "End of a pod's log.",
                    _answer("body", {"type": "string"}),
                    ["namespace", "pod_name", "tail_lines"],
                )
            },
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


_PARAMETERS: dict[str, tuple[dict[str, Any], bool]] = {  # schema, required
    "namespace": (_NAMESPACE, False),
    "job_name": (_NAME, False),
    "pod_name": (_NAME, True),
    "tail_lines": ({"type": "integer", "minimum": 1, "maximum": 100_000, "default": 1000}, False),
}


def _operation(
    summary: str, answer: dict[str, Any], parameters: list[str] | None = None, body: Any = None
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "Done.", **_json(answer)},
            **{
                code: {"description": text, **_json(_RESULTS)}
                for code, text in (
                    ("400", "The request cannot be used; err_msg says why."),
                    ("401", "No token, or the wrong one."),
                    ("404", "There is no such thing."),
                    ("502", "The API server has refused or not answered; err_msg says what."),
                )
            },
        },
    }
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": "query", "required": _PARAMETERS[name][1], "schema": _PARAMETERS[name][0]}
            for name in parameters
        ]
    if body is not None:
        operation["requestBody"] = {"required": True, **_json(body)}
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _answer(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    return _object({"execution_results": _RESULTS, key: schema}, ["execution_results", key])


def _resources(more: dict[str, Any]) -> dict[str, Any]:
    item = _object({"name": {"type": "string"}, "namespace": {"type": "string"}, **more}, ["name"])
    return _answer("resources", {"type": "array", "items": item})
