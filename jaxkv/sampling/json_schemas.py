"""JSON schemas as regular expressions, by the library outlines-core.

The library ignores some keywords (`minimum`, `uniqueItems`, `maxProperties`), reads
others in its own way (`pattern`, `oneOf`), and does not escape names of properties.
Schemas are therefore reduced to the keywords that it translates exactly; each other one
is refused by name.
"""

import json
from collections.abc import Mapping

from jaxkv import validation

type JsonSchema = Mapping[str, object]
"""A JSON schema, as `json.loads` reads it."""

MAX_SCHEMA_NODES = 1000
"""Largest number of schemas in a schema, after references are replaced."""
MAX_BOUND = 1024
"""Largest `maxLength` and `maxItems`, and largest minimum."""
JSON_OBJECT_DEPTH = 2
"""Levels of arrays and objects inside the object of `json_object_schema`."""

_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly"),
        *("writeOnly", "$comment", "$schema", "$id", "$defs", "definitions"),
    )
)
"""Keywords without effect on valid documents, and containers of referenced schemas."""
_TYPE_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "integer": (),
    "number": (),
    "boolean": (),
    "null": (),
}
"""Keywords of each type."""
_SCALARS = ({"type": "string"}, {"type": "number"}, {"type": "boolean"})


def schema_pattern(schema: JsonSchema) -> str:
    """Returns a regular expression of valid documents, with single optional spaces.

    Supported are `type`, `properties`, `required`, `additionalProperties`, `items`,
    `minItems`, `maxItems`, `minLength`, `maxLength`, `enum`, `const`, `anyOf`, and
    `$ref` to a schema that does not contain the reference.

    Raises:
      ValueError: outlines-core is not installed; or a keyword is unknown, not
        supported, or has another value than JSON Schema allows.
    """
    validation.check_installed("a grammar", "grammar", "outlines_core")
    from outlines_core.json_schema import build_regex_from_schema

    plain = _Reader(schema).read(schema, "#", ())
    return build_regex_from_schema(json.dumps(plain, ensure_ascii=False))


def json_object_schema() -> JsonSchema:
    """Returns the schema of objects with any names and bounded nesting."""
    value: JsonSchema = {"anyOf": [*_SCALARS, {"type": "null"}]}
    for _ in range(JSON_OBJECT_DEPTH):
        nested = (
            {"type": "array", "items": value},
            {"type": "object", "additionalProperties": value},
        )
        value = {"anyOf": [*_SCALARS, {"type": "null"}, *nested]}
    return {"type": "object", "additionalProperties": value}


