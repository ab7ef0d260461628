"""POST /v1/responses: OpenAI's API for agents, without state between calls."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from ..messages import Generate, TextDelta
from ..text.answer_parser import is_json
from ..text.machine import Event
from .chat_request import chat_request, template_options
from .http_call import HttpCall
from .parsed_choice import ParsedChoice
from .protocol import ResponsesBody
from .responses_input import NAMES, read_responses
from .single_answer import SingleAnswer
from .submission import new_id


async def responses(call: HttpCall, body: ResponsesBody) -> None:
    """Answers the input. Raises RequestError."""
    effort = None if body.reasoning is None else body.reasoning.effort
    request, choices = await chat_request(
        call.manager,
        body,
        lambda: read_responses(body),
        options=partial(
            template_options, call.manager, body.chat_template_kwargs, effort, names=NAMES
        ),
        names=NAMES,
    )
    await ResponsesAnswer(call, body, request=request, choice=choices[0]).send()


class ResponsesAnswer(SingleAnswer):
    """`response`, or the events that make one. A block is an item of its output."""

    def __init__(
        self, call: HttpCall, body: ResponsesBody, *, request: Generate, choice: ParsedChoice
    ) -> None:
        name = body.rid or new_id("resp_")
        super().__init__(call, body, request=request, choice=choice, name=name)
        self._output: list[dict[str, Any]] = []
        self._text: list[str] = []  # of the open block
        self._sequence = 0
        self._response = self._empty(body, request)

    def _empty(self, body: ResponsesBody, request: Generate) -> dict[str, Any]:
        form = None if body.text is None else body.text.format
        reasoning = body.reasoning
        shown_format: dict[str, Any] = {"type": "text"}
        if form is not None:
            fields = {name: getattr(form, name) for name in form.__struct_fields__}
            shown_format = {name: value for name, value in fields.items() if value is not None}
        return {
            "id": self.name,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": request.sampling.max_new_tokens,
            "metadata": {},
            "model": self.call.manager.model_name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
            "store": False,
            "temperature": request.sampling.temperature,
            "text": {"format": shown_format},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": request.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def start(self) -> Iterator[dict[str, Any]]:
        """The response before there is anything of it."""
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=dict(self._response))

    def open_block(self, event: Event) -> Iterator[dict[str, Any]]:
        """An item, and the part of it that will have the text."""
        self._text = []
        item = _new_item(event)
        self._output.append(item)
        yield self._event("response.output_item.added", item=item, output_index=self._index)
        if event.kind != "call":
            part = _part(event.kind, "")
            yield self._event("response.content_part.added", part=part, **self._place())

    def extend_block(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """More of the text, or of the arguments."""
        self._text.append(text)
        if kind == "call":
            name = "response.function_call_arguments.delta"
            yield self._event(name, delta=text, item_id=self._item["id"], output_index=self._index)
        elif kind == "content":
            name = "response.output_text.delta"
            yield self._event(name, delta=text, logprobs=[], **self._place())
        else:
            yield self._event("response.reasoning_text.delta", delta=text, **self._place())

    def close_block(self, kind: str, *, is_cut: bool = False) -> Iterator[dict[str, Any]]:
        """The item as it is now."""
        text = "".join(self._text)
        item = self._item
        is_whole = is_json(text) if kind == "call" else not is_cut
        status = "completed" if is_whole else "incomplete"
        if kind == "call":
            done = {**item, "arguments": text, "status": status}
            yield self._event(
                "response.function_call_arguments.done",
                arguments=text,
                name=item["name"],
                item_id=item["id"],
                output_index=self._index,
            )
        else:
            part = _part(kind, text)
            done = {**item, "content": [part], "status": status}
            if kind == "content":
                yield self._event(
                    "response.output_text.done", text=text, logprobs=[], **self._place()
                )
            else:
                yield self._event("response.reasoning_text.done", text=text, **self._place())
            yield self._event("response.content_part.done", part=part, **self._place())
        self._output[-1] = done
        yield self._event("response.output_item.done", item=done, output_index=self._index)

    def end(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        """The whole response."""
        assert delta.finish is not None
        status = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
        self._response["status"] = status[delta.finish.type]
        if delta.finish.type == "length":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response["output"] = self._output
        self._response["usage"] = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.parsed.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.call.warnings:
            self._response["warnings"] = self.call.warnings
        name = "incomplete" if delta.finish.type == "length" else "completed"
        yield self._event(f"response.{name}", response=self._response)

    def result(self) -> dict[str, Any]:
        """The whole response."""
        return self._response

    @property
    def _item(self) -> dict[str, Any]:
        return self._output[-1]

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    def _place(self) -> dict[str, Any]:
        """Where a part of text is."""
        return {
            "item_id": self._item["id"],
            "output_index": self._index,
            "content_index": 0,
        }

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        number = self._sequence
        self._sequence += 1
        return {"type": name, "sequence_number": number, **fields}


def _new_item(event: Event) -> dict[str, Any]:
    """An item before it has text."""
    if event.kind == "call":
        return {
            "type": "function_call",
            "id": new_id("fc_"),
            "call_id": event.call_id,
            "name": event.text,
            "arguments": "",
            "status": "in_progress",
        }
    if event.kind == "reasoning":
        return {
            "type": "reasoning",
            "id": new_id("rs_"),
            "summary": [],
            "content": [],
            "encrypted_content": None,
            "status": "in_progress",
        }
    return {
        "type": "message",
        "id": new_id("msg_"),
        "role": "assistant",
        "content": [],
        "status": "in_progress",
    }


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
