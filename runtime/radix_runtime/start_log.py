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
    takes_text: bool = True,
    info: Mapping[str, Any],
) -> Iterator[str]:
    """The lines of the start log. `name` is what clients call the model; `size` is None for random
    weights; `takes_text` is false where there is no tokenizer; `info` is what the processes have
    reported (`engine/facts.py`)."""
    parameters = "random weights"
    if size is not None and config.quantization is None:
        parameters = f"{_count(size.parameters)} parameters"
    elif size is not None:  # codes are packed: their number says little
        parameters = f"files of {_bytes(size.bytes)}"
    held_in = info["dtype"] if quantization is None else f"{quantization} and {info['dtype']}"
    yield f"serving {name}: {config.architecture}, {parameters}, {held_in}"
    device = info["device_name"] or f"{info['isa']}, {info['num_threads']} threads"
    yield (
        f"on {info['device']} ({device}), attention {info['attention_backend']}, "
        f"weights {_bytes(info['weight_bytes'])}, "
        f"KV cache {_bytes(info['kv_cache_bytes'])} = {info['max_total_num_tokens']} tokens "
        f"in pages of {info['page_size']}, context {info['max_context']}, "
        f"{info['max_running_requests']} requests and {_step(info['chunked_prefill_size'])} a step"
    )
    if info["device_name"] is not None:
        yield (
            f"GPU memory in GiB: weights {_gib(info['weight_bytes'])}, "
            f"KV cache {_gib(info['kv_cache_bytes'])}, steps and their {info['cuda_graphs']} CUDA "
            f"graphs {_gib(info['step_bytes'])}, free {_gib(info['free_bytes'])}"
        )
    if info["cuda_graphs"]:
        yield (
            f"captured: decode steps of up to {info['captured_rows']} rows, steps with prompts of "
            f"up to {info['captured_tokens']} tokens"
        )
    if info["has_chat_template"]:
        yield info["answer_format"]
    yield f"try: {_example(name, url, takes_text=takes_text, is_chat=info['has_chat_template'])}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def _step(tokens: int) -> str:
    return "whole prompts" if tokens == -1 else f"{tokens} tokens"


def _example(name: str, url: str, *, takes_text: bool, is_chat: bool) -> str:
    body: dict[str, Any]
    if not takes_text:
        path = "/generate"
        body = {"input_ids": [1, 2, 3]}
    elif is_chat:
        path = "/v1/chat/completions"
        body = {"model": name, "messages": [{"role": "user", "content": "Hello"}]}
    else:
        path = "/v1/completions"
        body = {"model": name, "prompt": "Hello"}
    header = "Content-Type: application/json"
    return f"curl {url}{path} -H '{header}' -d '{json.dumps(body)}'"


def _count(number: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M")):
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return str(number)


def _bytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
