"""Structural tags: text in which certain openings begin something that follows a grammar."""

# Two forms are known. The older one, of SGLang, lists `structures` (begin, schema, end) and the
# `triggers` at which the model has to go on with one of them. The newer one, of xgrammar, has a
# `format`: a tree of nodes, each with a type. Both become one grammar in Lark.

import json
from collections.abc import Callable
from typing import Any

from ..errors import refusal
from ..text.answer_grammar import quoted
from ..text.json_schema import normalise

_MAX_DEPTH = 32
_MAX_NODES = 2_000
_ANY_TEXT = "/(.|\\n)*/"


def structural_tag(
    tag: Any, options: dict[str, Any], special_names: set[str]
) -> tuple[str, list[str]]:
    """The grammar of a structural tag, and warnings about its schemas. `options` are llguidance's
    for JSON, `special_names` the texts of special tokens. Raises RequestError 400."""
    writer = _Writer(options, special_names)
    if not isinstance(tag, dict):
        raise writer.wrong("a structural tag is an object")
    if ("format" in tag) == ("structures" in tag):
        raise writer.wrong("a structural tag has either format, or structures and triggers")
    body = writer.node(tag["format"], 0) if "format" in tag else writer.structures(tag)
    return writer.grammar(body), writer.warnings


class _Writer:
    """Collects the rules of one grammar. Every method that takes a part of a tag returns what
    stands for it in a rule, and raises RequestError for a part that is none."""

    def __init__(self, options: dict[str, Any], special_names: set[str]) -> None:
        self.warnings: list[str] = []
        self._options = options
        self._special_names = special_names
        self._rules: list[str] = []
        self._nodes = 0

    def wrong(self, message: str) -> Exception:
        """The error that refuses the tag."""
        return refusal("invalid_grammar", message[:200])

    def grammar(self, body: str) -> str:
        """The whole grammar, whose answer is `body`."""
        return "\n".join([f"start: {body}", f"ANY_TEXT: {_ANY_TEXT}", *self._rules])

    # The form with structures and triggers -----------------------------------------------

    def structures(self, tag: dict[str, Any]) -> str:
        """Free text with any number of the structures in it."""
        tags = []
        for structure in self._list(tag, "structures"):
            if not isinstance(structure, dict):
                raise self.wrong("a structure is an object with begin, schema and end")
            content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
            tags.append({**structure, "content": content})
        return self._triggered({"triggers": tag.get("triggers"), "tags": tags}, 0)

    # The form with a format ---------------------------------------------------------------

    def node(self, node: Any, depth: int) -> str:
        """Any node of a format."""
        self._nodes += 1
        if depth > _MAX_DEPTH or self._nodes > _MAX_NODES:
            raise self.wrong(f"a format has at most {_MAX_NODES} nodes, {_MAX_DEPTH} deep")
        kind = node.get("type") if isinstance(node, dict) else None
        write = self._writers().get(kind) if isinstance(kind, str) else None
        if write is None:
            known = ", ".join(self._writers())
            raise self.wrong(f"a node of a format has one of the types {known}")
        return write(node, depth)

    def _writers(self) -> dict[str, Callable[[dict[str, Any], int], str]]:
        return {
            "any_text": self._any_text,
            "const_string": self._const_string,
            "grammar": self._grammar,
            "json_schema": self._json_schema,
            "or": self._or,
            "regex": self._regex,
            "sequence": self._sequence,
            "tag": self._tag,
            "tags_with_separator": self._tags_with_separator,
            "triggered_tags": self._triggered,
        }

    def _any_text(self, node: dict[str, Any], depth: int) -> str:
        return "ANY_TEXT"

    def _const_string(self, node: dict[str, Any], depth: int) -> str:
        return self._literal(self._string(node, "value"))

    def _grammar(self, node: dict[str, Any], depth: int) -> str:
        """Lark in Lark: llguidance takes it as a grammar of its own."""
        text = self._string(node, "grammar")
        if text.count("{") != text.count("}"):
            raise self.wrong("the braces of a nested grammar do not match")
        return f"%lark {{\n{text}\n}}"

    def _json_schema(self, node: dict[str, Any], depth: int) -> str:
        normal = normalise(node.get("json_schema", node.get("schema")))
        self.warnings += normal.warnings
        return f"%json {json.dumps({**normal.schema, 'x-guidance': self._options})}"

    def _or(self, node: dict[str, Any], depth: int) -> str:
        parts = [self.node(part, depth + 1) for part in self._list(node, "elements")]
        return self._rule(" | ".join(parts))

    def _regex(self, node: dict[str, Any], depth: int) -> str:
        pattern = self._string(node, "pattern")
        return f"/{_escape_slashes(pattern)}/"

    def _sequence(self, node: dict[str, Any], depth: int) -> str:
        parts = self._list(node, "elements")
        written = []
        for number, part in enumerate(parts):
            is_open = isinstance(part, dict) and part.get("type") == "any_text"
            if is_open and number + 1 < len(parts):
                raise self.wrong("in a sequence any_text can only be the last element")
            written.append(self.node(part, depth + 1))
        return self._rule(" ".join(written))

    def _tag(self, node: dict[str, Any], depth: int) -> str:
        begin = self._string(node, "begin")
        return self._rule(f"{self._literal(begin)} {self._rest_of_tag(node, depth)}")

    def _rest_of_tag(self, node: dict[str, Any], depth: int) -> str:
        """The content of a tag and its end."""
        end = self._string(node, "end")
        content = node.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            if end in self._special_names:
                return f"ANY_TEXT {end}"
            name = self._name()
            self._rules.append(f"{name}[lazy]: ANY_TEXT {quoted(end)}")
            return name
        return f"{self.node(content, depth + 1)} {self._literal(end)}"

    def _tags_with_separator(self, node: dict[str, Any], depth: int) -> str:
        tags = [self._checked_tag(tag) for tag in self._list(node, "tags")]
        one = self._rule(" | ".join(self._tag(tag, depth + 1) for tag in tags))
        separator = self._literal(self._string(node, "separator"))
        some = one if node.get("stop_after_first") else self._rule(f"{one} ({separator} {one})*")
        return some if node.get("at_least_one") else f"({some})?"

    def _triggered(self, node: dict[str, Any], depth: int) -> str:
        """Free text; behind a trigger one of the tags that begin with it."""
        triggers = self._list(node, "triggers")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise self.wrong("triggers are texts that are not empty")
        calls = []
        for tag in self._list(node, "tags"):
            self._checked_tag(tag)
            begin = self._string(tag, "begin")
            matching = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(matching) != 1:
                raise self.wrong(f"{begin[:50]!r} must begin with exactly one of the triggers")
            head = self._head(matching[0])
            rest = self._rest_of_tag(tag, depth + 1)
            calls.append(self._rule(f"{head} {self._literal(begin[len(matching[0]) :])} {rest}"))
        call = self._rule(" | ".join(calls))
        first = node.get("stop_after_first")
        if node.get("at_least_one"):
            return call if first else f"{call} {call}* ANY_TEXT"
        return f"({call} | ANY_TEXT)" if first else f"{call}* ANY_TEXT"

    def _checked_tag(self, tag: Any) -> dict[str, Any]:
        if not isinstance(tag, dict):
            raise self.wrong("a tag is an object with begin, content and end")
        return tag

    # Pieces -------------------------------------------------------------------------------

    def _head(self, trigger: str) -> str:
        """Free text up to the first occurrence of a trigger, and the trigger."""
        if trigger in self._special_names:
            return f"ANY_TEXT {trigger}"
        name = self._name()
        self._rules.append(f"{name}[lazy]: ANY_TEXT {quoted(trigger)}")
        return name

    def _literal(self, text: str) -> str:
        return text if text in self._special_names else quoted(text)

    def _rule(self, body: str) -> str:
        name = self._name()
        self._rules.append(f"{name}: {body}")
        return name

    def _name(self) -> str:
        return f"r{len(self._rules)}"

    def _string(self, node: dict[str, Any], name: str) -> str:
        value = node.get(name)
        if not isinstance(value, str):
            raise self.wrong(f"{name} must be a text")
        return value

    def _list(self, node: dict[str, Any], name: str) -> list[Any]:
        value = node.get(name)
        if not isinstance(value, list) or not value:
            raise self.wrong(f"{name} must be a list that is not empty")
        return value


def _escape_slashes(pattern: str) -> str:
    """A regex for between two slashes."""
    escaped = ""
    follows_backslash = False
    for char in pattern:
        if char == "/" and not follows_backslash:
            escaped += "\\"
        escaped += "\\n" if char == "\n" else char
        follows_backslash = char == "\\" and not follows_backslash
    return escaped
