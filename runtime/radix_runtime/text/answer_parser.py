"""AnswerParser: the text of a choice as reasoning, content and tool calls."""

from collections.abc import Iterable
from typing import Any

import msgspec

from .machine import Event, Parser
from .reasoning import ReasoningParser
from .tool_parsers.base import ToolParser


class AnswerParser:
    """Reasoning first, calls in the rest. Events are those of Parser without markup; every call has
    an id.

    `reasoning` and `tools` may be None: then there is none to be found. Not `is_parallel`: of the
    calls only the first is given. Not `shows_reasoning`: reasoning is left out. Not
    `shows_content`: the answer is calls alone; spaces between them and the beginning of one that
    was cut are left out. `num_begun`: characters that `reasoning` has seen already.

    `in_reasoning`: the text so far ends in reasoning."""

    def __init__(
        self,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        *,
        is_parallel: bool = True,
        shows_reasoning: bool = True,
        shows_content: bool = True,
        num_begun: int = 0,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._is_parallel = is_parallel
        self._hidden = {"markup"}
        if not shows_reasoning:
            self._hidden.add("reasoning")
        if not shows_content:
            self._hidden.add("content")
        self._calls = 0
        self._pushed = num_begun

    @property
    def behind_reasoning(self) -> int | None:
        """How many characters have come behind the reasoning; None if none has ended."""
        end = 0 if self._reasoning is None else self._reasoning.reasoning_end
        return self._pushed - end if end else None

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends in reasoning."""
        return self._reasoning is not None and self._reasoning.in_reasoning

    def push(self, text: str) -> list[Event]:
        """See Parser."""
        self._pushed += len(text)
        if self._reasoning is None:
            return self._kept(_push(self._tools, text))
        return self._kept(self._behind(self._reasoning.push(text)))

    def finish(self) -> list[Event]:
        """See Parser."""
        events = [] if self._reasoning is None else self._behind(self._reasoning.finish())
        if self._tools is not None:
            events += self._tools.finish()
        return self._kept(events)

    def _behind(self, events: Iterable[Event]) -> list[Event]:
        """With the calls that are in the content."""
        found = []
        for event in events:
            if event.kind == "content":
                found += _push(self._tools, event.text)
            else:
                found.append(event)
        return found

    def _kept(self, events: Iterable[Event]) -> list[Event]:
        kept = []
        for event in events:
            if event.kind == "call":
                self._calls += 1
                assert self._tools is not None
                event = event._replace(call_id=event.call_id or self._tools.new_id())
            is_of_call = event.kind in ("call", "arguments")
            if event.kind in self._hidden:
                continue
            if is_of_call and self._calls > 1 and not self._is_parallel:
                continue
            kept.append(event)
        return kept


def content_events(text: str) -> list[Event]:
    """The event of a text that is all content."""
    return [Event(kind="content", text=text, raw=text)] if text else []


def _push(parser: Parser | None, text: str) -> list[Event]:
    return content_events(text) if parser is None else parser.push(text)


def is_json(text: str) -> bool:
    """Whether a text is a JSON value."""
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False
    return True


class ToolCall:
    """A call of a tool; `arguments` is the text that the model wrote, which should be JSON."""

    def __init__(self, call_id: str, name: str) -> None:
        self.id = call_id
        self.name = name
        self._arguments: list[str] = []

    def extend(self, text: str) -> None:
        """More of the arguments."""
        self._arguments.append(text)

    @property
    def arguments(self) -> str:
        """The arguments so far."""
        return "".join(self._arguments)

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are JSON."""
        return is_json(self.arguments)


class AnswerMessage:
    """The message that the events of a choice make."""

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []

    def extend(self, events: Iterable[Event]) -> None:
        """Takes the events that follow."""
        for event in events:
            if event.kind == "content":
                self._content.append(event.text)
            elif event.kind == "reasoning":
                self._reasoning.append(event.text)
            elif event.kind == "call":
                self.calls.append(ToolCall(event.call_id or "", event.text))
            elif event.kind == "arguments":
                self.calls[-1].extend(event.text)

    @property
    def content(self) -> str:
        """The content so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasoning)

    def as_openai(self, reasoning_field: str = "reasoning_content") -> dict[str, Any]:
        """The message as OpenAI's chat has it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message[reasoning_field] = self.reasoning
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return message
