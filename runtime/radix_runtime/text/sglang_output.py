"""A choice in the shape of SGLang's /generate, which `Engine` gives too."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..messages import FinishReason, Generate, Logprobs, TextDelta, num_ids
from .choices import num_scored, scored
from .tokenizer import Tokenizer


def sglang_output(
    request: Generate,
    delta: TextDelta,
    ids: list[int],
    seconds: float,
    tokenizer: Tokenizer | None,
    rows: Callable[[Iterator[Any], int], Any] = lambda entries, count: list(entries),
) -> dict[str, Any]:
    """The choice as far as `delta` has it, in the shape of SGLang's /generate; `ids` are those of
    `delta`, unpacked. `tokenizer`: logprobs also give the text of tokens. `rows` makes an array of
    entries and their number."""
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
            count = num_scored(logprobs)
            own = ((entry.token, entry.logprob) for entry in scored(logprobs))
            meta[f"{side}_token_logprobs"] = rows(_logprob_items(own, tokenizer), count)
            if request.top_logprobs:
                meta[f"{side}_top_logprobs"] = rows(_top_items(logprobs, tokenizer), count)
    return {"text": delta.text, "output_ids": ids, "meta_info": meta}


def _logprob_items(
    tokens: Iterable[tuple[int, float | None]], tokenizer: Tokenizer | None
) -> Iterator[list[Any]]:
    """[logprob, id, text] of each token; the text is None without a tokenizer."""
    for token, logprob in tokens:
        text = None if tokenizer is None else tokenizer.id_to_text(token)
        yield [logprob, token, text]


def _top_items(
    logprobs: Logprobs | None, tokenizer: Tokenizer | None
) -> Iterator[list[list[Any]] | None]:
    """Those of the likeliest tokens of each position; None where there are none."""
    for entry in scored(logprobs):
        if entry.logprob is None:
            yield None
        else:
            yield list(_logprob_items(entry.top, tokenizer))


def _finish_reason(delta: TextDelta, finish: FinishReason) -> dict[str, Any]:
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": delta.completion_tokens}
    return {"type": "abort", "message": finish.message or "", "status_code": finish.status}
