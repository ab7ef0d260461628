"""Log-probabilities in the shapes of the three APIs.

Values are log-softmax of the raw float32 logits, finite or exactly -9999.0. `bytes` of a token are
its raw bytes, so that those of all tokens make the text; a token that is not shown has none.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..hf import Tokenizer
from ..messages import Logprobs, TextDelta
from ..sampling_params import SamplingParams

FLOOR = -9999.0


class Scored(NamedTuple):
    """One token, its logprob (None: the first token of a prompt has none) and the likeliest."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


def scored(logprobs: Logprobs | None) -> list[Scored]:
    if logprobs is None:
        return []
    ids = np.frombuffer(logprobs.ids, "<i4").tolist()
    values = np.frombuffer(logprobs.logprobs, "<f4").tolist()
    top_ids = np.frombuffer(logprobs.top_ids, "<i4").tolist()
    top_values = np.frombuffer(logprobs.top_logprobs, "<f4").tolist()
    n = logprobs.top_n
    result = []
    for i, (token, value) in enumerate(zip(ids, values, strict=True)):
        if value != value:  # NaN
            result.append(Scored(token, None, []))
            continue
        part = slice(i * n, (i + 1) * n)
        top = [(t, max(FLOOR, v)) for t, v in zip(top_ids[part], top_values[part], strict=True)]
        result.append(Scored(token, max(FLOOR, value), top))
    return result


class TokenNames:
    """Tokens as text and bytes for one request."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self.text = tokenizer.id_to_text
        self._bytes = tokenizer.id_to_bytes
        self._skipped = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
        self._keeps_stop = sampling.no_stop_trim

    def shown(self, token: int) -> bytes:
        return b"" if token in self._skipped else self._bytes(token)

    def of_delta(self, delta: TextDelta) -> list[tuple[Scored, bytes]]:
        """The scored tokens of `delta` and what is shown of each: nothing of a stop token, unless
        it was to be kept."""
        entries = [(entry, self.shown(entry.token)) for entry in scored(delta.logprobs)]
        if entries and delta.finish is not None and not self._keeps_stop:
            last = entries[-1][0]
            if delta.finish.matched == last.token:
                entries[-1] = last, b""
        return entries

    def chat(self, delta: TextDelta) -> list[dict[str, Any]]:
        """`logprobs.content` of a chat choice."""
        content = []
        for entry, shown in self.of_delta(delta):
            top = [self._chat_token(t, v, self.shown(t)) for t, v in entry.top]
            token = self._chat_token(entry.token, entry.logprob, shown)
            content.append({**token, "top_logprobs": top})
        return content

    def _chat_token(self, token: int, logprob: float | None, shown: bytes) -> dict[str, Any]:
        value = FLOOR if logprob is None else logprob
        return {"token": self.text(token), "logprob": value, "bytes": list(shown)}


class CompletionLogprobs:
    """`logprobs` of a completions choice; `text_offset` goes on from call to call, in characters
    of the text that the choice shows (with echo the prompt is part of it)."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, entries: Sequence[tuple[Scored, bytes]]) -> dict[str, Any]:
        result: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for entry, shown in entries:
            result["tokens"].append(self._names.text(entry.token))
            result["token_logprobs"].append(entry.logprob)
            result["top_logprobs"].append(self._top(entry))
            result["text_offset"].append(self._offset)
            self._offset += len(self._utf8.decode(shown))
        return result

    def _top(self, entry: Scored) -> dict[str, float] | None:
        """The sampled token is always there; of tokens with the same text the likeliest is."""
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, value in [*entry.top, (entry.token, entry.logprob)]:
            text = self._names.text(token)
            top[text] = max(value, top.get(text, FLOOR))
        return top


def native(logprobs: Logprobs | None, tokenizer: Tokenizer | None) -> list[list[Any]]:
    """[logprob, id, text or None] a token, as /generate gives them."""
    return [_native_item(e.token, e.logprob, tokenizer) for e in scored(logprobs)]


def native_top(logprobs: Logprobs | None, tokenizer: Tokenizer | None) -> list[list[list[Any]] | None]:
    return [None if e.logprob is None else [_native_item(t, v, tokenizer) for t, v in e.top] for e in scored(logprobs)]


def _native_item(token: int, logprob: float | None, tokenizer: Tokenizer | None) -> list[Any]:
    return [logprob, token, None if tokenizer is None else tokenizer.id_to_text(token)]
