"""Detokenizer: token deltas in, text deltas out, and the end of a choice by stop string."""

# It runs as a process under `serve` and in the caller's under `Engine`. A choice is known from its
# first delta (which carries `sampling`) to its last; later ones, computed after a stop string ended
# it, are dropped in `_convert`.

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .. import messages as m
from ..channel import Inbox, Outbox
from ..sampling_params import SamplingParams
from .text_stream import TextStream
from .tokenizer import Tokenizer

IDLE_WAIT = 1.0  # seconds between two heartbeats of an idle process


@dataclass(slots=True)
class _Choice:
    """A choice that has begun and not ended."""

    rid: str
    number: int  # of the choice in its request
    stream: int | None  # its number in StreamTokens
    api: int  # the number of the API process that gets its text
    cached_tokens: int
    text: TextStream


class Detokenizer:
    """Turns TokenBatch into TextBatch (to the API) and TextStop (to the scheduler); passes a
    RequestFailed on after all text that came before it. `outbox` routes by type. Without a
    tokenizer all text is empty."""

    def __init__(self, tokenizer: Tokenizer | None, inbox: Inbox, outbox: Outbox) -> None:
        self._tokenizer = tokenizer
        self._inbox = inbox
        self._outbox = outbox
        # The choices that have begun and not ended, by rid and choice, and by the stream's number.
        self._choices: dict[str, dict[int, _Choice]] = {}
        self._streams: dict[int, _Choice] = {}
        self._batches: defaultdict[int, list[m.TextDelta]] = defaultdict(list)  # by API process

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
                if message.tokens is not None:
                    self._convert_tokens(message.tokens)
                for delta in message.deltas:
                    self._convert(delta)
            elif isinstance(message, m.RequestFailed):
                self._fail(message)
            else:
                raise TypeError(f"the detokenizer cannot handle {type(message).__name__}")
        self._flush()
        return bool(messages)

    def _flush(self) -> None:
        for api, deltas in self._batches.items():
            for batch in m.batches(deltas):
                self._outbox.send(m.TextBatch(batch), api)
        self._batches.clear()

    @property
    def num_open(self) -> int:
        """Choices that have begun and not ended."""
        return sum(len(choices) for choices in self._choices.values())

    def _fail(self, message: m.RequestFailed) -> None:
        for choice in list(self._choices.get(message.rid, {}).values()):
            self._forget(choice)
        self._flush()
        self._outbox.send(message, message.api)

    def _begin(self, delta: m.TokenDelta, sampling: SamplingParams) -> None:
        context = m.unpack_ids(delta.input_ids or b"").tolist()
        choice = _Choice(
            rid=delta.rid,
            number=delta.choice,
            stream=delta.stream,
            api=delta.api,
            cached_tokens=delta.cached_tokens,
            text=TextStream(tokenizer=self._tokenizer, sampling=sampling, context=context),
        )
        self._choices.setdefault(delta.rid, {})[delta.choice] = choice
        if delta.stream is not None:
            self._streams[delta.stream] = choice

    def _forget(self, choice: _Choice) -> None:
        siblings = self._choices[choice.rid]
        del siblings[choice.number]
        if not siblings:
            del self._choices[choice.rid]
        if choice.stream is not None:
            del self._streams[choice.stream]

    def _convert_tokens(self, tokens: m.StreamTokens) -> None:
        for stream, packed, ids in tokens:
            choice = self._streams.get(stream)
            if choice is None:
                continue
            if len(ids) == 1:
                self._add(choice, choice.text.push(ids[0]), packed)
            else:
                text, used = _push(choice.text, ids, hides_last=False)
                self._add(choice, text, m.slice_ids(packed, 0, used))

    def _convert(self, delta: m.TokenDelta) -> None:
        if delta.sampling is not None:
            self._begin(delta, delta.sampling)
        choice = self._choices.get(delta.rid, {}).get(delta.choice)
        if choice is None:
            return
        ids = m.unpack_ids(delta.ids).tolist()
        hides_last = _hides_last(choice.text, ids, delta.finish)
        text, used = _push(choice.text, ids, hides_last=hides_last)
        if delta.finish is not None and choice.text.matched is None:
            text += choice.text.finish()
        new = self._add(choice, text, m.slice_ids(delta.ids, 0, used), delta.finish)
        new.logprobs = None if delta.logprobs is None else delta.logprobs.head(used)
        new.prompt_logprobs = delta.prompt_logprobs
        new.queue_seconds = delta.queue_seconds

    def _add(
        self, choice: _Choice, text: str, ids: bytes, finish: m.FinishReason | None = None
    ) -> m.TextDelta:
        """What goes out of a choice: `ids` and the text that they have made final. A stop string
        in it ends the choice; `finish` has ended it."""
        if choice.text.matched is not None:
            if finish is None:
                stop = m.TextStop(rid=choice.rid, choice=choice.number, n_tokens=choice.text.count)
                self._outbox.send(stop)
            finish = m.FinishReason("stop", choice.text.matched)
        if finish is not None:
            self._forget(choice)
        delta = m.TextDelta(
            rid=choice.rid,
            choice=choice.number,
            ids=ids,
            finish=finish,
            cached_tokens=choice.cached_tokens,
            completion_tokens=choice.text.count,
            text=text,
        )
        self._batches[choice.api].append(delta)
        return delta


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
