"""From a conversation to a request: what the routes that answer one share."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ..errors import refusal
from ..messages import Generate
from ..text.conversation import ChatMessage, check_last, template_messages
from ..text.field_names import CHAT_NAMES, FieldNames
from ..text.tokenizer import ChatPrompt
from ..text.tools import ToolUse
from .parsed_choice import ParsedChoice
from .protocol import Sampling, TemplateOptions
from .request_rules import new_request
from .tokenizer_manager import TokenizerManager

_BUDGET = "thinking.budget_tokens"  # the one field that gives a budget


class Conversation(NamedTuple):
    """What a model is told. `tools`: None where it is to call none. `continues`: the answer goes on
    with the last message. `places`: where in a body each message stands; None: they are a
    list of the body."""

    messages: Sequence[ChatMessage]
    tools: ToolUse | None
    continues: bool = False
    places: Sequence[str] | None = None


# The variables for the chat template of a conversation, which has tools or none; on any thread.
# Raises RequestError.
Options = Callable[[bool], dict[str, Any]]


class ChatRequest(NamedTuple):
    """A request that fits, and how its choices are read."""

    request: Generate
    choices: list[ParsedChoice]


async def chat_prompt(
    manager: TokenizerManager,
    read: Callable[[], Conversation],
    *,
    options: Options,
    names: FieldNames,
) -> tuple[ChatPrompt, ToolUse | None]:
    """The prompt of a conversation, which `read` gives on another thread, and its tools. `names`
    are what the route calls its fields. Raises RequestError."""
    tools: ToolUse | None = None
    variables: dict[str, Any] = {}
    final = ""

    def told() -> list[dict[str, Any]]:
        nonlocal tools, final
        conversation = read()
        tools = conversation.tools
        checked_tools(manager, tools)
        variables.update(options(tools is not None))
        if tools is not None:
            variables["tools"] = tools.for_template()
        if not conversation.messages:
            raise refusal("empty_input", "there is no text", names.messages)
        shown = template_messages(conversation.messages, names, conversation.places)
        check_last(shown, continues=conversation.continues, param=names.messages)
        if conversation.continues:
            manager.format.require_continuing()
            variables["continue_final_message"] = True
            final = shown[-1]["content"]
        return shown

    prompt = await manager.text.encode_chat(told, variables, names.messages)
    return prompt._replace(final=final), tools


async def chat_request(
    manager: TokenizerManager,
    body: Sampling,
    read: Callable[[], Conversation],
    *,
    options: Options,
    names: FieldNames,
    separate_reasoning: bool = True,
    shows_reasoning: bool = True,
    budget: int | None = None,
) -> ChatRequest:
    """The request of a conversation; arguments of `chat_prompt`, and `budget`: tokens of its
    reasoning at most, the field _BUDGET. Raises RequestError."""
    prompt, tools = await chat_prompt(manager, read, options=options, names=names)
    kept = manager.format.keep_special(tools, reasoning=separate_reasoning)
    body.keep_special = [*body.keep_special, *kept]
    request = new_request(
        manager.rules, body, prompt.ids, param=names.messages, names=names.sampling
    )
    if tools is not None or request.constraint is not None:
        # Schemas of a hundred tools take their time.
        request.constraint = await asyncio.to_thread(
            manager.format.constraint,
            prompt,
            tools,
            request.constraint,
            ignore_eos=request.sampling.ignore_eos,
        )
    if budget is not None and budget < (request.sampling.max_new_tokens or 0):
        request.constraint = manager.format.budgeted(
            request.constraint, prompt, budget, param=_BUDGET
        )
    choices = []
    for _ in range(request.sampling.n):
        parser = manager.format.parser(
            prompt, tools, reasoning=separate_reasoning, shows_reasoning=shows_reasoning
        )
        choices.append(ParsedChoice(parser, manager.text.tokenizer))
    return ChatRequest(request=request, choices=choices)


def template_options(
    manager: TokenizerManager,
    given: TemplateOptions | None,
    effort: str | None,
    with_tools: bool,
    *,
    names: FieldNames = CHAT_NAMES,
) -> dict[str, Any]:
    """Variables for the chat template; `effort` comes before that in `given`. One that the template
    of a conversation with tools, or without, does not know is refused unless it asks for what
    happens anyway; the error calls it what `names` say."""
    values = msgspec.structs.asdict(given or TemplateOptions())
    places = {name: f"chat_template_kwargs.{name}" for name in values}
    if effort:
        values["reasoning_effort"] = effort
        places["reasoning_effort"] = names.effort
    known = manager.text.template_variables(with_tools=with_tools)
    options = {}
    for name, value in values.items():
        if name in known:
            if value is not None:
                options[name] = value
        elif value not in (None, False, "none"):
            message = f"{places[name]}: this model's chat template has no {name}"
            raise refusal("unsupported_parameter", message, places[name])
    return options


def checked_tools(manager: TokenizerManager, use: ToolUse | None) -> ToolUse | None:
    """`use` if this model can be told of tools. Raises RequestError."""
    name = manager.args.chat_template or f"of {manager.model_name}"
    manager.format.require(use, name)
    return use
