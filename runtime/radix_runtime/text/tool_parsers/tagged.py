"""Calls whose arguments are written one by one between tags, not as JSON."""

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from ..machine import CutShort, MarkerSearch, NeedMore, NotACall, Reader
from ..tools import JSON_TYPES, json_types
from .base import ToolParser


class TaggedCalls(ToolParser):
    """The arguments become a JSON object as they come. A string is passed on while it is written;
    a value of another type, by the schema of the tool's parameters, when it is complete, so that
    the arguments of a call that has ended are always valid JSON.

    `value_end` ends a value, with `bare_newline` and the newline before it."""

    value_end: ClassVar[str]
    bare_newline: ClassVar[bool] = False

    def __init__(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._value_search = MarkerSearch((self.value_end,), newline=self.bare_newline)
        self._properties: Mapping[str, Any] = {}
        self._count = 0  # arguments of this call so far
        self._types: frozenset[str] = frozenset()  # of the value that is being read; empty: unknown
        self._held: list[str] = []

    @abstractmethod
    def _key(self, reader: Reader) -> str | None:
        """Reads from the end of an argument to the value of the next, whose name it is; or the end
        of the call (None). Raises NotACall, NeedMore."""

    # States -------------------------------------------------------------------------------

    def _opened(self, name: str) -> None:
        self._properties = _properties(self._tools.get(name, {}))
        self._count = 0

    def _arguments(self) -> bool:
        """At the beginning of an argument."""
        reader = Reader(self._text, self._at, is_whole=self._is_whole)
        try:
            key = self._key(reader)
        except NeedMore:
            return False
        except CutShort:
            self._emit("markup", "", end=len(self._text))
            return False
        except NotACall:  # something else than an argument ends the call
            key = None
            reader.at = self._at
        before = ", " if self._count else "{"
        if key is None:
            self._emit("arguments", "}" if self._count else "{}", end=reader.at)
            self._state = self._tail
            return True
        self._count += 1
        self._types = json_types(self._properties.get(key))
        is_string = self._types == {"string"}
        quote = '"' if is_string else ""
        self._emit("arguments", f"{before}{_dump(key)}: {quote}", end=reader.at)
        self._state = self._string_value if is_string else self._other_value
        return True

    def _string_value(self) -> bool:
        found = self._find_end()
        self._emit("arguments", _dump(self._text[self._at : found[0]])[1:-1], end=found[0])
        if found[1] is None:
            return self._cut_short()
        self._emit("arguments", '"', end=found[1])
        self._state = self._arguments
        return True

    def _other_value(self) -> bool:
        found = self._find_end()
        self._held.append(self._text[self._at : found[0]])
        self._emit("markup", "", end=found[0])
        if found[1] is None:
            return self._cut_short()
        value = _convert("".join(self._held), self._types)
        self._held = []
        self._emit("arguments", value, end=found[1])
        self._state = self._arguments
        return True

    def _cut_short(self) -> bool:
        """The end of a value has not come. At the end of the answer what may begin a tag is none of
        the value, nor is a part of a number one."""
        if self._is_whole:
            self._emit("markup", "", end=len(self._text))
        return False

    def _find_end(self) -> tuple[int, int | None]:
        """The end of what belongs to the value, and that of the tag behind it if it has come."""
        found = self._value_search.find(self._text, self._at)
        if found is not None:
            return found
        return self._value_search.held(self._text, self._at), None


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _convert(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that is written as text: JSON if it can be that and the schema allows its
    type, else a string."""
    words = {"True": "true", "False": "false", "None": "null"}
    word = text.strip()
    if types and "string" not in types:
        word = words.get(word, word)
    try:
        value = json.loads(word, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _dump(text)
    kind = JSON_TYPES[type(value)]
    if "string" in types and kind not in types and not (kind == "integer" and "number" in types):
        return _dump(text)
    return word


def _no_constant(name: str) -> Any:
    raise ValueError(name)  # NaN and infinities are no JSON
