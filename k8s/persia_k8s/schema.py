"""pydantic dataclasses as the one source of a resource's schema, defaults, parsing and documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from persia_k8s.errors import SpecError

# Unknown fields are ignored: the API server has dropped them from what it stores.
CONFIG = ConfigDict(alias_generator=to_camel, populate_by_name=True)
_T = TypeVar("_T")


def list_of_objects(
    properties: dict[str, Any], *, required: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    """The schema of a list of objects; `more`: further keys of the schema of one object."""
    names = {"required": list(required)} if required else {}
    return {"type": "array", "items": {"type": "object", **names, "properties": properties, **more}}


def structural_schema(kind: type, *, of_status: bool = False) -> dict[str, Any]:
    """The schema of an object described by `kind`, as Kubernetes wants it: without references or null.

    `of_status`: without defaults and required fields, as only the operator writes it.
    """
    schema = TypeAdapter(kind).json_schema()
    return _structural(schema, schema.get("$defs", {}), of_status)


def _structural(schema: Mapping[str, Any], definitions: Mapping[str, Any], of_status: bool) -> dict[str, Any]:
    keys = ("description", "type", *(key for key in schema if key != "default"), "default")  # as people read
    result = {key: schema[key] for key in keys if key in schema and key not in ("$ref", "$defs", "title")}
    if "description" in result:
        result["description"] = " ".join(result["description"].split())  # a docstring of several lines
    if "$ref" in schema:
        # Kubernetes takes no references, so each is replaced by what it names.
        result = {**definitions[schema["$ref"].rpartition("/")[2]], **result}
        return _structural(result, definitions, of_status)
    for key in ("anyOf", "allOf"):  # before pydantic 2.9 a reference with a description is an allOf of one
        options = [option for option in schema.get(key, ()) if option != {"type": "null"}]
        if len(options) == 1:
            del result[key]
            return _structural({**options[0], **result}, definitions, of_status)
    if of_status:
        result.pop("required", None)
    if of_status or result.get("default", ...) is None:
        result.pop("default", None)
    if "properties" in schema:
        properties = schema["properties"].items()
        result["properties"] = {name: _structural(item, definitions, of_status) for name, item in properties}
        if "default" in result:
            result["default"] = {}  # its fields have defaults of their own
    return result


def parse(kind: type[_T], values: Any, path: str) -> _T:
    """An instance of `kind` from what YAML or JSON said; `path` names it in errors.

    The API server has validated what it stores; this catches objects that an older schema let through.
    Raises SpecError for the first field that is missing or wrong.
    """
    try:
        parsed: _T = TypeAdapter(kind).validate_python(_without_null(values))
    except ValidationError as error:
        # The first problem only: the others often follow from it.
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, (path, *problem["loc"])))
        if problem["type"] == "missing":
            raise SpecError(f"{where} is missing: it has no default, so add it") from None
        if problem["type"] in ("dataclass_type", "model_type"):
            raise SpecError(f"{where} is {problem['input']!r}: it must be an object") from None
        text = problem["msg"].replace("Input should", "it must").replace("String should", "it must")
        raise SpecError(f"{where} is {problem['input']!r}: {text}") from None
    return parsed


def _without_null(values: Any) -> Any:
    """A field that is null is one that is not given."""
    if not isinstance(values, Mapping):
        return values
    return {name: _without_null(value) for name, value in values.items() if value is not None}
