"""The OpenAPI document of the REST service."""

from __future__ import annotations

from typing import Any

from persia_k8s.crd import object_schema

_NAME = {"type": "string", "minLength": 1}
_NAMESPACE = {"type": "string", "default": "default"}
# OpenAPI 3.0, as in the schemas of a CRD, of which `spec` is one: null is the key `nullable`, not a type.
_RESULTS = {
    "type": "object",
    "required": ["success"],
    "properties": {"success": {"type": "boolean"}, "err_msg": {"type": "string", "nullable": True}},
}


def openapi_document() -> dict[str, Any]:
    """OpenAPI 3.0, as Kubernetes' own."""
    # The schema of the CRD itself, so that the document cannot describe another job than the cluster accepts.
    spec = object_schema()["properties"]["spec"]
    identifier = _object({"job_name": _NAME, "namespace": _NAMESPACE}, required=["job_name"])
    job = _object({"job_identifier": identifier, "spec": spec}, ["job_identifier", "spec"])
    pod_names = "Names and phases of the pods of a job, or of all jobs."
    pod_status, pod_log = _answer("body", {"type": "object"}), _answer("body", {"type": "string"})
    pod = ["namespace", "pod_name"]
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "PersiaJob service",
            "version": "1",
            "description": "Apply, delete and look at the PersiaJobs of a Kubernetes cluster.",
        },
        "security": [{"token": []}],
        "paths": {
            "/apply": _post("Create a job, or change its spec.", job),
            "/delete": _post("Delete a job with all it owns.", identifier),
            "/listjobs": _get("Names and phases of the jobs.", _resources("phase"), ["namespace"]),
            "/listpods": _get(pod_names, _resources("phase", "job_name"), ["namespace", "job_name"]),
            "/podstatus": _get("Status of a pod, as Kubernetes has it.", pod_status, pod),
            "/podlog": _get("End of a pod's log.", pod_log, [*pod, "tail_lines"]),
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


_PARAMETERS: dict[str, tuple[dict[str, Any], bool]] = {  # schema, required
    "namespace": (_NAMESPACE, False),
    "job_name": (_NAME, False),
    "pod_name": (_NAME, True),
    "tail_lines": ({"type": "integer", "minimum": 1, "maximum": 100_000, "default": 1000}, False),
}


def _get(summary: str, answer: dict[str, Any], parameters: list[str]) -> dict[str, Any]:
    described = [
        {"name": name, "in": "query", "required": _PARAMETERS[name][1], "schema": _PARAMETERS[name][0]}
        for name in parameters
    ]
    return {"get": {"summary": summary, "responses": _responses(answer), "parameters": described}}


def _post(summary: str, body: dict[str, Any]) -> dict[str, Any]:
    request = {"required": True, **_json(body)}
    return {"post": {"summary": summary, "responses": _responses(_RESULTS), "requestBody": request}}


def _responses(answer: dict[str, Any]) -> dict[str, Any]:
    failures = {
        "400": "The request cannot be used; err_msg says why.",
        "401": "No token, or the wrong one.",
        "403": "The token may read only.",
        "429": "Too many requests: repeat this one later.",
        "404": "There is no such thing.",
        "502": "The API server has refused or not answered; err_msg says what.",
    }
    refused = {code: {"description": text, **_json(_RESULTS)} for code, text in failures.items()}
    return {"200": {"description": "Done.", **_json(answer)}, **refused}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _answer(key: str, schema: dict[str, Any]) -> dict[str, Any]:
    return _object({"execution_results": _RESULTS, key: schema}, ["execution_results", key])


def _resources(*more: str) -> dict[str, Any]:
    texts = {name: {"type": "string"} for name in ("name", "namespace", *more)}
    return _answer("resources", {"type": "array", "items": _object(texts, ["name"])})
