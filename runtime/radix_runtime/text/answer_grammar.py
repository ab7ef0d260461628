"""Grammars of whole answers: what comes before the answer proper."""

import json
from collections.abc import Callable, Iterable

from .reasoning import ReasoningFamily
from .reasoning.think import Start

# Lark with llguidance's extensions. A piece of a rule is a quoted text, a special token as <[id]>,
# the name of a rule, or a JSON schema.

_ANY_TEXT = "ANY_TEXT: /(.|\\n)*/"


class AnswerGrammar:
    """Writes the grammar of one request. `special_id` gives the id of a text that is a special
    token; `markers` are the texts of the family that may be one."""

    def __init__(self, markers: Iterable[str], special_id: Callable[[str], int | None]) -> None:
        self._special: dict[str, str] = {}
        for marker in sorted(markers, key=len, reverse=True):
            token = special_id(marker)
            if token is not None:
                self._special[marker] = f"<[{token}]>"
        self._rules: list[str] = []

    def behind(self, family: ReasoningFamily, start: Start, final: str) -> str:
        """The grammar of an answer that is reasoning, the text `final` and then `@body`: see
        Constraint.before. It begins with `start`, which is not `content`."""
        return self._grammar(f"{self._reasoning(family, start)} {self._text(final)} @body")

    def _reasoning(self, family: ReasoningFamily, start: Start) -> str:
        self._rules.append("GAP: /\\n{0,2}/")
        body = f"{self._lazy(family.closing)} {self._text(family.answer)} GAP"
        if start == "reasoning":
            return body
        return f"({self._opening(family)} {body})?"

    def _opening(self, family: ReasoningFamily) -> str:
        """The opening of reasoning that may be left out.

        As text it is lazy: once it is there the answer is reasoning, even where the answer proper
        could begin with the same text. The parser of the answer reads it that way."""
        space = f"/{family.space}/ " if family.space else ""
        if any(marker in family.opening for marker in self._special):
            return f"{space}{self._text(family.opening)}"  # a special token is in no text
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {space}{quoted(family.opening)}")
        return name

    def _text(self, text: str) -> str:
        """A text in which special tokens are tokens."""
        for marker, token in self._special.items():
            before, found, after = text.partition(marker)
            if found:
                parts = [self._text(before), token, self._text(after)]
                return " ".join(part for part in parts if part)
        return quoted(text) if text else ""

    def _lazy(self, end: str) -> str:
        """Free text up to the first occurrence of `end`, and `end`."""
        if any(marker in end for marker in self._special):
            return f"ANY_TEXT {self._text(end)}"  # a special token is in no text
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: ANY_TEXT {quoted(end)}")
        return name

    def _rule(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _grammar(self, body: str) -> str:
        return "\n".join([f"start: {body.strip()}", _ANY_TEXT, *self._rules])


def quoted(text: str) -> str:
    """`text` as a terminal of Lark."""
    return json.dumps(text, ensure_ascii=False)
