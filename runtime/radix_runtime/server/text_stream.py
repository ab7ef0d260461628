"""TextStream: the text of one choice, token by token, exact to the byte.

    token -> bytes -> incremental UTF-8 -> held tail -> text that may be shown

Bytes of an incomplete character stay in the UTF-8 decoder; text that may begin a stop string stays
in the tail. What is shown is a function of the token sequence alone, never of how the tokens were
grouped into messages. Work per token is bounded by the longest stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from ..sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 4  # enough to hold the start of a character that the prompt cut


class TokenSource(Protocol):
    """What the detokenizer needs of a tokenizer."""

    special_ids: frozenset[int]

    def id_to_bytes(self, token_id: int) -> bytes: ...


class TextStream:
    """Feed tokens with `push`; it returns the text that is safe to show.

    After a stop string was found `matched` names it, and nothing may be pushed any more. Of several
    stop strings the one that is complete first wins, at equal ends the longest. Text of the first
    `min_new_tokens` tokens never counts towards a stop.
    """

    def __init__(self, tokenizer: TokenSource, sampling: SamplingParams, context: Sequence[int] = ()) -> None:
        self.count = 0
        self.matched: str | None = None
        self._id_to_bytes = tokenizer.id_to_bytes
        self._skipped = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = sampling.stop
        self._prefixes = {s[:k] for s in sampling.stop for k in range(1, len(s))}
        self._longest = max((len(s) for s in sampling.stop), default=0)
        self.keeps_stop = sampling.no_stop_trim
        self._min_tokens = sampling.min_new_tokens
        self._tail = ""
        for token in context[-_CONTEXT_TOKENS:]:
            self._utf8.decode(self._bytes(token))
        self._cut_prompt = bool(self._utf8.getstate()[0])

    def push(self, token: int) -> str:
        self.count += 1
        return self._show(self._utf8.decode(self._bytes(token)))

    def push_hidden(self) -> None:
        """Counts a token whose text is not shown (the stop token)."""
        self.count += 1

    def finish(self) -> str:
        """The rest: incomplete bytes as U+FFFD, and the held tail. May still find a stop."""
        text = self._show(self._utf8.decode(b"", True))
        if self.matched is None:
            text += self._tail
        self._tail = ""
        return text

    def _bytes(self, token: int) -> bytes:
        return b"" if token in self._skipped else self._id_to_bytes(token)

    def _show(self, text: str) -> str:
        if self._cut_prompt and text:
            # Bytes that the prompt left open and the output did not complete belong to the prompt.
            self._cut_prompt = False
            text = text.removeprefix(_REPLACEMENT)
        if not self._stops or self.count <= self._min_tokens:
            return text
        text = self._tail + text
        found = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._tail = ""
            return text[: end if self.keeps_stop else start]
        most = min(len(text), self._longest - 1)
        held = next((k for k in range(most, 0, -1) if text[-k:] in self._prefixes), 0)
        self._tail = text[len(text) - held :]
        return text[: len(text) - held]
