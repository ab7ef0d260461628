"""JSON Schemas as trees: the schemas inside one, the places where they stand, references."""

import re
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any] | bool

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

# Keywords whose value is a schema, a list of schemas, or schemas by name; `items` and
# `dependencies` have two of these forms, of different drafts.
_ONE = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not",
        "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LIST = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_NAMED = ("$defs", "definitions", "dependentSchemas", "dependencies", "patternProperties",
          "properties")  # fmt: skip
_APPLY = frozenset([*_ONE, *_LIST, *_NAMED])


def children(node: dict[str, Any]) -> Iterator[tuple[str, str | int | None, Any]]:
    """(keyword, name or number in its value, schema) of each schema directly inside one."""
    for keyword in node.keys() & _APPLY:
        value = node[keyword]
        if isinstance(value, list):
            if keyword in _LIST:
                for index, child in enumerate(value):
                    yield keyword, index, child
        elif isinstance(value, dict):
            if keyword in _NAMED:
                for name, child in value.items():
                    yield keyword, name, child
            else:
                yield keyword, None, value


def nodes(schema: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """All schemas that are objects, each before those inside it, with its JSON Pointer."""
    stack = [(schema, "")]
    while stack:
        node, pointer = stack.pop()
        if isinstance(node, dict):
            yield node, pointer
            for keyword, name, child in children(node):
                stack.append((child, place(pointer, keyword, name)))


def place(pointer: str, keyword: str, name: str | int | None = None) -> str:
    """The JSON Pointer of what a keyword of the schema at `pointer` holds under `name`."""
    path = f"{pointer}/{escaped(keyword)}"
    return path if name is None else f"{path}/{escaped(str(name))}"


def find_keyword(schema: Any, keyword: str) -> str | None:
    """The JSON Pointer of a place where a schema uses `keyword`."""
    for node, pointer in nodes(schema):
        if keyword in node:
            return place(pointer, keyword)
    return None


def escaped(name: str) -> str:
    """`name` as a part of a JSON Pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def resolve(document: Any, reference: str) -> Any:
    """What a `#/...` reference names; None if there is nothing."""
    if reference == "#":
        return document
    if not reference.startswith("#/"):
        return None
    found = document
    for part in reference[2:].split("/"):
        name = _unquoted(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _unquoted(part: str) -> str:
    return re.sub("%([0-9A-Fa-f]{2})", lambda match: chr(int(match[1], 16)), part)


def type_set(value: Any) -> set[str] | None:
    """The types that a `type` names; None if it is none."""
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(name in TYPES for name in listed):
        return None
    found = set(listed)
    return found | {"integer"} if "number" in found else found
