"""Dataclasses as the one source of a resource's schema: OpenAPI, defaults, parsing and documentation.

A field is declared with `spec_field`; its annotation may be `str`, `int`, `bool`, another such dataclass, any
of these with `| None`, or anything at all when `schema` says what the field looks like (values of other
people's types, such as volumes, are handed on as they are).
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from persia_k8s.errors import SpecError

__all__ = ["FieldRow", "field_rows", "open_api_schema", "parse", "spec_field"]

_T = TypeVar("_T")
_TYPE_NAMES: dict[type, str] = {str: "string", int: "integer", bool: "boolean"}
REQUIRED: Any = object()


def spec_field(
    description: str,
    *,
    default: Any = REQUIRED,
    name: str | None = None,
    schema: Mapping[str, Any] | None = None,
    **constraints: Any,
) -> Any:
    """Declares a field. `name`: as written in YAML, by default the attribute's in camelCase.

    `default`: REQUIRED for none; None for an optional field. `schema`: replaces the one derived from the
    annotation. `constraints` are OpenAPI's (minimum, enum, pattern, ...) and are added to it.
    """
    metadata = {"description": description, "name": name, "schema": schema, "constraints": constraints}
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class _Field:
    attribute: str
    name: str
    type: Any  # the dataclass of a nested field
    is_required: bool
    default: Any
    description: str
    schema: Mapping[str, Any] | None
    constraints: Mapping[str, Any]

    @property
    def is_nested(self) -> bool:
        return dataclasses.is_dataclass(self.type)

    @property
    def default_value(self) -> Any:
        """As YAML has it. An optional field has none; a nested one whose default is a dataclass is {}."""
        return {} if dataclasses.is_dataclass(self.default) else self.default


def _camel_case(name: str) -> str:
    return re.sub(r"_([a-z])", lambda match: match[1].upper(), name)


def _fields(cls: type) -> list[_Field]:
    hints = typing.get_type_hints(cls)
    fields = []
    for field in dataclasses.fields(cls):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        fields.append(
            _Field(
                attribute=field.name,
                name=field.metadata["name"] or _camel_case(field.name),
                type=_without_none(hints[field.name]),
                is_required=default is dataclasses.MISSING,
                default=None if default is dataclasses.MISSING else default,
                description=field.metadata["description"],
                schema=field.metadata["schema"],
                constraints=field.metadata["constraints"],
            )
        )
    return fields


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (only,) = (part for part in typing.get_args(hint) if part is not type(None))
        return only
    return hint


def open_api_schema(cls: type, description: str | None = None) -> dict[str, Any]:
    """The structural schema of an object described by `cls`."""
    schema: dict[str, Any] = {"type": "object"}
    if description:
        schema["description"] = description
    required = [field.name for field in _fields(cls) if field.is_required]
    if required:
        schema["required"] = required
    schema["properties"] = {field.name: _property(field) for field in _fields(cls)}
    return schema


def _property(field: _Field) -> dict[str, Any]:
    if field.schema is not None:
        schema = dict(field.schema)
    elif field.is_nested:
        schema = open_api_schema(field.type)
    else:
        schema = {"type": _TYPE_NAMES[field.type]}
    described = {"description": field.description, **schema, **field.constraints}
    if field.default_value is not None:
        described["default"] = field.default_value
    return described


def parse(cls: type[_T], values: Any, path: str) -> _T:
    """An instance of `cls` from what YAML or JSON said; `path` names it in errors.

    The API server has validated what it stores; this catches objects that an older schema let through.
    Raises SpecError for a missing field or one of the wrong type. The API server drops unknown fields.
    """
    if not isinstance(values, Mapping):
        raise SpecError(f"{path} is {values!r}: it must be an object")
    arguments = {}
    for field in _fields(cls):
        where = f"{path}.{field.name}"
        value = values.get(field.name)
        if value is not None:
            arguments[field.attribute] = _parse_value(field, value, where)
        elif field.is_required:
            raise SpecError(f"{where} is missing: {field.description}")
    return cls(**arguments)


def _parse_value(field: _Field, value: Any, where: str) -> Any:
    if field.schema is not None:
        return value
    if field.is_nested:
        return parse(field.type, value, where)
    if type(value) is not field.type:
        raise SpecError(f"{where} is {value!r}: it must be of type {_TYPE_NAMES[field.type]}")
    return value


@dataclasses.dataclass(frozen=True)
class FieldRow:
    """A field as documentation shows it."""

    path: str
    type: str
    default: str
    description: str


def field_rows(cls: type, prefix: str = "") -> Iterator[FieldRow]:
    """All fields of `cls`, depth first, in the order of declaration."""
    for field in _fields(cls):
        path = prefix + field.name
        yield FieldRow(path, _type_text(field), _default_text(field), field.description)
        if field.is_nested and field.schema is None:
            yield from field_rows(field.type, f"{path}.")


def _type_text(field: _Field) -> str:
    if "enum" in field.constraints:
        return ", ".join(f"`{value}`" for value in field.constraints["enum"])
    schema = _property(field)
    text = str(schema["type"])
    if "minimum" in field.constraints:
        text += f" >= {field.constraints['minimum']}"
    return text


def _default_text(field: _Field) -> str:
    if field.is_required:
        return "required"
    value = field.default_value
    if value is None or value in ({}, []):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
