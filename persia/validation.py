"""One way to check what comes from outside: pydantic models whose errors are persia's own.

A `Section` is a part of a configuration file; it raises `ConfigError`. `read_document` makes a dataclass of
JSON that a peer or a storage has sent; it raises `CorruptionError`. Either error is one line that names the
key, its value and what it must be. Only the first problem is reported: the others often follow from it.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from persia.errors import ConfigError, CorruptionError

UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1

Positive32 = Annotated[int, Field(ge=1, le=UINT32_MAX)]
Positive = Annotated[int, Field(ge=1, le=UINT64_MAX)]
# Of documents, whose types are not strict: JSON has lists where a dataclass has tuples.
Count = Annotated[int, Field(strict=True, ge=0, le=UINT64_MAX)]
Number = Annotated[float, Field(strict=True, ge=0, lt=2**63, allow_inf_nan=False)]
Hex = Annotated[str, Field(pattern="^([0-9a-f]{2})+$")]  # bytes

# pydantic speaks of an "input"; the messages here name key and value, and say what must hold.
_WORDINGS = {
    "Input should": "must",
    "String should": "must",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid tuple": "a valid list",
}

_AnySection = TypeVar("_AnySection", bound="Section")
_T = TypeVar("_T")


class Section(BaseModel):
    """Base of all sections of configuration files. Frozen; a constructor call obeys the rules of files."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            # One error class for files and calls; the traceback of pydantic would bury the line that helps.
            raise ConfigError(explain(error, of_yaml=True)) from None

    # This says to pydantic that nested sections need no call of `__init__`: their errors keep their paths.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: use replace({name}=...)")

    def check(self) -> None:
        """Raises ConfigError for keys that do not go together; each by itself is checked by its type."""

    @model_validator(mode="after")
    def _check(self: _AnySection) -> _AnySection:
        self.check()
        return self

    def replace(self: _AnySection, **changes: Any) -> _AnySection:
        """A copy with other values, checked as any other."""
        return type(self)(**{**dict(self), **changes})

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: object) -> object:
        """An unknown key is a typing mistake: ignored, it would train with another value than the one
        written.
        """
        if not isinstance(values, Mapping):
            return values
        spellings = {name: (name, *_aliases(field)) for name, field in cls.model_fields.items()}
        known = [spelling for names in spellings.values() for spelling in names]
        for key, value in values.items():
            if key not in known:
                nearest = difflib.get_close_matches(str(key).lower(), known, n=1)
                remedy = (
                    f"did you mean {nearest[0]!r}?" if nearest else f"the keys here are {', '.join(known)}"
                )
                raise ConfigError(f"{key}={show(value)} is not a known key: {remedy}")
        for names in spellings.values():
            # pydantic would take one of them without a word.
            if len(given := [name for name in names if name in values]) > 1:
                raise ConfigError(f"{given[0]} is also given as {given[1]}, another spelling of it: keep one")
        return values


def _aliases(field: FieldInfo) -> list[str]:
    choices = field.validation_alias
    return [str(name) for name in choices.choices[1:]] if isinstance(choices, AliasChoices) else []


def read_section(section: type[_AnySection], value: object, path: str = "") -> _AnySection:
    """A `section` made of what a file has at the key `path` ("": the top level). Raises ConfigError."""
    try:
        return section.model_validate(value)
    except ValidationError as error:
        raise ConfigError(explain(error, path, of_yaml=True)) from None


_adapters: dict[Any, TypeAdapter[Any]] = {}  # making one is slow


def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


def read_document(kind: type[_T], values: object, what: str) -> _T:
    """A `kind`, a dataclass, made of parsed JSON. Raises CorruptionError, naming `what`.

    Keys that it lacks are ignored: a newer version may have written them.
    """
    try:
        document: _T = _adapter(kind).validate_python(values)
    except ValidationError as error:
        raise CorruptionError(f"{what}: {explain(error)}") from None
    return document


def require_keys(values: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    """Raises CorruptionError where a document lacks a key that its class has a default for."""
    if missing := [name for name in names if name not in values]:
        raise CorruptionError(f"{what}: {', '.join(missing)} is missing")


def to_json(document: object) -> Any:
    """A dataclass as JSON has it: what `read_document` reads."""
    return _adapter(type(document)).dump_python(document, mode="json")


def json_object(payload: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `payload`; `what` names it in errors. Raises CorruptionError."""
    try:
        values = json.loads(payload)
    # A hostile document may also nest so deeply that the parser gives up.
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"{what}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise CorruptionError(f"{what}: a JSON {type(values).__name__}, not an object")
    return values


def complaint(text: str) -> PydanticCustomError:
    """For validators of a single key: `text` says what its value must be; path and value are added to it."""
    return PydanticCustomError("complaint", "{text}", {"text": text})


def explain(error: ValidationError, path: str = "", *, of_yaml: bool = False) -> str:
    """The first problem in one line. `of_yaml`: with the remedy for names that YAML reads as other types."""
    problem = error.errors(include_url=False)[0]
    kind, value, *location = problem["type"], problem["input"], *problem["loc"]
    # So pydantic marks the error of a key, which has its own value as the name before it.
    is_key = location[-1:] == ["[key]"]
    path = join(path, *location[: -2 if is_key else None])
    if kind == "value_error":  # of keys that do not go together; the section does not know its own path
        return join(path, str(problem["ctx"]["error"]))
    if kind == "missing":
        return f"{path} is missing: it has no default, so add it"
    if kind in ("model_type", "dict_type", "mapping_type", "dataclass_type"):
        where = path or "the top level"
        if value is None:
            return f"{where} is empty: give it keys, or {{}} for the defaults"
        return f"{where} must be a mapping of keys to values, not {show(value)}"
    text = problem["msg"]
    for wording, ours in _WORDINGS.items():
        text = text.replace(wording, ours)
    if of_yaml and kind == "string_type" and isinstance(value, bool | int | float):
        text += ": quote it"
    return f"{path} has the name {show(value)}, which {text}" if is_key else f"{path}={show(value)} {text}"


def join(*names: object) -> str:
    """The path of a key."""
    return ".".join(str(name) for name in names if name != "")


def show(value: object) -> str:
    """A value for a message: cut to a length that fits, on one line."""
    # As YAML and JSON write them: users compare the message with their file.
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return reprlib.repr(value)
