"""Log-probabilities in the shapes of the three APIs.

Values are log-softmax of the raw float32 logits, finite or exactly -9999.0. `bytes` of a token are
its raw bytes, so that those of all tokens make the text; a token that is not shown has none.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
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


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.id_to_bytes(token).decode("utf-8", "replace")


class TokenNames:
    """Tokens as text and bytes for one request."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
        self._keeps_stop = sampling.no_stop_trim

    def text(self, token: int) -> str:
        return _text(self._tokenizer, token)

    def shown(self, token: int, hidden: bool = False) -> bytes:
        if hidden or token in self._skipped:
            return b""
        return self._tokenizer.id_to_bytes(token)

    def of_delta(self, delta: TextDelta) -> Iterator[tuple[Scored, bool]]:
        """The scored tokens of `delta`; the flag tells of the stop token that is not shown."""
        entries = scored(delta.logprobs)
        finish = delta.finish
        for i, entry in enumerate(entries, 1):
            ends = i == len(entries) and finish is not None and finish.matched == entry.token
            yield entry, ends and not self._keeps_stop

    def chat(self, delta: TextDelta) -> list[dict[str, Any]]:
        """`logprobs.content` of a chat choice."""
        return [
            {
                **self._chat_token(entry.token, entry.logprob, hidden),
                "top_logprobs": [self._chat_token(t, v) for t, v in entry.top],
            }
            for entry, hidden in self.of_delta(delta)
        ]

    def _chat_token(
        self, token: int, logprob: float | None, hidden: bool = False
    ) -> dict[str, Any]:
        return {
            "token": self.text(token),
            "logprob": FLOOR if logprob is None else logprob,
            "bytes": list(self.shown(token, hidden)),
        }


class CompletionLogprobs:
    """`logprobs` of a completions choice; `text_offset` goes on from call to call, in characters
    of the text that the choice shows (with echo the prompt is part of it)."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, entries: Sequence[tuple[Scored, bool]]) -> dict[str, Any]:
        result: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for entry, hidden in entries:
            result["tokens"].append(self._names.text(entry.token))
            result["token_logprobs"].append(entry.logprob)
            result["top_logprobs"].append(self._top(entry))
            result["text_offset"].append(self._offset)
            self._offset += len(self._utf8.decode(self._names.shown(entry.token, hidden)))
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


def native_top(
    logprobs: Logprobs | None, tokenizer: Tokenizer | None
) -> list[list[list[Any]] | None]:
    return [
        None if e.logprob is None else [_native_item(t, v, tokenizer) for t, v in e.top]
        for e in scored(logprobs)
    ]


def _native_item(token: int, logprob: float | None, tokenizer: Tokenizer | None) -> list[Any]:
    return [logprob, token, None if tokenizer is None else _text(tokenizer, token)]
