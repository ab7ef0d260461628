"""Detokenizer: token deltas in, text deltas out, and the end of a choice by stop string.

It runs as a process of its own under `serve` and in the caller's process under `Engine`. A choice
is known from its first delta (which carries `sampling`) to its last; a delta of an unknown choice
is what the engine had still computed after a stop string ended it, and is dropped in `_convert`.
"""

from __future__ import annotations

from collections.abc import Callable

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
from ..scheduler.channel import Inbox, Outbox
from .text_stream import TextStream, TokenSource

IDLE_WAIT = 1.0  # seconds between two heartbeats of an idle process


class Detokenizer:
    """Turns TokenBatch into TextBatch (to the API) and TextStop (to the scheduler).

    A RequestFailed is passed on to the API after all text that came before it; its choices are
    forgotten. Both results go to `outbox`, which routes by type.
    """

    def __init__(self, tokenizer: TokenSource, inbox: Inbox, outbox: Outbox) -> None:
        self._tokenizer = tokenizer
        self._inbox = inbox
        self._outbox = outbox
        self._streams: dict[str, dict[int, TextStream]] = {}

    def run(self, should_stop: Callable[[], bool], beat: Callable[[], None]) -> None:
        """Loops until `should_stop()`; sleeps in the inbox while there is nothing to do."""
        while not should_stop():
            beat()
            if not self.step():
                self._inbox.wait(IDLE_WAIT)

    def step(self) -> bool:
        """Handles all messages that are there. True if there was one."""
        messages = self._inbox.receive()
        batch: list[TextDelta] = []
        stops: list[TextStop] = []
        for message in messages:
            if isinstance(message, TokenBatch):
                for delta in message.deltas:
                    self._convert(delta, batch, stops)
            elif isinstance(message, RequestFailed):
                self._streams.pop(message.rid, None)
                batch = self._flush(batch)
                self._outbox.send(message)
            else:
                raise TypeError(f"the detokenizer cannot handle {type(message).__name__}")
        for stop in stops:
            self._outbox.send(stop)
        self._flush(batch)
        return bool(messages)

    @property
    def num_choices(self) -> int:
        """Choices that have begun and not ended."""
        return sum(len(choices) for choices in self._streams.values())

    def _flush(self, batch: list[TextDelta]) -> list[TextDelta]:
        if batch:
            self._outbox.send(TextBatch(batch))
        return []

    def _convert(self, delta: TokenDelta, batch: list[TextDelta], stops: list[TextStop]) -> None:
        stream = self._stream_of(delta)
        if stream is None:
            return
        ids = unpack_ids(delta.ids).tolist()
        hidden = _hides_last(delta, ids, stream)
        text = ""
        for used, token in enumerate(ids, 1):
            if hidden and used == len(ids):
                stream.push_hidden()
            else:
                text += stream.push(token)
            if stream.matched is not None:
                break
        else:
            used = len(ids)
        if delta.finish is not None and stream.matched is None:
            text += stream.finish()
        finish = delta.finish
        if stream.matched is not None:
            if finish is None:
                stops.append(TextStop(delta.rid, delta.choice, stream.count, stream.matched))
            finish = FinishReason("stop", stream.matched)
        if finish is not None:
            self._forget(delta)
        batch.append(_text_delta(delta, text, used, stream.count, finish))

    def _stream_of(self, delta: TokenDelta) -> TextStream | None:
        if delta.sampling is not None:
            context = [] if delta.input_ids is None else unpack_ids(delta.input_ids[-64:]).tolist()
            stream = TextStream(self._tokenizer, delta.sampling, context)
            self._streams.setdefault(delta.rid, {})[delta.choice] = stream
            return stream
        return self._streams.get(delta.rid, {}).get(delta.choice)

    def _forget(self, delta: TokenDelta) -> None:
        choices = self._streams[delta.rid]
        del choices[delta.choice]
        if not choices:
            del self._streams[delta.rid]


def _hides_last(delta: TokenDelta, ids: list[int], stream: TextStream) -> bool:
    """The token that ended the choice is counted but not shown, unless no_stop_trim asks for it."""
    finish = delta.finish
    if finish is None or finish.type != "stop" or not ids or stream.keeps_stop:
        return False
    return finish.matched == ids[-1]


def _text_delta(delta: TokenDelta, text: str, used: int, count: int, finish: FinishReason | None) -> TextDelta:
    return TextDelta(
        rid=delta.rid,
        choice=delta.choice,
        text=text,
        ids=delta.ids[: 4 * used],
        finish=finish,
        prompt_tokens=delta.prompt_tokens,
        cached_tokens=delta.cached_tokens,
        completion_tokens=count,
        logprobs=_first(delta.logprobs, used),
        prompt_logprobs=delta.prompt_logprobs,
    )


def _first(logprobs: Logprobs | None, n: int) -> Logprobs | None:
    """The part of `logprobs` that belongs to the first n tokens."""
    if logprobs is None or len(logprobs.ids) == 4 * n:
        return logprobs
    top = 4 * n * logprobs.top_n
    return Logprobs(
        ids=logprobs.ids[: 4 * n],
        logprobs=logprobs.logprobs[: 4 * n],
        top_n=logprobs.top_n,
        top_ids=logprobs.top_ids[:top],
        top_logprobs=logprobs.top_logprobs[:top],
    )
