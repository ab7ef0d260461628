"""POST /v1/chat/completions."""

from collections.abc import Iterator
from typing import Any

from ..errors import refusal
from ..messages import Generate, TextDelta
from ..text.choices import FLOOR, Scored, num_scored
from ..text.conversation import template_messages
from .answer import clip_logprobs, new_request, template_options
from .http_call import HttpCall
from .json_pieces import Rows
from .openai_common import OpenAIAnswer, finish_fields
from .protocol import OPENAI_NAMES, ChatBody
from .tokenizer_manager import new_id


async def chat(call: HttpCall, body: ChatBody) -> None:
    """Renders the conversation, generates, answers. Raises RequestError."""
    manager = call.manager
    options = template_options(manager, body.chat_template_kwargs, body.reasoning_effort)
    messages = template_messages(body.messages)
    if body.messages[-1].role == "assistant":
        raise refusal("invalid_value", "the last message must not be the assistant's", "messages")
    names = dict(OPENAI_NAMES)
    if body.max_completion_tokens is not None:
        names["max_new_tokens"] = "max_completion_tokens"
    ids = await manager.encode_chat(messages, **options)
    request = new_request(manager, body, ids, param="messages", names=names)
    request.return_logprob = bool(body.logprobs)
    request.top_logprobs = body.top_logprobs or 0
    if body.max_new_tokens is None:
        clip_logprobs(request)
    await ChatAnswer(call, body, request=request).send()


class ChatAnswer(OpenAIAnswer):
    """`chat.completion`, or `chat.completion.chunk` as a stream."""

    def __init__(self, call: HttpCall, body: ChatBody, *, request: Generate) -> None:
        super().__init__(
            call,
            body,
            requests=[request],
            name=body.rid or new_id("chatcmpl-"),
            kind="chat.completion.chunk" if body.stream else "chat.completion",
        )

    def choice(self, index: int, delta: TextDelta) -> dict[str, Any]:
        """The message and its log-probabilities."""
        return {
            "message": {"role": "assistant", "content": delta.text},
            "logprobs": self._logprobs(delta),
        }

    def chunks(self, index: int, delta: TextDelta, first: bool) -> Iterator[dict[str, Any]]:
        """The role alone, then content, then the finish reason alone."""
        if first:
            yield _chunk({"role": "assistant", "content": ""})
        logprobs = self._logprobs(delta)
        if delta.text or (logprobs and logprobs["content"]):
            yield {**_chunk({"content": delta.text}), "logprobs": logprobs}
        if delta.finish is not None:
            yield {**_chunk({}), **finish_fields(delta.finish)}

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
