"""Detokenizer: token deltas in, text deltas out, and the end of a choice by stop string.

It runs as a process of its own under `serve` and in the caller's process under `Engine`. A choice is known from its
first delta (which carries `sampling`) to its last; a delta of an unknown choice is what the engine had still computed
after a stop string ended it, and is dropped in `_convert`."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from ..hf import Tokenizer
from ..messages import (
    FinishReason,
    Logprobs,
    RequestFailed,
    TextBatch,
    TextDelta,
    TextStop,
    TokenBatch,
    TokenDelta,
    unpack_ids,
)
from ..sampling_params import SamplingParams
from ..scheduler.channel import Inbox, Outbox

IDLE_WAIT = 1.0  # seconds between two heartbeats of an idle process
_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 4  # enough to hold the start of a character that the prompt cut


class Detokenizer:
    """Turns TokenBatch into TextBatch (to the API) and TextStop (to the scheduler).

    A RequestFailed is passed on to the API after all text that came before it; its choices are forgotten. `outbox`
    routes by type. Without a tokenizer all text is empty."""

    def __init__(self, tokenizer: Tokenizer | None, inbox: Inbox, outbox: Outbox) -> None:
        self._tokenizer = tokenizer
        self._inbox = inbox
        self._outbox = outbox
        self._streams: dict[tuple[str, int], TextStream] = {}
        self._batch: list[TextDelta] = []

    def run(self, should_stop: Callable[[], bool], beat: Callable[[], None]) -> None:
        """Loops until `should_stop()`; sleeps in the inbox while there is nothing to do."""
        while not should_stop():
            beat()
            if not self.step():
                self._inbox.wait(IDLE_WAIT)

    def step(self) -> bool:
        """Handles all messages that are there. True if there was one."""
        messages = self._inbox.receive()
        for message in messages:
            if isinstance(message, TokenBatch):
                for delta in message.deltas:
                    self._convert(delta)
            elif isinstance(message, RequestFailed):
                for key in [key for key in self._streams if key[0] == message.rid]:
                    del self._streams[key]
                self._flush()
                self._outbox.send(message)
            else:
                raise TypeError(f"the detokenizer cannot handle {type(message).__name__}")
        self._flush()
        return bool(messages)

    @property
    def num_choices(self) -> int:
        """Choices that have begun and not ended."""
        return len(self._streams)

    def _flush(self) -> None:
        if self._batch:
            batch, self._batch = self._batch, []
            self._outbox.send(TextBatch(batch))

    def _convert(self, delta: TokenDelta) -> None:
        key, finish = (delta.rid, delta.choice), delta.finish
        if delta.sampling is not None:
            context = [] if delta.input_ids is None else unpack_ids(delta.input_ids[-4 * _CONTEXT_TOKENS :]).tolist()
            self._streams[key] = TextStream(self._tokenizer, delta.sampling, context)
        if (stream := self._streams.get(key)) is None:
            return
        ids = unpack_ids(delta.ids).tolist()
        # The token that ended the choice is counted but not shown, unless no_stop_trim asks for it.
        hides = finish is not None and finish.type == "stop" and not stream.keeps_stop and ids[-1:] == [finish.matched]
        text, used = "", 0
        while used < len(ids) and stream.matched is None:
            used += 1
            text += stream.push(ids[used - 1], hidden=hides and used == len(ids))
        if finish is not None and stream.matched is None:
            text += stream.finish()
        if stream.matched is not None:
            if finish is None:
                self._outbox.send(TextStop(delta.rid, delta.choice, stream.count, stream.matched))
            finish = FinishReason("stop", stream.matched)
        if finish is not None:
            del self._streams[key]
        logprobs, prompt = _first(delta.logprobs, used), delta.prompt_logprobs
        sizes = delta.prompt_tokens, delta.cached_tokens, stream.count
        self._batch.append(TextDelta(*key, text, delta.ids[: 4 * used], finish, *sizes, logprobs, prompt))


def _first(logprobs: Logprobs | None, n: int) -> Logprobs | None:
    """The part of `logprobs` that belongs to the first n tokens."""
    if logprobs is None or len(logprobs.ids) == 4 * n:
        return logprobs
    top = 4 * n * logprobs.top_n
    return Logprobs(
        logprobs.ids[: 4 * n],
        logprobs.logprobs[: 4 * n],
        logprobs.top_n,
        logprobs.top_ids[:top],
        logprobs.top_logprobs[:top],
    )


class TextStream:
    """The text of one choice, token by token, exact to the byte:

        token -> bytes -> incremental UTF-8 -> held tail -> text that may be shown

    Bytes of an incomplete character stay in the UTF-8 decoder; text that may begin a stop string stays in the tail.
    What is shown is a function of the token sequence alone, never of how the tokens were grouped into messages. Work
    per token is bounded by the longest stop string.

    After a stop string was found `matched` names it, and nothing may be pushed any more. Of several stop strings the
    one that is complete first wins, at equal ends the longest. Text of the first `min_new_tokens` tokens never counts
    towards a stop."""

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams, context: Sequence[int]) -> None:
        self.count = 0
        self.matched: str | None = None
        self.keeps_stop = sampling.no_stop_trim
        self._tokenizer = tokenizer
        self._skips = sampling.skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = sampling.stop
        self._prefixes = {s[:k] for s in sampling.stop for k in range(1, len(s))}
        self._longest = max(map(len, sampling.stop), default=0)
        self._min_tokens = sampling.min_new_tokens
        self._tail = ""
        for token in context:
            self._utf8.decode(self._bytes(token))
        self._cut_prompt = bool(self._utf8.getstate()[0])

    def push(self, token: int, *, hidden: bool = False) -> str:
        """The text that is now safe to show. A `hidden` token counts and shows nothing."""
        self.count += 1
        return "" if hidden else self._show(self._utf8.decode(self._bytes(token)))

    def finish(self) -> str:
        """The rest: incomplete bytes as U+FFFD, and the held tail. May still find a stop."""
        text = self._show(self._utf8.decode(b"", True))
        return text if self.matched is not None else text + self._tail

    def _bytes(self, token: int) -> bytes:
        if self._tokenizer is None or (self._skips and token in self._tokenizer.special_ids):
            return b""
        return self._tokenizer.id_to_bytes(token)

    def _show(self, text: str) -> str:
        if self._cut_prompt and text:
            # Bytes that the prompt left open and the output did not complete belong to the prompt.
            self._cut_prompt = False
            text = text.removeprefix(_REPLACEMENT)
        if not self._stops or self.count <= self._min_tokens:
            return text
        text = self._tail + text
        if found := [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]:
            end, start, self.matched = min(found)
            return text[: end if self.keeps_stop else start]
        most = min(len(text), self._longest - 1)
        held = next((k for k in range(most, 0, -1) if text[-k:] in self._prefixes), 0)
        self._tail = text[len(text) - held :]
        return text[: len(text) - held]
