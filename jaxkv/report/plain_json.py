"""JSON: plain values from configs, results and arrays, and configs from JSON."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkv import files, validation
from jaxkv.validation import format_unknown_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def to_plain(value: Any) -> Any:
    """Converts a value to JSON types: dicts, lists, strings, numbers, booleans, None.

    Dataclasses and NamedTuples become dicts, arrays become lists, and numbers of any
    library become Python numbers. Numbers that are not finite become None, because JSON
    cannot represent them. An object with a method `as_json` is replaced by the result
    of that method.

    Raises:
      TypeError: the value contains an unsupported type.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_plain(dataclasses.asdict(value))
    if hasattr(value, "as_json"):
        return to_plain(value.as_json())
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return to_plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    if isinstance(value, Iterable):
        return [to_plain(item) for item in value]
    raise TypeError(f"cannot be written as JSON: {value!r}")


@validation.checks_numbers(indent=0)
def dumps(value: object, *, indent: int | None = 2) -> str:
    """Serializes a value as one JSON document, with non-finite numbers as `null`."""
    return json.dumps(
        to_plain(value), indent=indent, allow_nan=False, ensure_ascii=False
    )


def config_dumps(config: "DataclassInstance") -> str:
    """Serializes a config so that `config_loads` restores it, infinities included."""

    def spell(value: object) -> object:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {key: spell(item) for key, item in value.items()}
        return [spell(x) for x in value] if isinstance(value, list | tuple) else value

    return dumps(spell(dataclasses.asdict(config)))


def config_loads[T](config_type: type[T], text: str, where: str) -> T:
    """Builds a config from the text of a `config.json`, with full validation.

    Nested dataclasses, tuples, literals and unions of them are supported. A missing
    field keeps its default.

    Args:
      config_type: dataclass of the config.
      text: JSON document.
      where: name of the text in error messages.

    Raises:
      ValueError: invalid JSON, an unknown or missing field, a value of the wrong type,
        or a value that the config rejects; one line with the location.
    """
    return from_plain(config_type, files.parse_json(text, where), where)


def from_plain(hint: Any, value: object, where: str) -> Any:
    """Converts parsed JSON to a value of the hinted type.

    Raises:
      ValueError: the value has another type; the message starts with `where`.
    """
    if dataclasses.is_dataclass(hint):
        return _restore_dataclass(hint, value, where)
    if isinstance(hint, typing.TypeAliasType):
        return from_plain(hint.__value__, value, where)
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is typing.Annotated:
        return from_plain(args[0], value, where)
    if origin in (typing.Union, types.UnionType):
        for choice in args:
            try:
                return from_plain(choice, value, where)
            except ValueError:
                continue
    elif origin is typing.Literal:
        if value in args:
            return value
    elif origin is tuple and isinstance(value, list):
        if len(args) == 2 and args[1] is Ellipsis:
            args = (args[0],) * len(value)
        if len(args) == len(value):
            pairs = enumerate(zip(args, value, strict=True))
            return tuple(from_plain(arg, x, f"{where}[{i}]") for i, (arg, x) in pairs)
    elif origin is dict and isinstance(value, dict):
        return {
            key: from_plain(args[1], x, f"{where}.{key}") for key, x in value.items()
        }
    elif hint is float:
        spelled = isinstance(value, str) and value in ("inf", "-inf", "nan")
        if spelled or (isinstance(value, int | float) and not isinstance(value, bool)):
            return float(value)
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint in (None, type(None)):
        if value is None:
            return None
    elif isinstance(hint, type) and type(value) is hint:
        return value
    if typing.get_origin(hint) is typing.Literal:
        named = ", ".join(str(choice) for choice in typing.get_args(hint))
        raise ValueError(f"{where}: {value!r} is not one of: {named}")
    name = hint.__name__ if isinstance(hint, type) else str(hint)
    raise ValueError(f"{where}: {value!r} is not of type {name}")


def _restore_dataclass(hint: Any, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r} is not an object")
    hints = typing.get_type_hints(hint, include_extras=True)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(hint)}
    for name in value:
        if name not in fields:
            raise ValueError(f"{where}: {format_unknown_name('field', name, fields)}")
    restored = {
        name: from_plain(fields[name], item, f"{where}: {name}")
        for name, item in value.items()
    }
    try:
        return hint(**restored)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
