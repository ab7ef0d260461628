"""From a conversation to a request: what the routes that answer one share."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..errors import refusal
from ..messages import Generate
from ..text.conversation import ChatMessage, check_last, template_messages
from ..text.tokenizer import ChatPrompt
from ..text.tools import ToolUse
from .parsed_choice import ParsedChoice
from .protocol import Sampling, TemplateOptions
from .request_rules import new_request
from .tokenizer_manager import TokenizerManager

_BUDGET = "thinking.budget_tokens"  # the one field that gives a budget


class Conversation(NamedTuple):
    """What a model is told. `tools`: None where it is to call none. `continues`: the answer goes on
    with the last message."""

    messages: Sequence[ChatMessage]
    tools: ToolUse | None
    continues: bool = False


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
    param: str,
) -> tuple[ChatPrompt, ToolUse | None]:
    """The prompt of a conversation, which `read` gives on another thread, and its tools. `param` is
    what the route calls the conversation. Raises RequestError."""
    tools: ToolUse | None = None
    variables: dict[str, Any] = {}
    final = ""

    def told() -> list[dict[str, Any]]:
        nonlocal tools, final
        messages, tools, continues = read()
        checked_tools(manager, tools)
        variables.update(options(tools is not None))
        if tools is not None:
            variables["tools"] = tools.for_template()
        if not messages:
            raise refusal("empty_input", "there is no text", param)
        shown = template_messages(messages)
        check_last(shown, continues=continues, param=param)
        if continues:
            manager.format.require_continuing()
            variables["continue_final_message"] = True
            final = shown[-1]["content"]
        return shown

    prompt = await manager.text.encode_chat(told, variables)
    return prompt._replace(final=final), tools


async def chat_request(
    manager: TokenizerManager,
    body: Sampling,
    read: Callable[[], Conversation],
    *,
    options: Options,
    names: Mapping[str, str],
    param: str = "messages",
    separate_reasoning: bool = True,
    shows_reasoning: bool = True,
    budget: int | None = None,
) -> ChatRequest:
    """The request of a conversation; arguments of `chat_prompt`, and `names`: see `new_request`.
    `budget`: tokens of its reasoning at most, the field _BUDGET. Raises RequestError."""
    prompt, tools = await chat_prompt(manager, read, options=options, param=param)
    kept = manager.format.keep_special(tools, reasoning=separate_reasoning)
    body.keep_special = [*body.keep_special, *kept]
    request = new_request(manager.rules, body, prompt.ids, param=param, names=names)
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
) -> dict[str, Any]:
    """Variables for the chat template; `effort` comes before that in `given`. One that the template
    of a conversation with tools, or without, does not know is refused unless it asks for what
    happens anyway."""
    values = msgspec.structs.asdict(given or TemplateOptions())
    if effort:
        values["reasoning_effort"] = effort
    known = manager.text.template_variables(with_tools=with_tools)
    options = {}
    for name, value in values.items():
        if name in known:
            if value is not None:
                options[name] = value
        elif value not in (None, False, "none"):
            raise refusal(
                "unsupported_parameter", f"this model's chat template has no {name}", name
            )
    return options


def checked_tools(manager: TokenizerManager, use: ToolUse | None) -> ToolUse | None:
    """`use` if this model can be told of tools. Raises RequestError."""
    name = manager.args.chat_template or f"of {manager.model_name}"
    manager.format.require(use, name)
    return use
