"""The text of one choice, token by token: from ids to text that may be shown, and stop strings."""

import codecs
from collections.abc import Sequence

from ..sampling_params import SamplingParams
from .tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one choice, token by token, exact to the byte:

        token -> bytes -> incremental UTF-8 -> held tail -> text that may be shown

    `matched` names the stop string that was found; nothing may be pushed after that. Of several
    stop strings the one that is complete first wins, at equal ends the longest. Text of the first
    `min_new_tokens` tokens never counts towards a stop. `count` is the number of tokens pushed.

    `context` are the last tokens of the prompt, which may have cut a character. Without a tokenizer
    all text is empty."""

    # Bytes of an incomplete character stay in the UTF-8 decoder; text that may begin a stop string
    # stays in the tail. What is shown depends on the tokens alone, never on their grouping into
    # messages. Work per token is bounded by the longest stop string.

    def __init__(
        self, tokenizer: Tokenizer | None, sampling: SamplingParams, context: Sequence[int]
    ) -> None:
        self.count = 0
        self.matched: str | None = None
        self.sampling = sampling
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._prefixes = {stop[:k] for stop in sampling.stop for k in range(1, len(stop))}
        self._longest = max((len(stop) for stop in sampling.stop), default=0)
        self._tail = ""
        for token in context:
            self._utf8.decode(self._bytes(token))
        self._within_character = bool(self._utf8.getstate()[0])  # the decoder holds bytes back
        self._cut_prompt = self._within_character
        self._shows_all = not sampling.stop and not self._cut_prompt  # whole characters, at once

    def push(self, token: int, hidden: bool = False) -> str:
        """The text that is now safe to show. A `hidden` token counts and shows nothing."""
        self.count += 1
        if hidden:
            return self._show(self._utf8.decode(b""))
        if self._tokenizer is None:
            return ""
        if not self._within_character:
            text = self._tokenizer.whole_text(token)
            if text:
                return text if self._shows_all else self._show(text)
        raw = self._bytes(token)
        text = self._show(self._utf8.decode(raw))
        self._within_character = bool(self._utf8.getstate()[0])
        if not raw:
            text += self._end_by_special(token)
        return text

    def finish(self) -> str:
        """The rest: incomplete bytes as U+FFFD, and the held tail. May still find a stop."""
        text = self._show(self._utf8.decode(b"", True))
        return text if self.matched is not None else text + self._tail

    def _bytes(self, token: int) -> bytes:
        if self._tokenizer is None:
            return b""
        if self.sampling.hides(token, self._tokenizer.special_ids):
            return b""
        return self._tokenizer.id_to_bytes(token)

    def _end_by_special(self, token: int) -> str:
        """A special token is not shown, and yet ends the choice if its name is a stop string."""
        if self._tokenizer is None or self.count <= self.sampling.min_new_tokens:
            return ""
        name = self._tokenizer.id_to_text(token)
        if name not in self.sampling.stop:
            return ""
        text = self.finish()
        if self.sampling.no_stop_trim:
            text += name
        self.matched = name
        return text

    def _show(self, text: str) -> str:
        """What may be shown of the text so far held back and `text`."""
        if self._cut_prompt and text:
            # Bytes that the prompt left open and the output did not complete belong to the prompt.
            self._cut_prompt = False
            self._shows_all = not self.sampling.stop
            text = text.removeprefix(_REPLACEMENT)
        if not self.sampling.stop or self.count <= self.sampling.min_new_tokens:
            return text
        text = self._tail + text
        end = self._find_stop(text)
        if end is not None:
            return text[:end]
        held = self._held_length(text)
        self._tail = text[len(text) - held :]
        return text[: len(text) - held]

    def _find_stop(self, text: str) -> int | None:
        """Where the shown text ends, or None. Sets `matched`."""
        found = []
        for stop in self.sampling.stop:
            start = text.find(stop)
            if start >= 0:
                found.append((start + len(stop), start, stop))
        if not found:
            return None
        end, start, self.matched = min(found)
        return end if self.sampling.no_stop_trim else start

    def _held_length(self, text: str) -> int:
        """How many characters at the end may begin a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0
