"""POST /tokenize and /detokenize."""

from itertools import chain
from typing import Any

import numpy as np

from ..errors import refusal
from ..sampling_params import Ids
from ..text.conversation import check_last, template_messages
from ..text.tools import tool_use
from .body_decoder import is_one_prompt
from .chat_request import checked_tools, template_options
from .http_call import HttpCall
from .json_pieces import Rows
from .protocol import DetokenizeBody, TokenizeBody, check_continuing, require_one_of
from .tokenizer_manager import TokenizerManager

_FEW = 4096  # token ids that are encoded at once
_OF_PROMPTS = ("add_special_tokens",)
_OF_MESSAGES = (
    "add_generation_prompt",
    "chat_template_kwargs",
    "continue_final_message",
    "tools",
)


async def tokenize(call: HttpCall, body: TokenizeBody) -> None:
    """Exactly the ids that the chat or the completions route would run. Raises RequestError."""
    manager = call.manager
    kind = require_one_of(body, "prompt", "messages")
    for name in _OF_MESSAGES if kind == "prompt" else _OF_PROMPTS:
        if getattr(body, name) is not None:
            raise refusal("invalid_combination", f"{name} does nothing with {kind}", name)
    lists = await _ids(manager, body)
    counts = [len(ids) for ids in lists]
    listed = isinstance(body.prompt, list)
    tokens = Rows((_id_rows(ids) for ids in lists), len(lists)) if listed else _id_rows(lists[0])
    await call.answer_in_pieces(
        {
            "tokens": tokens,
            "count": counts if listed else counts[0],
            "max_model_len": manager.limits.context_length,
        }
    )


def _id_rows(ids: Ids) -> list[int] | Rows:
    """Ids of a text, of which there may be millions, in a form that is encoded in pieces."""
    array = np.asarray(ids)
    if len(array) <= _FEW:
        return array.tolist()
    parts = (array[start : start + _FEW].tolist() for start in range(0, len(array), _FEW))
    return Rows(chain.from_iterable(parts), len(array))


async def _ids(manager: TokenizerManager, body: TokenizeBody) -> list[Ids]:
    if body.messages is None:
        special_tokens = body.add_special_tokens is not False
        return await manager.text.encode(body.prompt or [], "prompt", special_tokens)
    check_continuing(body.continue_final_message, body.add_generation_prompt)
    use = checked_tools(manager, tool_use(body.tools, "auto"))
    options = template_options(manager, body.chat_template_kwargs, None, use is not None)
    options["add_generation_prompt"] = body.add_generation_prompt is not False
    if use is not None:
        options["tools"] = use.for_template()
    messages = body.messages
    continues = body.continue_final_message is True
    if continues:
        manager.format.require_continuing()
        options["continue_final_message"] = True

    def shown() -> list[dict[str, Any]]:
        found = template_messages(messages)
        if continues:
            check_last(found, continues=True, param="messages")
        return found

    prompt = await manager.text.encode_chat(shown, options, "messages")
    return [prompt.ids]


async def detokenize(call: HttpCall, body: DetokenizeBody) -> None:
    """The text of a list of ids, or of each of several. Raises RequestError."""
    manager = call.manager
    lists = await manager.text.encode(body.tokens, "tokens")
    texts = await manager.text.decode(lists, body.skip_special_tokens)
    await call.answer({"text": texts[0] if is_one_prompt(body.tokens) else texts})
