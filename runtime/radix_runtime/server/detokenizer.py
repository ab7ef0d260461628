"""Detokenizer: token deltas in, text deltas out, and the end of a choice by stop string."""

# It runs as a process under `serve` and in the caller's under `Engine`. A choice is known from its
# first delta (which carries `sampling`) to its last; later ones, computed after a stop string ended
# it, are dropped in `_convert`.

import codecs
from collections.abc import Callable, Sequence

from .. import messages as m
from ..sampling_params import SamplingParams
from ..text.tokenizer import Tokenizer

IDLE_WAIT = 1.0  # seconds between two heartbeats of an idle process
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns TokenBatch into TextBatch (to the API) and TextStop (to the scheduler); passes a
    RequestFailed on after all text that came before it. `outbox` routes by type. Without a
    tokenizer all text is empty."""

    def __init__(self, tokenizer: Tokenizer | None, inbox: m.Inbox, outbox: m.Outbox) -> None:
        self._tokenizer, self._inbox, self._outbox = tokenizer, inbox, outbox
        self.streams: dict[
            tuple[str, int], TextStream
        ] = {}  # of the choices that have begun and not ended
        self._batch: list[m.TextDelta] = []

    def run(self, should_stop: Callable[[], bool], beat: Callable[[], None]) -> None:
        while not should_stop():
            beat()
            if not self.step():
                self._inbox.wait(IDLE_WAIT)

    def step(self) -> bool:
        """Handles all messages that are there. True if there was one."""
        messages = self._inbox.receive()
        for message in messages:
            if isinstance(message, m.TokenBatch):
                for delta in message.deltas:
                    self._convert(delta)
            elif isinstance(message, m.RequestFailed):
                self.streams = {
                    key: stream for key, stream in self.streams.items() if key[0] != message.rid
                }
                self._flush()
                self._outbox.send(message)
            else:
                raise TypeError(f"the detokenizer cannot handle {type(message).__name__}")
        self._flush()
        return bool(messages)

    def _flush(self) -> None:
        for batch in m.batches(self._batch):
            self._outbox.send(m.TextBatch(batch))
        self._batch = []

    def _convert(self, delta: m.TokenDelta) -> None:
        key, finish = (delta.rid, delta.choice), delta.finish
        if delta.sampling is not None:
            context = m.unpack_ids(delta.input_ids or b"").tolist()
            self.streams[key] = TextStream(self._tokenizer, delta.sampling, context)
        if (stream := self.streams.get(key)) is None:
            return
        ids = m.unpack_ids(delta.ids).tolist()
        # The token that ended the choice is counted but not shown, unless no_stop_trim asks for it.
        ended_by = [finish.matched] if finish is not None and finish.type == "stop" else None
        hides = ids[-1:] == ended_by and not stream.sampling.no_stop_trim
        text, used = "", 0
        while used < len(ids) and stream.matched is None:
            used += 1
            text += stream.push(ids[used - 1], hidden=hides and used == len(ids))
        if finish is not None and stream.matched is None:
            text += stream.finish()
        if stream.matched is not None:
            if finish is None:
                self._outbox.send(m.TextStop(*key, stream.count))
            finish = m.FinishReason("stop", stream.matched)
        if finish is not None:
            del self.streams[key]
        logprobs, prompt = _first(delta.logprobs, used), delta.prompt_logprobs
        sizes = delta.cached_tokens, stream.count
        self._batch.append(
            m.TextDelta(*key, delta.ids[: 4 * used], finish, *sizes, logprobs, prompt, text)
        )


# The part that belongs to the first n tokens.
def _first(all: m.Logprobs | None, n: int) -> m.Logprobs | None:
    if all is None:
        return None
    own, top = 4 * n, 4 * n * all.top_n
    return m.Logprobs(
        all.ids[:own], all.logprobs[:own], all.top_n, all.top_ids[:top], all.top_logprobs[:top]
    )


class TextStream:
    """The text of one choice, token by token, exact to the byte:

        token -> bytes -> incremental UTF-8 -> held tail -> text that may be shown

    Once `matched` names a stop string nothing may be pushed. The one that is complete first wins,
    at equal ends the longest; text of the first `min_new_tokens` tokens never counts."""

    # Bytes of an incomplete character stay in the UTF-8 decoder; text that may begin a stop string
    # stays in the tail. What is shown depends on the tokens alone, never on their grouping into
    # messages. Work per token is bounded by the longest stop string.

    def __init__(
        self, tokenizer: Tokenizer | None, sampling: SamplingParams, context: Sequence[int]
    ) -> None:
        self.count, self.sampling, self._tokenizer = 0, sampling, tokenizer
        self.matched: str | None = None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._prefixes = {s[:k] for s in sampling.stop for k in range(1, len(s))}
        self._longest = max(map(len, sampling.stop), default=0)
        self._tail = ""
        for token in context:
            self._utf8.decode(self._bytes(token))
        self._cut_prompt = bool(self._utf8.getstate()[0])

    def push(self, token: int, *, hidden: bool = False) -> str:
        """The text that is now safe to show. A `hidden` token counts and shows nothing."""
        self.count += 1
        raw = b"" if hidden else self._bytes(token)
        text = self._show(self._utf8.decode(raw))
        if self._tokenizer and not (raw or hidden) and self.count > self.sampling.min_new_tokens:
            if (
                name := self._tokenizer.id_to_text(token)
            ) in self.sampling.stop:  # special: not shown, and yet an end
                text, self.matched = text + self.finish() + name * self.sampling.no_stop_trim, name
        return text

    def finish(self) -> str:
        """The rest: incomplete bytes as U+FFFD, and the held tail. May still find a stop."""
        text = self._show(self._utf8.decode(b"", True))
        return text if self.matched is not None else text + self._tail

    def _bytes(self, token: int) -> bytes:
        if self._tokenizer is None or (
            self.sampling.skip_special_tokens and token in self._tokenizer.special_ids
        ):
            return b""
        return self._tokenizer.id_to_bytes(token)

    def _show(self, text: str) -> str:
        if self._cut_prompt and text:
            # Bytes that the prompt left open and the output did not complete belong to the prompt.
            self._cut_prompt = False
            text = text.removeprefix(_REPLACEMENT)
        if not self.sampling.stop or self.count <= self.sampling.min_new_tokens:
            return text
        text = self._tail + text
        if found := [(at + len(s), at, s) for s in self.sampling.stop if (at := text.find(s)) >= 0]:
            end, start, self.matched = min(found)
            return text[: end if self.sampling.no_stop_trim else start]
        most = min(len(text), self._longest - 1)
        held = next((k for k in range(most, 0, -1) if text[-k:] in self._prefixes), 0)
        self._tail = text[len(text) - held :]
        return text[: len(text) - held]
