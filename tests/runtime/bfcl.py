"""Calls of the Berkeley Function Calling Leaderboard: functions and the right calls of them.

From the data of the wheel `bfcl-eval`, whose code is not imported.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

CATEGORIES = (
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel",
    "parallel_multiple", "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple",
)  # fmt: skip
_TYPES = {  # those of Python, Java and JavaScript
    "dict": "object", "hashmap": "object", "float": "number", "double": "number",
    "long": "integer", "short": "integer", "byte": "integer", "char": "string",
    "tuple": "array", "arraylist": "array", "any": None,
}  # fmt: skip


class Question(NamedTuple):
    """`schemas`: those of the parameters, by the name of the function; `calls`: the right ones."""

    schemas: dict[str, dict[str, Any]]
    calls: list[tuple[str, dict[str, Any]]]


@cache
def questions(category: str) -> list[Question]:
    data = Path(str(distribution("bfcl-eval").locate_file("bfcl_eval/data")))
    file = f"BFCL_v4_{category}.json"
    found = []
    for asked, right in zip(
        _lines(data / file), _lines(data / "possible_answer" / file), strict=True
    ):
        schemas = {f["name"]: _json_schema(f["parameters"]) for f in asked["function"]}
        calls = []
        for call in right["ground_truth"]:
            for name, arguments in call.items():
                calls.append((name, _first(arguments)))
        found.append(Question(schemas=schemas, calls=calls))
    return found


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _first(arguments: dict[str, list[Any]]) -> dict[str, Any]:
    """The first of the values that each argument may have; one that may be left out is."""
    chosen = {}
    for name, values in arguments.items():
        if values and values[0] != "":
            chosen[name] = _value(values[0])
    return chosen


def _value(value: Any) -> Any:
    """Members of objects are lists of what they may be, too."""
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, dict) and all(isinstance(options, list) for options in value.values()):
        return _first(value)
    return value


def _json_schema(schema: Any) -> Any:
    """The leaderboard's names of types as JSON Schema has them."""
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _json_schema(value) for key, value in schema.items()}
    if isinstance(found.get("type"), str):
        found["type"] = _TYPES.get(found["type"].lower(), found["type"].lower())
    return {key: value for key, value in found.items() if value is not None}
