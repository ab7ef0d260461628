"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from ..errors import refusal
from ..messages import Generate, TextDelta
from ..text.machine import Event
from .anthropic_input import NAMES, read_messages_body
from .chat_request import chat_prompt, chat_request, template_options
from .http_call import HttpCall
from .parsed_choice import ParsedChoice
from .protocol import CountBody, MessagesBody, TemplateOptions
from .single_answer import SingleAnswer
from .submission import new_id
from .tokenizer_manager import TokenizerManager


async def messages(call: HttpCall, body: MessagesBody) -> None:
    """Answers the conversation. Raises RequestError."""
    request, choices = await chat_request(
        call.manager,
        body,
        lambda: read_messages_body(body),
        options=partial(_options, call.manager, body),
        names=NAMES,
        budget=None if body.thinking is None else body.thinking.budget_tokens,
    )
    await MessagesAnswer(call, body, request=request, choice=choices[0]).send()


async def count_tokens(call: HttpCall, body: CountBody) -> None:
    """How many tokens the conversation has as a prompt. Raises RequestError."""
    prompt, _ = await chat_prompt(
        call.manager,
        lambda: read_messages_body(body),
        options=partial(_options, call.manager, body),
        names=NAMES,
    )
    await call.answer({"input_tokens": len(prompt.ids)})


def _options(manager: TokenizerManager, body: CountBody, with_tools: bool) -> dict[str, Any]:
    """Variables of the chat template: thinking is turned on or off where it can be. Raises
    RequestError."""
    given = body.chat_template_kwargs or TemplateOptions()
    thinking = body.thinking
    if thinking is not None:
        if thinking.type == "disabled":
            given = msgspec.structs.replace(given, enable_thinking=False)
        elif not manager.format.has_reasoning:
            message = "this model's reasoning cannot be told from its answer"
            raise refusal("unsupported_parameter", message, "thinking")
        elif "enable_thinking" in manager.text.template_variables(with_tools=with_tools):
            given = msgspec.structs.replace(given, enable_thinking=True)
    effort = None if body.output_config is None else body.output_config.effort
    return template_options(manager, given, effort, with_tools, names=NAMES)


class MessagesAnswer(SingleAnswer):
    """`message`, or the events that make one. A block is a content block."""

    def __init__(
        self, call: HttpCall, body: MessagesBody, *, request: Generate, choice: ParsedChoice
    ) -> None:
        name = body.rid or new_id("msg_")
        super().__init__(call, body, request=request, choice=choice, name=name)
        self._content: list[dict[str, Any]] = []
        self._text: list[str] = []  # of the open block
        self._message: dict[str, Any] = {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": call.manager.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def start(self) -> Iterator[dict[str, Any]]:
        """The message before there is anything of it."""
        message = {**self._message, "usage": {**self._usage(), "output_tokens": 0}}
        yield {"type": "message_start", "message": message}

    def open_block(self, event: Event) -> Iterator[dict[str, Any]]:
        """An empty block."""
        self._text = []
        block: dict[str, Any] = {"type": "text", "text": ""}
        if event.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif event.kind == "call":
            block = {"type": "tool_use", "id": event.call_id, "name": event.text, "input": {}}
        self._content.append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def extend_block(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """More of the text, or of the input."""
        self._text.append(text)
        delta = {"type": "text_delta", "text": text}
        if kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": text}
        elif kind == "call":
            delta = {"type": "input_json_delta", "partial_json": text}
        yield {"type": "content_block_delta", "index": self._index, "delta": delta}

    def close_block(self, kind: str, *, is_cut: bool = False) -> Iterator[dict[str, Any]]:
        """The end of the block."""
        text = "".join(self._text)
        block = dict(self._content[-1])
        if kind == "call":
            block["input"] = _input(text)
        else:
            block[str(block["type"])] = text
        self._content[-1] = block
        yield {"type": "content_block_stop", "index": self._index}

    def end(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """Why it ended, and the usage."""
        self._message["content"] = self._content
        self._message.update(self._stop(delta))
        self._message["usage"] = self._usage()
        event: dict[str, Any] = {
            "type": "message_delta",
            "delta": self._stop(delta),
            "usage": self._usage(),
        }
        if self.call.warnings:
            event["warnings"] = self.call.warnings
        yield event
        yield {"type": "message_stop"}

    def result(self) -> dict[str, Any]:
        """The whole message."""
        return self._message

    @property
    def _index(self) -> int:
        return len(self._content) - 1

    def _stop(self, delta: TextDelta) -> dict[str, Any]:
        assert delta.finish is not None
        if delta.finish.type == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(delta.finish.matched, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": delta.finish.matched}
        reason = "tool_use" if self.parsed.has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """Tokens that the cache gave are not counted as input, as in Anthropic's API."""
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached_tokens,
            "output_tokens": self.completion_tokens,
        }


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; a text that is no JSON object, as of an answer that was cut, stands
    as `raw_arguments`."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"raw_arguments": arguments}
