"""POST /v1/chat/completions."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..messages import Generate, TextDelta
from ..text.choices import FLOOR, Scored, num_scored
from ..text.field_names import CHAT_NAMES
from ..text.machine import Event
from ..text.tools import tool_use
from .chat_request import Conversation, chat_request, template_options
from .http_call import HttpCall
from .json_pieces import Rows
from .logprob_bound import clip_logprobs
from .openai_common import OpenAIAnswer, finish_fields
from .parsed_choice import ParsedChoice
from .prompt_scores import prompt_scores, want_prompt_scores
from .protocol import OPENAI_NAMES, ChatBody
from .submission import new_id


async def chat(call: HttpCall, body: ChatBody) -> None:
    """Renders the conversation, generates, answers. Raises RequestError."""
    sampling = dict(OPENAI_NAMES)
    if body.max_completion_tokens is not None:
        sampling["max_new_tokens"] = "max_completion_tokens"

    def read() -> Conversation:
        use = tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
        continues = body.continue_final_message is True
        return Conversation(messages=body.messages, tools=use, continues=continues)

    options = partial(
        template_options, call.manager, body.chat_template_kwargs, body.reasoning_effort
    )
    request, choices = await chat_request(
        call.manager,
        body,
        read,
        options=options,
        names=CHAT_NAMES._replace(sampling=sampling),
        separate_reasoning=body.separate_reasoning is not False,
        shows_reasoning=body.include_reasoning is not False,
    )
    request.return_logprob = bool(body.logprobs)
    request.top_logprobs = body.top_logprobs or 0
    want_prompt_scores(request, body.prompt_logprobs)
    if body.max_new_tokens is None:
        clip_logprobs(request)
    await ChatAnswer(call, body, request=request, choices=choices).send()


class ChatAnswer(OpenAIAnswer):
    """`chat.completion`, or `chat.completion.chunk` as a stream."""

    def __init__(
        self,
        call: HttpCall,
        body: ChatBody,
        *,
        request: Generate,
        choices: Sequence[ParsedChoice],
    ) -> None:
        super().__init__(
            call,
            body,
            requests=[request],
            name=body.rid or new_id("chatcmpl-"),
            kind="chat.completion.chunk" if body.stream else "chat.completion",
        )
        self._choices = choices
        self._prompt_top = body.prompt_logprobs
        self._reasoning_field = call.manager.args.reasoning_field

    def digest(self, deltas: list[TextDelta]) -> Iterator[object]:
        """Parses the choices."""
        for choice, delta in zip(self._choices, deltas, strict=True):
            yield from choice.take(delta)

    def whole(self, deltas: list[TextDelta]) -> dict[str, Any]:
        """With the scores of the prompt, which all choices have in common."""
        answer = super().whole(deltas)
        if self._prompt_top is not None:
            scores = self.submission.prompt_logprobs.get(0)
            answer["prompt_logprobs"] = prompt_scores(scores, self._prompt_top, self.tokenizer)
        return answer

    def choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """The message and its log-probabilities."""
        return {
            "message": self._choices[index].message.as_openai(self._reasoning_field),
            "logprobs": self._logprobs(delta),
            **self._finish(index, delta),
        }

    def chunks(self, index: int, delta: TextDelta, first: bool) -> Iterator[dict[str, Any] | None]:
        """The role alone, then what comes, then the finish reason alone."""
        if first:
            yield _chunk({"role": "assistant", "content": ""})
        logprobs = self._logprobs(delta)
        num_calls = len(self._choices[index].message.calls)
        for events in self._choices[index].take(delta):
            for event in events:
                if event.kind == "call":
                    num_calls += 1
                yield {**_chunk(self._delta(event, num_calls - 1)), "logprobs": logprobs}
                logprobs = None
            yield None
        if logprobs and logprobs["content"]:
            yield {**_chunk({"content": ""}), "logprobs": logprobs}
        if delta.finish is not None:
            yield {**_chunk({}), **self._finish(index, delta)}

    def text_frames(self, index: int, delta: TextDelta) -> bytes:
        """See OpenAIAnswer."""
        if self._choices[index].is_parsed:
            return b"".join(self._parsed_frames(index, delta))
        return self.text_frame(index, "content", delta.text) if delta.text else b""

    def _parsed_frames(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        choice = self._choices[index]
        num_calls = len(choice.message.calls)
        for events in choice.take(delta):
            for event in events:
                if event.kind in ("content", "reasoning"):
                    yield self.text_frame(index, event.kind, event.text)
                    continue
                if event.kind == "call":
                    num_calls += 1
                yield self.chunk_frame(index, _chunk(self._delta(event, num_calls - 1)))

    def text_chunk(self, kind: str, text: str) -> dict[str, Any]:
        """See OpenAIAnswer."""
        field = self._reasoning_field if kind == "reasoning" else "content"
        return _chunk({field: text})

    def _delta(self, event: Event, call: int) -> dict[str, Any]:
        """An event as a delta; `call` is the number of the call that it belongs to."""
        if event.kind == "content":
            return {"content": event.text}
        if event.kind == "reasoning":
            return {self._reasoning_field: event.text}
        if event.kind == "arguments":
            return {"tool_calls": [{"index": call, "function": {"arguments": event.text}}]}
        function = {"name": event.text, "arguments": ""}
        entry = {"index": call, "id": event.call_id, "type": "function", "function": function}
        return {"tool_calls": [entry]}

    def _finish(self, index: int, delta: TextDelta) -> dict[str, Any]:
        fields = finish_fields(delta.finish)
        if fields["finish_reason"] == "stop" and self._choices[index].has_calls:
            # What the client gave to stop at may have cut the last call.
            if self._choices[index].message.calls[-1].is_whole:
                fields["finish_reason"] = "tool_calls"
        return fields

    def usage_details(self) -> dict[str, Any]:
        """The tokens of the reasoning, where the model's can be found."""
        if not self.call.manager.format.has_reasoning:
            return {}
        tokens = sum(choice.reasoning_tokens for choice in self._choices)
        return {"completion_tokens_details": {"reasoning_tokens": tokens}}

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        if not self.requests[0].return_logprob:
            return None
        entries = (self._logprob(entry, shown) for entry, shown in self.scored_output(delta))
        return {"content": Rows(entries, num_scored(delta.logprobs))}

    def _logprob(self, entry: Scored, shown: bytes) -> dict[str, Any]:
        value = FLOOR if entry.logprob is None else entry.logprob
        return {
            **self._token(entry.token, value, shown),
            "top_logprobs": [
                self._token(token, value, self.shown(token)) for token, value in entry.top
            ],
        }

    def _token(self, token: int, logprob: float, shown: bytes) -> dict[str, Any]:
        return {
            "token": self.tokenizer.id_to_text(token),
            "logprob": logprob,
            "bytes": list(shown),
        }


def _chunk(delta: dict[str, Any]) -> dict[str, Any]:
    return {"delta": delta, "logprobs": None, **finish_fields(None)}
