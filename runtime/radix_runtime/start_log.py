"""What a server says when it is ready: what is served, on what, how large it is, how to call it."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .checkpoint import CheckpointSize
from .model_config import ModelConfig


def pool_warning(tokens: int, context: int) -> str | None:
    """A sentence where a KV cache of `tokens` tokens is smaller than the model's context."""
    if tokens >= context:
        return None
    return (
        f"the KV cache holds {tokens} tokens, the context is {context}: longer requests are "
        "refused; see --max-total-tokens, --mem-fraction-static and --context-length"
    )


def served_lines(
    name: str,
    url: str,
    *,
    config: ModelConfig,
    size: CheckpointSize | None,
    quantization: str | None,
    info: Mapping[str, Any],
) -> Iterator[str]:
    """The lines of the start log. `name` is what clients call the model; `size` is None for random
    weights; `info` is what the processes have reported (`engine/facts.py`)."""
    parameters = "random weights" if size is None else f"{_count(size.parameters)} parameters"
    held_in = info["dtype"] if quantization is None else f"{quantization} and {info['dtype']}"
    yield f"serving {name}: {config.architecture}, {parameters}, {held_in}"
    device = info["device_name"] or f"{info['isa']}, {info['num_threads']} threads"
    yield (
        f"on {info['device']} ({device}), attention {info['attention_backend']}, "
        f"weights {_bytes(info['weight_bytes'])}, "
        f"KV cache {_bytes(info['kv_cache_bytes'])} = {info['max_total_num_tokens']} tokens "
        f"in pages of {info['page_size']}, context {info['max_context']}"
    )
    yield f"try: {_example(name, url, is_chat=bool(info['has_chat_template']))}"


def _example(name: str, url: str, *, is_chat: bool) -> str:
    body: dict[str, Any] = {"model": name}
    if is_chat:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        path = "/v1/completions"
        body["prompt"] = "Hello"
    header = "Content-Type: application/json"
    return f"curl {url}{path} -H '{header}' -d '{json.dumps(body)}'"


def _count(number: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M")):
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return str(number)


def _bytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
