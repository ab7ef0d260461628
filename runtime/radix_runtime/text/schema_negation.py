"""The opposite of a JSON Schema, in words that grammars have."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .schema_walk import TYPES, Schema, resolve, type_set

_MAX_DEPTH = 12
_MAX_VALUES = 64  # of an enum
# Keywords that say nothing about an instance.
ANNOTATIONS = frozenset(
    {
        "$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated",
        "description", "example", "examples", "id", "readOnly", "title", "writeOnly",
    }
)  # fmt: skip
_BOUNDS = {
    # keyword: (type, its opposite, what is added to the bound)
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}


def absent(name: str) -> Schema:
    """No object that has this property."""
    return {"properties": {name: False}}


def conjunction(parts: Sequence[Schema | None]) -> Schema:
    """All of `parts`."""
    kept = [part for part in parts if part is not True and part != {}]
    if any(part is False for part in kept):
        return False
    if len(kept) <= 1:
        return kept[0] if kept and kept[0] is not None else True
    return {"allOf": kept}


def disjunction(parts: Sequence[Schema]) -> Schema:
    """Any of `parts`."""
    kept = [part for part in parts if part is not False]
    if any(part is True or part == {} for part in kept):
        return True
    if len(kept) <= 1:
        return kept[0] if kept else False
    return {"anyOf": kept}


def negation(schema: Any, document: Any, types: Any = None, depth: int = 0) -> Schema | None:
    """A schema of exactly the instances that `schema` does not accept; None if there is none in
    words that grammars have. `types`: what `type` beside it says, which the opposite may assume."""
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    parts: list[Schema] = []
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS:
            continue
        part = _keyword_negation(keyword, value, schema, document, types, depth)
        if part is None:
            return None
        parts.append(part)
    return disjunction(parts)


def _keyword_negation(
    keyword: str, value: Any, schema: dict[str, Any], document: Any, types: Any, depth: int
) -> Schema | None:
    if keyword in _BOUNDS:
        return _bound_negation(keyword, value, schema)
    if keyword in ("anyOf", "allOf") and isinstance(value, list):
        parts = [negation(part, document, types, depth + 1) for part in value]
        if None in parts:
            return None
        known = [part for part in parts if part is not None]
        return conjunction(known) if keyword == "anyOf" else disjunction(known)
    match keyword:
        case "type":
            return _type_negation(value, types)
        case "const":
            return _values_negation([value])
        case "enum":
            return _values_negation(value)
        case "required" if isinstance(value, list):
            return disjunction([{"type": "object", "properties": {name: False}} for name in value])
        case "properties" if isinstance(value, dict):
            return _properties_negation(value, document, depth)
        case "$ref" if isinstance(value, str) and value.startswith("#/"):
            return negation(resolve(document, value), document, types, depth + 1)
        case _:
            return None


def _bound_negation(keyword: str, value: Any, schema: dict[str, Any]) -> Schema | None:
    kind, opposite, shift = _BOUNDS[keyword]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(schema.get("exclusiveMinimum"), bool) or isinstance(
        schema.get("exclusiveMaximum"), bool
    ):
        return None  # draft 4, where these change the others
    bound = value + shift
    if shift and bound < 0:
        return False
    return {"type": kind, opposite: bound}


def _type_negation(value: Any, types: Any) -> Schema | None:
    excluded = type_set(value)
    if excluded is None:
        return None
    left = (type_set(types) or set(TYPES)) - excluded
    if "number" in excluded:
        left -= {"integer"}
    elif "integer" in excluded and "number" in left:
        return None  # numbers that are no integers
    if "number" in left:
        left -= {"integer"}
    return {"type": sorted(left)} if left else False


def _properties_negation(properties: dict[str, Any], document: Any, depth: int) -> Schema | None:
    parts: list[Schema] = []
    for name, schema in properties.items():
        opposite = negation(schema, document, None, depth + 1)
        if opposite is None:
            return None
        if opposite is not False:
            part = {"type": "object", "required": [name], "properties": {name: opposite}}
            parts.append(part)
    return disjunction(parts)


def _values_negation(values: Any) -> Schema | None:
    """All but these values; None where one is an array or an object."""
    if not isinstance(values, list) or len(values) > _MAX_VALUES:
        return None
    texts = [value for value in values if isinstance(value, str)]
    flags = {value for value in values if isinstance(value, bool)}
    numbers = [
        value for value in values if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if any(isinstance(value, list | dict) for value in values):
        return None
    untouched = {"array", "object"}
    parts: list[Schema] = []
    if texts:
        parts.append({"type": "string", "pattern": pattern_of_others(texts)})
    else:
        untouched.add("string")
    if numbers:
        parts += _gaps(numbers)
    else:
        untouched.add("number")
    if not flags:
        untouched.add("boolean")
    elif len(flags) == 1:
        parts.append({"const": not flags.pop()})
    if None not in values:
        untouched.add("null")
    return disjunction([{"type": sorted(untouched)}, *parts])


def _gaps(numbers: list[float]) -> list[Schema]:
    """The numbers before, between and after these."""
    ends = sorted(set(numbers))
    gaps: list[Schema] = [{"type": "number", "exclusiveMaximum": ends[0]}]
    for low, high in pairwise(ends):
        gaps.append({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high})
    return [*gaps, {"type": "number", "exclusiveMinimum": ends[-1]}]


def pattern_of_others(texts: Sequence[str]) -> str:
    """A regular expression that matches every text but these."""
    return f"^{_others(sorted(set(texts)))}$"


def _others(texts: list[str]) -> str:
    """What may follow where `texts` are excluded: the trie of their first characters."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    ways = [] if "" in texts else [""]
    if by_first:
        excluded = "".join(_in_class(char) for char in by_first)
        ways.append(f"[^{excluded}][\\s\\S]*")
        for char, rests in by_first.items():
            ways.append(re.escape(char) + _others(rests))
    else:
        ways.append("[\\s\\S]+")
    return f"(?:{'|'.join(ways)})"


def _in_class(char: str) -> str:
    return f"\\{char}" if char in "\\]^-[&~" else char
