"""POST /v1/completions."""

import codecs
from collections.abc import Iterator
from typing import Any

from ..messages import Generate, Logprobs, TextDelta
from ..text.choices import FLOOR, Scored, num_scored, scored
from .http_call import HttpCall
from .json_pieces import Rows
from .openai_common import OpenAIAnswer, finish_fields
from .prompt_requests import completion_requests
from .prompt_scores import prompt_scores
from .protocol import CompletionBody
from .submission import new_id
from .turns import in_turns


async def completions(call: HttpCall, body: CompletionBody) -> None:
    """Continues each prompt. Raises RequestError."""
    manager = call.manager
    special_tokens = body.add_special_tokens is not False
    all_ids = await manager.text.encode(body.prompt, "prompt", special_tokens)
    requests: list[Generate] = []
    await in_turns(map(requests.append, completion_requests(manager.rules, body, all_ids)))
    echoed = [""] * len(requests)
    if body.echo:
        echoed = _given_texts(body.prompt) or await manager.text.decode(
            all_ids, requests[0].sampling.skip_special_tokens
        )
    await CompletionAnswer(call, body, requests=requests, echoed=echoed).send()


def _given_texts(prompt: str | list[Any]) -> list[str] | None:
    """The prompts if they were given as text, else None."""
    if isinstance(prompt, str):
        return [prompt]
    return prompt if isinstance(prompt[0], str) else None


class CompletionAnswer(OpenAIAnswer):
    """`text_completion`. `echoed`: the text that is shown before the choices of each prompt."""

    def __init__(
        self,
        call: HttpCall,
        body: CompletionBody,
        *,
        requests: list[Generate],
        echoed: list[str],
    ) -> None:
        super().__init__(
            call,
            body,
            requests=requests,
            name=body.rid or new_id("cmpl-"),
            kind="text_completion",
        )
        self._echoed: list[str] = []  # by choice
        for request, text in zip(requests, echoed, strict=True):
            self._echoed += [text] * request.sampling.n
        self._prompt_top = body.prompt_logprobs
        self._echo_top = body.logprobs if body.echo else None
        self._offsets = [_TextOffset() for _ in self.request_of]

    def choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """The text, after the prompt if it is echoed, and its log-probabilities."""
        choice: dict[str, Any] = {"text": self._echoed[index] + delta.text}
        if self._prompt_top is not None:
            scores = self.submission.prompt_logprobs.get(index)
            choice["prompt_logprobs"] = prompt_scores(scores, self._prompt_top, self.tokenizer)
        choice["logprobs"] = self._logprobs(index, delta)
        return {**choice, **finish_fields(delta.finish)}

    def chunks(self, index: int, delta: TextDelta, first: bool) -> Iterator[dict[str, Any]]:
        """At most one chunk: the new text, with the finish reason if it is the last."""
        text = self._echoed[index] + delta.text if first else delta.text
        logprobs = self._logprobs(index, delta)
        if text or logprobs or delta.finish or first:
            yield {"text": text, "logprobs": logprobs, **finish_fields(delta.finish)}

    def text_frames(self, index: int, delta: TextDelta) -> bytes:
        """See OpenAIAnswer."""
        return self.text_frame(index, "text", delta.text) if delta.text else b""

    def text_chunk(self, kind: str, text: str) -> dict[str, Any]:
        """See OpenAIAnswer."""
        return {"text": text, "logprobs": None, **finish_fields(None)}

    def _logprobs(self, index: int, delta: TextDelta) -> dict[str, Any] | None:
        """Of what `delta` brings, those of the prompt before those of the output."""
        prompt = self.submission.prompt_logprobs.pop(index, None)
        if self._echo_top is None:  # it has been scored for `prompt_logprobs` alone
            prompt = None
        count = num_scored(prompt) + num_scored(delta.logprobs)
        if count == 0:
            return None
        id_to_text = self.tokenizer.id_to_text

        def entries() -> Iterator[Scored]:
            yield from scored(prompt)
            yield from scored(delta.logprobs)

        return {
            "tokens": Rows((id_to_text(entry.token) for entry in entries()), count),
            "token_logprobs": Rows((entry.logprob for entry in entries()), count),
            "top_logprobs": Rows((self._top(entry) for entry in entries()), count),
            "text_offset": Rows(self._text_offsets(index, prompt, delta), count),
        }

    def _text_offsets(self, index: int, prompt: Logprobs | None, delta: TextDelta) -> Iterator[int]:
        offset = self._offsets[index]
        for entry in scored(prompt):
            yield offset.advance(self._echoed_bytes(index, entry.token, offset.position))
        for _, shown in self.scored_output(delta):
            yield offset.advance(shown)

    def _echoed_bytes(self, index: int, token: int, position: int) -> bytes:
        """The bytes of a token of the prompt in the echo, which is at `position`. A special token
        stands there only if the client has written it, or special tokens are shown."""
        raw = self.tokenizer.id_to_bytes(token)
        if token not in self.tokenizer.special_ids:
            return raw
        return raw if self._echoed[index].startswith(raw.decode(), position) else b""

    def _top(self, entry: Scored) -> dict[str, float] | None:
        """The sampled token is always there; of tokens with the same text the likeliest is."""
        if entry.logprob is None:
            return None
        top: dict[str, float] = {}
        # A prompt may have been scored with more for `prompt_logprobs`.
        for token, value in [*entry.top[: self._echo_top], (entry.token, entry.logprob)]:
            text = self.tokenizer.id_to_text(token)
            top[text] = max(value, top.get(text, FLOOR))
        return top


class _TextOffset:
    """Where the next token of a choice begins, in characters of the text that the choice shows."""

    def __init__(self) -> None:
        self.position = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def advance(self, shown: bytes) -> int:
        """The position of a token with these bytes."""
        start = self.position
        self.position += len(self._utf8.decode(shown))
        return start
