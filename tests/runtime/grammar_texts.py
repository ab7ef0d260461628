"""Whether a text could be an answer under a constraint."""

from __future__ import annotations

import json
from functools import cache

from radix_runtime.constraint import Constraint
from radix_runtime.grammar.backend import Matcher, Vocabulary
from radix_runtime.grammar.llguidance_backend import LlguidanceBackend
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(DEMO_MODEL_DIR)
EOS = 2
VOCABULARY = Vocabulary.of(TOKENIZER, TOKENIZER.vocab_size, [EOS])


@cache
def backend() -> LlguidanceBackend:
    return LlguidanceBackend(VOCABULARY, 1)


def matcher_of(kind: str, text: str, before: str = "") -> Matcher:
    """Raises RequestError."""
    constraint = Constraint(kind=kind, text=text, before=before)  # type: ignore[arg-type]
    return backend().compile(constraint).matcher


def schema_matcher(schema: object) -> Matcher:
    return matcher_of("json_schema", json.dumps(schema))


def accepts(matcher: Matcher, text: str) -> bool:
    """Whether `text` with the end behind it is a whole answer."""
    answer = matcher.copy()
    answer.accept([*TOKENIZER.encode(text, add_special_tokens=False), EOS])
    return answer.error is None
