"""JSON Schemas at random, of what draft 2020-12 offers and the server keeps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
PATTERNS = ['^[a-z]{2}[^\\\\"]{0,3}$', "^(ab|c){1,3}$", "^\\d{1,4}-[A-F]{2}$", "^.{0,4}$", "^$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "duration"]
VALUES: list[Any] = [
    "x",
    "",
    'a"b\\',
    "ü\n",
    0,
    -7,
    2.5,
    True,
    None,
    [],
    {},
    [1, "a"],
    {"a": [None]},
]
# Texts, lists and numbers without a bound, which a model that prefers nothing does not end.
UNBOUNDED: list[Schema] = [
    {"type": "string"},
    {"type": "number"},
    {"type": "string", "format": "email"},
    {"type": "array", "items": {"type": "boolean"}},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"enum": [1, "a"]}},
     "additionalProperties": False},
    {},
]  # fmt: skip


class SchemaWriter:
    """Writes schemas; `is_bounded`: every text, list and object of them has an end."""

    def __init__(self, source: random.Random, *, is_bounded: bool) -> None:
        self._dice = source
        self._is_bounded = is_bounded
        self._definitions: dict[str, Schema] = {}
        self._leaves: list[Callable[[], Schema]] = [
            self._text, self._integer, self._number, self._values, self._simple
        ]  # fmt: skip
        self._branches: list[Callable[[int], Schema]] = [
            self._object, self._object, self._array, self._tuple, self._any_of, self._one_of,
            self._all_of, self._conditional, self._reference,
        ]  # fmt: skip
        if not is_bounded:
            self._branches.append(self._chain)

    def write(self) -> Schema:
        """A schema with its definitions."""
        self._definitions = {}
        schema = self._schema(self._dice.randrange(4))
        if self._definitions:
            schema = {**schema, "$defs": self._definitions}
        return schema

    def _schema(self, depth: int) -> Schema:
        if depth > 0 and self._dice.random() < 0.7:
            return self._dice.choice(self._branches)(depth - 1)
        if not self._is_bounded and self._dice.random() < 0.3:
            return dict(self._dice.choice(UNBOUNDED))
        return self._dice.choice(self._leaves)()

    # Leaves -------------------------------------------------------------------------------

    def _text(self) -> Schema:
        least = self._dice.randrange(3)
        most = least + self._dice.randrange(6)
        return self._dice.choice(
            [
                {"type": "string", "minLength": least, "maxLength": most},
                {"type": "string", "maxLength": most},
                {"type": "string", "pattern": self._dice.choice(PATTERNS)},
                {"type": "string", "format": self._dice.choice(FORMATS)},
                {"type": "string", "maxLength": 3, "not": {"enum": ["a", "b", ""]}},
            ]
        )

    def _integer(self) -> Schema:
        least = self._dice.randrange(-300, 300)
        schema: Schema = {"type": "integer", "minimum": least}
        schema["maximum"] = least + self._dice.randrange(500)
        if self._dice.random() < 0.2:
            schema = {"type": "integer", "exclusiveMinimum": -50, "maximum": 99, "multipleOf": 5}
        return schema

    def _number(self) -> Schema:
        return {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 40}

    def _values(self) -> Schema:
        if self._dice.random() < 0.3:
            return {"const": self._dice.choice(VALUES)}
        return {"enum": self._dice.sample(VALUES, self._dice.randrange(1, 6))}

    def _simple(self) -> Schema:
        return {"type": self._dice.choice(["boolean", "null", ["null", "boolean"]])}

    # Branches -----------------------------------------------------------------------------

    def _object(self, depth: int) -> Schema:
        names = self._dice.sample(
            ["a", "b", "c d", "ü", '"', "name", "$x"], self._dice.randrange(4)
        )
        schema: Schema = {
            "type": "object",
            "properties": {name: self._schema(depth) for name in names},
            "required": self._dice.sample(names, self._dice.randrange(len(names) + 1)),
            "additionalProperties": False,
        }
        if len(names) > 1 and self._dice.random() < 0.2:
            schema["dependentRequired"] = {names[0]: [names[1]]}
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._dice.randrange(3)
        most = least + self._dice.randrange(3)
        return {"type": "array", "items": self._schema(depth), "minItems": least, "maxItems": most}

    def _tuple(self, depth: int) -> Schema:
        items = [self._schema(depth) for _ in range(self._dice.randrange(1, 4))]
        least = self._dice.randrange(len(items) + 1)
        return {"type": "array", "prefixItems": items, "items": False, "minItems": least}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._schema(depth) for _ in range(self._dice.randrange(1, 4))]}

    def _one_of(self, depth: int) -> Schema:
        """Branches that a discriminator, or their type, tells apart."""
        if self._dice.random() < 0.4:
            member = {"properties": {"k": self._schema(depth)}, "additionalProperties": False}
            leaves = [self._integer(), self._text(), self._simple(), {"type": "object", **member}]
            return {"oneOf": self._dice.sample(leaves, 2)}
        branches = []
        for kind in self._dice.sample(["cat", "dog", "eel"], 2):
            branch = self._object(depth)
            branch["properties"] = {"kind": {"const": kind}, **branch["properties"]}
            branch["required"] = ["kind", *branch["required"]]
            branches.append(branch)
        return {"oneOf": branches}

    def _all_of(self, depth: int) -> Schema:
        first, second = self._schema(depth), self._schema(depth)
        parts: list[Schema] = [
            {"type": "object", "properties": {"p": first}, "required": ["p"]},
            {"properties": {"q": second, "p": True}, "additionalProperties": False},
        ]
        return {"allOf": parts}

    def _conditional(self, depth: int) -> Schema:
        schema = self._object(depth)
        schema["properties"] = {"on": {"type": "boolean"}, **schema["properties"]}
        schema["properties"]["when"] = {"type": "integer", "minimum": 0, "maximum": 9}
        schema["required"] = ["on", *schema["required"]]
        schema["if"] = {"properties": {"on": {"const": True}}}
        schema["then"] = {"required": ["when"]}
        return schema

    def _reference(self, depth: int) -> Schema:
        name = f"d{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._schema(depth)
        return {"$ref": f"#/$defs/{name}"}

    def _chain(self, depth: int) -> Schema:
        """A list by references to itself."""
        name = f"d{len(self._definitions)}"
        self._definitions[name] = {}
        reference = {"$ref": f"#/$defs/{name}"}
        self._definitions[name] = {
            "type": "object",
            "properties": {"value": self._schema(min(depth, 1)), "next": reference},
            "required": ["value"],
            "additionalProperties": False,
        }
        return reference