class _Reader:
    """Reduces one schema; counts its parts."""

    def __init__(self, root: JsonSchema):
        self._root = root
        self._num_nodes = 0

    def read(self, schema: object, path: str, refs: tuple[str, ...]) -> JsonSchema:
        """Returns a schema of supported keywords; `refs` are the open references."""
        self._num_nodes += 1
        if self._num_nodes > MAX_SCHEMA_NODES:
            raise ValueError(
                f"the schema must have at most MAX_SCHEMA_NODES={MAX_SCHEMA_NODES} "
                "schemas, with its references replaced"
            )
        if not isinstance(schema, Mapping):
            raise _refusal(path, f"{validation.format_value(schema)} must be an object")
        node = {key: x for key, x in schema.items() if key not in _ANNOTATIONS}
        if "$ref" in node:
            _refuse_others(node, path, "$ref")
            return self._follow(node["$ref"], path, refs)
        if "anyOf" in node:
            _refuse_others(node, path, "anyOf")
            parts = _checked(node["anyOf"], list, f"{path}/anyOf")
            if not parts:
                raise _refusal(path, "anyOf must not be empty")
            return {
                "anyOf": [
                    self.read(part, f"{path}/anyOf/{i}", refs)
                    for i, part in enumerate(parts)
                ]
            }
        kinds = node.pop("type", None)
        if "const" in node or "enum" in node:
            return _read_values(node, kinds, path)
        if isinstance(kinds, list) and kinds:
            # A keyword applies to the types that have it.
            allowed = {key for kind in kinds for key in _TYPE_KEYWORDS.get(kind, ())}
            _refuse_others(node, path, *allowed)
            parts = [
                {"type": kind}
                | {
                    key: x
                    for key, x in node.items()
                    if key in _TYPE_KEYWORDS.get(kind, ())
                }
                for kind in kinds
            ]
            return {"anyOf": [self.read(part, path, refs) for part in parts]}
        if not isinstance(kinds, str) or kinds not in _TYPE_KEYWORDS:
            names = ", ".join(_TYPE_KEYWORDS)
            shown = validation.format_value(kinds)
            raise _refusal(path, f"type={shown} must be one or a list of {names}")
        _refuse_others(node, path, *_TYPE_KEYWORDS[kinds])
        if kinds == "object":
            return self._read_object(node, path, refs)
        bounds = _read_bounds(node, path)
        if kinds == "array":
            if "items" not in node:
                raise _refusal(path, "items must be given for an array")
            bounds["items"] = self.read(node["items"], f"{path}/items", refs)
        return {"type": kinds, **bounds}

    def _follow(self, ref: object, path: str, refs: tuple[str, ...]) -> JsonSchema:
        """Reads the schema that a reference names."""
        shown = f"$ref={validation.format_value(ref)}"
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise _refusal(path, f"{shown} must begin with #")
        if ref in refs or ref == "#":
            raise _refusal(path, f"{shown} is recursive, which is not supported")
        target: object = self._root
        for part in ref[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or part not in target:
                raise _refusal(path, f"{shown} is not in the schema")
            target = target[part]
        return self.read(target, path, (*refs, ref))

    def _read_object(
        self, node: dict[str, object], path: str, refs: tuple[str, ...]
    ) -> JsonSchema:
        more = node.get("additionalProperties", True)
        if "properties" not in node:
            if isinstance(more, Mapping) and not node.get("required"):
                values = self.read(more, f"{path}/additionalProperties", refs)
                return {"type": "object", "additionalProperties": values}
            if more is not False:
                raise _refusal(path, "properties must be given for an object")
        properties = _checked(node.get("properties", {}), dict, f"{path}/properties")
        if not isinstance(more, bool):
            raise _refusal(
                path, "additionalProperties must be a boolean with properties"
            )
        required = _checked(node.get("required", []), list, f"{path}/required")
        if absent := [name for name in required if name not in properties]:
            shown = validation.format_value(absent[0])
            raise _refusal(path, f"required has {shown}, which is not in properties")
        for name in properties:
            _check_name(name, f"{path}/properties")
        return {
            "type": "object",
            "properties": {
                name: self.read(part, f"{path}/properties/{name}", refs)
                for name, part in properties.items()
            },
            "required": required,
        }


def _refusal(path: str, line: str) -> ValueError:
    return ValueError(f"schema at {path}: {line}")


def _refuse_others(node: Mapping[str, object], path: str, *allowed: str) -> None:
    """Refuses all keywords but some."""
    for key in node:
        if key not in allowed:
            company = (
                f" with {allowed[0]}" if allowed[:1] in (("$ref",), ("anyOf",)) else ""
            )
            raise _refusal(path, f"{key!r} is not supported{company}")


def _checked[T](value: object, kind: type[T], path: str) -> T:
    if not isinstance(value, kind):
        raise _refusal(
            path, f"{validation.format_value(value)} must be a {kind.__name__}"
        )
    return value


def _read_bounds(node: Mapping[str, object], path: str) -> dict[str, object]:
    """Returns the bounds of an array or a string."""
    bounds: dict[str, object] = {}
    limits = [0, MAX_BOUND]
    for i, prefix in enumerate(("min", "max")):
        for key, value in node.items():
            if key.startswith(prefix):
                hint = f"in [{limits[0]}, {MAX_BOUND}]"
                name = f"schema at {path}: {key}"
                limits[i] = validation.integer(
                    name, value, low=limits[0], below=MAX_BOUND + 1, hint=hint
                )
                bounds[key] = limits[i]
    return bounds


def _check_name(name: object, path: str) -> None:
    """Refuses names of properties that JSON escapes, which the library does not."""
    text = json.dumps(name, ensure_ascii=False)
    if not isinstance(name, str) or text != f'"{name}"':
        shown = validation.format_value(name)
        raise _refusal(path, f"{shown} must have no characters that JSON escapes")


def _read_values(node: Mapping[str, object], kinds: object, path: str) -> JsonSchema:
    """Returns the schema of `enum` or `const`, with the values of the given types."""
    key = "const" if "const" in node else "enum"
    _refuse_others(node, path, key)
    values = [node[key]] if key == "const" else _checked(node[key], list, path)
    if kinds is not None:
        names = kinds if isinstance(kinds, list) else [kinds]
        values = [x for x in values if any(_is_of_type(x, name) for name in names)]
    if not values:
        raise _refusal(path, f"{key} has no value of type {kinds}")
    for value in values:
        _check_value(value, f"{path}/{key}")
    return {"enum": values}


def _is_of_type(value: object, kind: object) -> bool:
    """True if a JSON value has a type of JSON Schema."""
    types: dict[object, tuple[type, ...]] = {
        "object": (dict,),
        "array": (list,),
        "string": (str,),
        "integer": (int,),
        "number": (int, float),
        "boolean": (bool,),
        "null": (type(None),),
    }
    if isinstance(value, bool) and kind != "boolean":
        return False
    return isinstance(value, types.get(kind, ()))


def _check_value(value: object, path: str) -> None:
    """Refuses values that the library would write in another way."""
    match value:
        case bool() | str() | None:
            return
        case int():
            validation.integer(f"schema at {path}", value, low=-(2**63), below=2**63)
        case list():
            for part in value:
                _check_value(part, path)
        case dict():
            for name, part in value.items():
                _check_name(name, path)
                _check_value(part, path)
        case _:
            shown = validation.format_value(value)
            raise _refusal(path, f"{shown} must have no floating-point numbers")
