"""A choice in the shape of SGLang's /generate, which `Engine` gives too."""

from collections.abc import Iterable
from typing import Any

from ..messages import FinishReason, Generate, TextDelta, num_ids, unpack_ids
from .choices import scored
from .tokenizer import Tokenizer


def sglang_output(
    request: Generate, delta: TextDelta, seconds: float, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The choice as far as `delta` has it, in the shape of SGLang's /generate. `tokenizer`:
    logprobs also give the text of tokens."""
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": None if delta.finish is None else _finish_reason(delta, delta.finish),
        "prompt_tokens": num_ids(request.input_ids),
        "completion_tokens": delta.completion_tokens,
        "cached_tokens": delta.cached_tokens,
        "e2e_latency": seconds,
        "weight_version": "default",
    }
    if request.return_logprob:
        for side, logprobs in (("input", delta.prompt_logprobs), ("output", delta.logprobs)):
            entries = scored(logprobs)
            own = [(entry.token, entry.logprob) for entry in entries]
            meta[f"{side}_token_logprobs"] = _logprob_items(own, tokenizer)
            if request.top_logprobs:
                meta[f"{side}_top_logprobs"] = [
                    None if entry.logprob is None else _logprob_items(entry.top, tokenizer)
                    for entry in entries
                ]
    return {"text": delta.text, "output_ids": unpack_ids(delta.ids).tolist(), "meta_info": meta}


def _logprob_items(
    tokens: Iterable[tuple[int, float | None]], tokenizer: Tokenizer | None
) -> list[list[Any]]:
    """[logprob, id, text] of each token; the text is None without a tokenizer."""
    items = []
    for token, logprob in tokens:
        text = None if tokenizer is None else tokenizer.id_to_text(token)
        items.append([logprob, token, text])
    return items


def _finish_reason(delta: TextDelta, finish: FinishReason) -> dict[str, Any]:
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": delta.completion_tokens}
    return {"type": "abort", "message": finish.message or "", "status_code": finish.status}
