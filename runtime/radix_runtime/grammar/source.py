"""From a constraint to the text that llguidance compiles."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from ..constraint import Constraint
from ..errors import refusal
from ..text.answer_grammar import quoted
from ..text.json_schema import normalise
from ..text.schema_walk import find_keyword
from .structural_tag import structural_tag

MAX_REGEX = 2_048  # characters
MAX_GRAMMAR = 64 << 10  # bytes
MAX_CHOICES = 10_000
# Between the tokens of JSON: a space, or a new line and its indentation. A model that likes white
# space would go on with it to the end of its answer if it could.
WHITESPACE = r" |\r?\n[ \t]{0,40}"

_ANY_OBJECT = {"type": "object"}
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.M)
_KEYS = re.compile(r'Unimplemented keys: \["([^"]*)"')


@dataclass(slots=True)
class Source:
    """A grammar of llguidance's. `schema`: the JSON Schema that it was made of."""

    text: str
    warnings: list[str] = field(default_factory=list)
    schema: Any = None

    def place_of(self, message: str) -> str | None:
        """The JSON Pointer of the keyword that an error of the library names."""
        named = _KEYS.search(message)
        if named is None:
            return None
        return find_keyword(self.schema, named[1])


def grammar_source(constraint: Constraint, special_names: set[str]) -> Source:
    """The grammar of a constraint. `special_names` are the texts of special tokens. Raises
    RequestError 400."""
    source = _source(constraint, special_names)
    if constraint.before:
        source.text = _behind(constraint.before, source.text)
    return source


def _source(constraint: Constraint, special_names: set[str]) -> Source:
    text = constraint.text
    match constraint.kind:
        case "json_schema":
            return _schema_source(parse_json(constraint, "invalid_schema"), constraint)
        case "json_object":
            return _schema_source(_ANY_OBJECT, constraint)
        case "regex":
            if len(text) > MAX_REGEX:
                message = f"a regex has at most {MAX_REGEX} characters, this one {len(text)}"
                raise refusal("invalid_grammar", message)
            return Source(LLMatcher.grammar_from_regex(text))
        case "choice":
            return Source(LLMatcher.grammar_from_lark(_choice(constraint)))
        case "ebnf":
            return Source(LLMatcher.grammar_from_lark(_lark(constraint)))
        case "lark":
            return Source(LLMatcher.grammar_from_lark(text))
        case "structural_tag":
            tag = parse_json(constraint, "invalid_grammar")
            options = json_options(constraint)
            lark, warnings = structural_tag(tag, options, special_names)
            return Source(LLMatcher.grammar_from_lark(lark), warnings)
        case "any":
            raise ValueError("any tokens have no grammar")


def parse_json(constraint: Constraint, code: str) -> Any:
    """The JSON value of its text. Raises RequestError `code`."""
    try:
        return msgspec.json.decode(constraint.text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise refusal(code, f"not valid JSON: {error}"[:200]) from None


def json_options(constraint: Constraint) -> dict[str, Any]:
    """llguidance's options for the JSON of a constraint."""
    if constraint.whitespace == "":
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": constraint.whitespace or WHITESPACE}


def _schema_source(schema: Any, constraint: Constraint) -> Source:
    normal = normalise(schema)
    root = {**normal.schema, "x-guidance": json_options(constraint)}
    text = LLMatcher.grammar_from_json_schema(json.dumps(root))
    return Source(text, warnings=normal.warnings, schema=schema)


def _choice(constraint: Constraint) -> str:
    """A grammar of the texts in a JSON array."""
    texts = parse_json(constraint, "invalid_grammar")
    is_list = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if not is_list or not 1 <= len(texts) <= MAX_CHOICES:
        message = f"a choice is a list of 1 to {MAX_CHOICES} strings"
        raise refusal("invalid_grammar", message)
    _check_size(constraint)
    return "start: " + " | ".join(quoted(text) for text in texts)


def _lark(constraint: Constraint) -> str:
    """A grammar in Lark, which may be given in GBNF."""
    _check_size(constraint)
    if not _GBNF_RULE.search(constraint.text):
        return constraint.text
    try:
        return str(gbnf_to_lark(constraint.text))
    except MemoryError:
        raise
    except Exception as error:  # of a rule that is not there the converter raises a bare one
        message = f"not a grammar in GBNF: {str(error) or type(error).__name__}"
        raise refusal("invalid_grammar", message[:200]) from None


def _check_size(constraint: Constraint) -> None:
    size = len(constraint.text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR:
        message = f"a grammar has at most {MAX_GRAMMAR} bytes, this one {size}"
        raise refusal("invalid_grammar", message)


def _behind(before: str, grammar: str) -> str:
    """`grammar` as the `@body` of the one in Lark that says what comes before it."""
    parts = json.loads(grammar)["grammars"] if grammar.lstrip().startswith("{") else None
    if parts is None:
        parts = [{"lark_grammar": grammar}]
    parts[0]["name"] = "body"
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": before}, *parts]})
