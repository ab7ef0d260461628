"""Detokenizer: token deltas in, text deltas out, and the end of a choice by stop string."""

# It runs as a process under `serve` and in the caller's under `Engine`. A choice is known from its
# first delta (which carries `sampling`) to its last; later ones, computed after a stop string ended
# it, are dropped in `_convert`.

from collections.abc import Callable, Sequence

from .. import messages as m
from .text_stream import TextStream
from .tokenizer import Tokenizer

IDLE_WAIT = 1.0  # seconds between two heartbeats of an idle process


class Detokenizer:
    """Turns TokenBatch into TextBatch (to the API) and TextStop (to the scheduler); passes a
    RequestFailed on after all text that came before it. `outbox` routes by type. Without a
    tokenizer all text is empty."""

    def __init__(self, tokenizer: Tokenizer | None, inbox: m.Inbox, outbox: m.Outbox) -> None:
        self._tokenizer = tokenizer
        self._inbox = inbox
        self._outbox = outbox
        # Of the choices that have begun and not ended, by (rid, choice).
        self.streams: dict[tuple[str, int], TextStream] = {}
        self._batch: list[m.TextDelta] = []

    def run(self, should_stop: Callable[[], bool], beat: Callable[[], None]) -> None:
        """Handles messages until `should_stop()`; calls `beat` at least every IDLE_WAIT seconds."""
        while not should_stop():
            beat()
            if not self.step():
                self._inbox.wait(IDLE_WAIT)

    def step(self) -> bool:
        """Handles all messages that have arrived. True if there was one."""
        messages = self._inbox.receive()
        for message in messages:
            if isinstance(message, m.TokenBatch):
                for delta in message.deltas:
                    self._convert(delta)
            elif isinstance(message, m.RequestFailed):
                self._fail(message)
            else:
                raise TypeError(f"the detokenizer cannot handle {type(message).__name__}")
        self._flush()
        return bool(messages)

    def _flush(self) -> None:
        for batch in m.batches(self._batch):
            self._outbox.send(m.TextBatch(batch))
        self._batch = []

    def _fail(self, message: m.RequestFailed) -> None:
        ended = [key for key in self.streams if key[0] == message.rid]
        for key in ended:
            del self.streams[key]
        self._flush()
        self._outbox.send(message)

    def _convert(self, delta: m.TokenDelta) -> None:
        key = (delta.rid, delta.choice)
        if delta.sampling is not None:
            context = m.unpack_ids(delta.input_ids or b"").tolist()
            self.streams[key] = TextStream(
                tokenizer=self._tokenizer, sampling=delta.sampling, context=context
            )
        stream = self.streams.get(key)
        if stream is None:
            return
        ids = m.unpack_ids(delta.ids).tolist()
        text, used = _push(stream, ids, hides_last=_hides_last(stream, ids, delta.finish))
        finish = delta.finish
        if finish is not None and stream.matched is None:
            text += stream.finish()
        if stream.matched is not None:
            if finish is None:
                stop = m.TextStop(rid=delta.rid, choice=delta.choice, n_tokens=stream.count)
                self._outbox.send(stop)
            finish = m.FinishReason("stop", stream.matched)
        if finish is not None:
            del self.streams[key]
        self._batch.append(
            m.TextDelta(
                rid=delta.rid,
                choice=delta.choice,
                ids=m.slice_ids(delta.ids, 0, used),
                finish=finish,
                cached_tokens=delta.cached_tokens,
                completion_tokens=stream.count,
                logprobs=None if delta.logprobs is None else delta.logprobs.head(used),
                prompt_logprobs=delta.prompt_logprobs,
                text=text,
            )
        )


def _hides_last(stream: TextStream, ids: Sequence[int], finish: m.FinishReason | None) -> bool:
    """Whether the last token is the one that ended the choice: it is counted but not shown, unless
    `no_stop_trim` asks for it."""
    if finish is None or finish.type != "stop" or not ids:
        return False
    return ids[-1] == finish.matched and not stream.sampling.no_stop_trim


def _push(stream: TextStream, ids: Sequence[int], *, hides_last: bool) -> tuple[str, int]:
    """The text that is now safe to show, and how many of the tokens were used: all, or those up to
    the end of a stop string."""
    text = ""
    for used, token in enumerate(ids, 1):
        text += stream.push(token, hidden=hides_last and used == len(ids))
        if stream.matched is not None:
            return text, used
    return text, len(ids)
