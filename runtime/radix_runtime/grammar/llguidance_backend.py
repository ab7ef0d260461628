"""Grammars by llguidance, which computes masks on the fly and refuses what it cannot keep."""

import logging
import re
from collections.abc import Sequence

import msgspec
import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from ..constraint import Constraint
from ..errors import RequestError, refusal
from .backend import Advance, Compiled, Vocabulary
from .source import Source, grammar_source

# A million of fuel are some 20 ms of work on a lexer, 14,000 a millisecond in a mask; a state of a
# lexer takes one or two kilobytes.
_LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=70_000,
    step_max_items=50_000,
    max_lexer_states=100_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
_SILENT = 0
_WALK = 12  # tokens that a compiler tries behind the start of a grammar
_STRIDE = 7919  # a prime: what is tried is the same for the same grammar
_MAX_MESSAGE = 200  # characters of the library's that come back
_TOO_LARGE = re.compile(r"fuel|too (large|complex|big|many|deep)|limit|exceed", re.I)

log = logging.getLogger(__name__)


class LlguidanceMatcher:
    """Matcher."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def copy(self) -> "LlguidanceMatcher":
        """Matcher.copy."""
        return LlguidanceMatcher(self.matcher.deep_copy())

    def accept(self, ids: Sequence[int]) -> None:
        """Matcher.accept."""
        self.matcher.consume_tokens(list(ids))

    @property
    def error(self) -> str | None:
        """Matcher.error."""
        if not self.matcher.is_error():
            return None
        return _summary(self.matcher.get_error())


class LlguidanceBackend:
    """GrammarBackend."""

    def __init__(self, vocabulary: Vocabulary, threads: int) -> None:
        self._tokenizer = _tokenizer(vocabulary)
        self._mask_bytes = 4 * vocabulary.mask_words
        self._special_names = {
            vocabulary.tokens[token].decode("utf-8", "replace") for token in vocabulary.special_ids
        }
        self._executor = LLExecutor(threads) if threads > 0 else None

    def compile(self, constraint: Constraint) -> Compiled:
        """GrammarBackend.compile."""
        is_trying = self._executor is None
        if is_trying and constraint.before:
            # Behind free text neither the first mask nor the walk comes to the grammar itself.
            self.compile(msgspec.structs.replace(constraint, before=""))
        source = grammar_source(constraint, self._special_names)
        matcher = LLMatcher(self._tokenizer, source.text, log_level=_SILENT, limits=_LIMITS)
        if not matcher.is_error():
            # The first mask takes what the grammar costs at its start, here and not in a step.
            matcher.compute_bitmask()
        tried = matcher
        if is_trying and not matcher.is_error():
            tried = _walk(matcher.deep_copy())
        if tried.is_error():
            raise _refused(tried.get_error(), constraint, source)
        return Compiled(LlguidanceMatcher(matcher), source.warnings)

    def fill(self, answers: Sequence[Advance], rows: np.ndarray) -> None:
        """GrammarBackend.fill."""
        assert self._executor is not None
        matchers: list[tuple[LLMatcher, int]] = []
        single: list[tuple[LLMatcher, int]] = []
        for matcher, ids, row in answers:
            matchers.append((matcher.matcher, row))
            if len(ids) == 1:
                single.append((matcher.matcher, ids[0]))
            else:
                matcher.accept(ids)
        if single:
            self._executor.consume_token_par(single)
        working = [(matcher, row) for matcher, row in matchers if not matcher.is_error()]
        if working:
            self._executor.unsafe_compute_mask_ptr(
                working, rows.ctypes.data, self._mask_bytes, len(rows)
            )


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """The library's own reading of a tokenizer.json, which also knows how the model would cut the
    text that a grammar forces; ours of those kinds that it does not read."""
    eos_ids = list(vocabulary.eos_ids)
    try:
        size = len(vocabulary.tokens)
        return LLTokenizer(vocabulary.definition, n_vocab=size, eos_token=eos_ids)
    except ValueError as error:
        log.info("the tokens are read one by one: %s", error)
    tokens = _Tokens(vocabulary)
    tokens.tokenizer = LLTokenizer(TokenizerWrapper(tokens), eos_token=eos_ids)
    return tokens.tokenizer


class _Tokens:
    """A vocabulary as TokenizerWrapper wants it. `tokenizer` is there once it has been made."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.eos_ids[0]
        self.special_token_ids = vocabulary.special_ids
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that the grammar forces: the longest that fit."""
        if self.tokenizer is None:
            return []
        return self.tokenizer.greedy_tokenize(text.decode("utf-8", "replace"))


def _walk(matcher: LLMatcher) -> LLMatcher:
    """Takes tokens here and there among those that are allowed. A grammar that is too ambiguous
    shows it within a few."""
    for step in range(_WALK):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if matcher.is_error() or matcher.is_stopped() or len(allowed) == 0:
            break
        matcher.consume_token(int(allowed[step * _STRIDE % len(allowed)]))
        matcher.compute_ff_tokens()
    return matcher


def _refused(message: str, constraint: Constraint, source: Source) -> RequestError:
    """The client's error for one of the library's."""
    text = _summary(message)
    if constraint.kind in ("json_schema", "json_object"):
        code = "grammar_too_complex" if _TOO_LARGE.search(text) else "unsupported_schema"
        return refusal(code, f"the schema cannot be kept: {text}", source.place_of(message))
    code = "grammar_too_complex" if _TOO_LARGE.search(text) else "invalid_grammar"
    return refusal(code, f"the grammar is refused: {text}")


def _summary(message: str) -> str:
    """The first line of a message of the library's; of an error in a regex also the line that says
    what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return "unknown error"
    reasons = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    return " ".join([lines[0], *reasons[:1]])[:_MAX_MESSAGE]
