"""FieldNames: what a route calls the fields of a conversation."""

from typing import NamedTuple

from ..sampling_params import NO_NAMES, Names


class FieldNames(NamedTuple):
    """What errors call the fields that the chat and other routes call differently.

    `messages`: the conversation. `tool_name` and `tool_parameters` follow the place of a tool,
    `call_id` that of the result of a call. `effort`: that of the reasoning. `sampling`: those of
    SamplingParams."""

    messages: str = "messages"
    tool_name: str = "function.name"
    tool_parameters: str = "function.parameters"
    call_id: str = "tool_call_id"
    effort: str = "reasoning_effort"
    sampling: Names = NO_NAMES


CHAT_NAMES = FieldNames()
