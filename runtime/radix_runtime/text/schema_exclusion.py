"""Whether two JSON Schemas exclude each other: only where that is certain."""

import math
from typing import Any

from .schema_walk import resolve, type_set

_MAX_DEPTH = 12


def are_disjoint(first: Any, second: Any, document: Any, depth: int = 0) -> bool:
    """Whether it is certain that no instance fits both schemas."""
    if first is False or second is False:
        return True
    if not isinstance(first, dict) or not isinstance(second, dict) or depth > _MAX_DEPTH:
        return False
    for one, other in ((first, second), (second, first)):
        if _excludes(one, other, document, depth + 1):
            return True
    return _types_differ(first, second) or _objects_differ(first, second, document, depth)


def _excludes(one: dict[str, Any], other: Any, document: Any, depth: int) -> bool:
    """Whether what `one` is made of excludes `other`, or one of its own values does."""
    reference = one.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        if are_disjoint(resolve(document, reference), other, document, depth):
            return True
    parts = one.get("allOf")
    if isinstance(parts, list):
        # Together they may exclude what none of them does alone: the plain keywords of all.
        rest = {key: value for key, value in one.items() if key != "allOf"}
        if any(are_disjoint(part, other, document, depth) for part in [*parts, rest]):
            return True
        merged = _merged([*parts, rest], document)
        if merged is not None and are_disjoint(merged, other, document, depth):
            return True
    for keyword in ("anyOf", "oneOf"):
        branches = one.get(keyword)
        if isinstance(branches, list) and branches:
            if all(are_disjoint(branch, other, document, depth) for branch in branches):
                return True
    values = _values(one)
    if values is not None:
        return all(_rejects(other, value, document, depth) for value in values)
    return False


def _merged(parts: list[Any], document: Any) -> dict[str, Any] | None:
    """`required` and `properties` of several schemas as those of one: a weaker schema than all of
    them together, so what it excludes is excluded."""
    required: list[Any] = []
    properties: dict[str, Any] = {}
    types: Any = None
    for part in parts:
        if isinstance(part, dict) and isinstance(part.get("$ref"), str):
            part = resolve(document, part["$ref"])
        if not isinstance(part, dict):
            continue
        if isinstance(part.get("required"), list):
            required += part["required"]
        if isinstance(part.get("properties"), dict):
            for name, schema in part["properties"].items():
                known = properties.get(name)
                properties[name] = schema if known is None else {"allOf": [known, schema]}
        types = types or part.get("type")
    if types is None or not required:
        return None
    return {"type": types, "required": required, "properties": properties}


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """All values that a schema can accept, where it lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _rejects(schema: Any, value: Any, document: Any, depth: int) -> bool:
    """Whether it is certain that `schema` does not accept `value`."""
    if schema is False:
        return True
    if not isinstance(schema, dict):
        return False
    values = _values(schema)
    if values is not None and not any(_same(value, other) for other in values):
        return True
    types = type_set(schema["type"]) if "type" in schema else None
    if types is not None and not _has_type(value, types):
        return True
    if isinstance(value, str) and _rejects_text(schema, value):
        return True
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and _ranges_differ({"minimum": value, "maximum": value}, schema):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and depth <= _MAX_DEPTH:
        return _rejects(resolve(document, reference), value, document, depth + 1)
    return False


def _rejects_text(schema: dict[str, Any], text: str) -> bool:
    least = schema.get("minLength")
    most = schema.get("maxLength")
    if isinstance(least, int) and len(text) < least:
        return True
    return isinstance(most, int) and len(text) > most


def _same(first: Any, second: Any) -> bool:
    """Whether two JSON values are equal: 1 is 1.0, and no boolean is a number."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    return bool(first == second)


def _has_type(value: Any, types: set[str]) -> bool:
    match value:
        case bool():
            return "boolean" in types
        case None:
            return "null" in types
        case str():
            return "string" in types
        case int():
            return bool({"integer", "number"} & types)
        case float():
            return "number" in types or (value.is_integer() and "integer" in types)
        case list():
            return "array" in types
        case _:
            return "object" in types


def _types_differ(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """By their types, or by bounds of the one type that both have."""
    own = type_set(first["type"]) if "type" in first else None
    others = type_set(second["type"]) if "type" in second else None
    if own is None or others is None:
        return False
    both = own & others
    if not both:
        return True
    if both <= {"number", "integer"}:
        return _ranges_differ(first, second)
    if both == {"string"}:
        return _bounds_differ(first, second, "minLength", "maxLength")
    if both == {"array"}:
        return _bounds_differ(first, second, "minItems", "maxItems")
    return False


def _bounds_differ(first: dict[str, Any], second: dict[str, Any], least: str, most: str) -> bool:
    for one, other in ((first, second), (second, first)):
        low = one.get(least)
        high = other.get(most)
        if isinstance(low, int) and isinstance(high, int) and low > high:
            return True
    return False


def _ranges_differ(first: dict[str, Any], second: dict[str, Any]) -> bool:
    for one, other in ((first, second), (second, first)):
        low, low_open = _end(one, "minimum", "exclusiveMinimum", -math.inf)
        high, high_open = _end(other, "maximum", "exclusiveMaximum", math.inf)
        if low > high or (low == high and (low_open or high_open)):
            return True
    return False


def _end(schema: dict[str, Any], closed: str, opened: str, default: float) -> tuple[float, bool]:
    """The end of a range, and whether it is itself outside; the weaker of two that are given."""
    if isinstance(schema.get(opened), int | float) and not isinstance(schema[opened], bool):
        return float(schema[opened]), closed not in schema
    if isinstance(schema.get(closed), int | float) and not isinstance(schema[closed], bool):
        return float(schema[closed]), False
    return default, False


def _objects_differ(
    first: dict[str, Any], second: dict[str, Any], document: Any, depth: int
) -> bool:
    """By a property that one needs and the other has in no form that fits."""
    if type_set(first.get("type")) != {"object"} and type_set(second.get("type")) != {"object"}:
        return False  # both may accept something that is no object
    for one, other in ((first, second), (second, first)):
        for name in _required(one):
            if not isinstance(name, str):
                continue
            given = _property(other, name)
            if given is False or are_disjoint(_property(one, name), given, document, depth + 1):
                return True
    return False


def _required(schema: dict[str, Any]) -> list[Any]:
    required = schema.get("required")
    return required if isinstance(required, list) else []


def _property(schema: dict[str, Any], name: str) -> Any:
    """The schema of a property; False if the property must be absent."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        return False
    return True
