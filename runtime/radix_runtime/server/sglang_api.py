"""/generate, /tokenize, /detokenize and /abort_request."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from ..errors import RequestError, refusal
from ..messages import Generate, TextDelta
from ..sampling_params import SamplingParams
from .exchange import Exchange, to_json
from .generation import native_output
from .openai import Answer, new_request, template_options
from .protocol import (
    AbortBody,
    Body,
    DetokenizeBody,
    NativeBody,
    NativeSampling,
    TokenizeBody,
    template_messages,
)
from .tokenizer_manager import Batch, new_id

_NOTHING: dict[str, Any] = {"text": "", "output_ids": [], "meta_info": {}}
_NAMES = {name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__}


async def generate(exchange: Exchange, body: NativeBody) -> None:
    param = _one_of(body, "text", "input_ids")
    all_ids = await exchange.manager.encode(getattr(body, param), param)
    names = ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
    columns = [_spread(getattr(body, name), len(all_ids), name) for name in names]
    requests, defaults = [], exchange.manager.sampling_defaults
    for ids, sampling, wanted, start, top in zip(all_ids, *columns, strict=True):
        request = new_request(exchange, sampling or NativeSampling(**defaults), ids, param, _NAMES)
        if wanted:
            if start is not None and not -1 <= start <= len(ids):
                raise refusal(
                    "invalid_value",
                    f"logprob_start_len must be in [-1, {len(ids)}]",
                    "logprob_start_len",
                )
            request.return_logprob, request.top_logprobs = True, top or 0
            # The end of the prompt asks for no prompt logprobs, as -1 does.
            request.logprob_start = -1 if start in (None, len(ids)) else start
        elif not any(columns[1]) and (start not in (None, -1) or top):
            raise refusal(
                "invalid_combination",
                f"{' and '.join(names[2:])} need return_logprob",
                "return_logprob",
            )
        requests.append(request)
    await _NativeAnswer(exchange, body, requests).send()


# Which of two fields the client gave. Raises RequestError unless it is exactly one.
def _one_of(body: Body, first: str, second: str) -> str:
    given = [name for name in (first, second) if getattr(body, name) is not None]
    if len(given) != 1:
        code = "invalid_combination" if given else "missing_field"
        raise refusal(code, f"exactly one of {first} and {second} is needed", first)
    return given[0]


# One value for each prompt. Raises RequestError on a list of another length.
def _spread(value: Any, count: int, param: str) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise refusal(
            "invalid_value", f"{param} has {len(value)} entries for {count} prompts", param
        )
    return value


class _NativeAnswer(Answer):
    """A stream repeats all text so far unless the client asked for pieces."""

    def __init__(self, exchange: Exchange, body: NativeBody, requests: list[Generate]) -> None:
        super().__init__(
            exchange, body, requests, body.rid if isinstance(body.rid, str) else new_id("")
        )
        if isinstance(body.rid, list):  # a name for each request
            self.labels = dict(
                zip(self.labels, _spread(body.rid, len(requests), "rid"), strict=True)
            )
        self._pieces = bool(body.incremental_streaming_output)
        self._so_far: dict[int, dict[str, Any]] = {}
        prompts = body.input_ids if body.text is None else body.text
        is_one = isinstance(prompts, str) or (prompts is not None and isinstance(prompts[0], int))
        self._listed = not is_one or len(self.request_of) > 1
        self._tokenizer = exchange.manager.tokenizer if body.return_text_in_logprobs else None

    def whole(self, deltas: list[TextDelta]) -> Any:
        results = [self._result(i, delta) for i, delta in enumerate(deltas)]
        return results if self._listed else results[0]

    def events(self, batch: Batch) -> Iterator[dict[str, Any]]:
        for choice, delta in batch.items():
            result = self._result(choice, delta)
            if not self._pieces:
                self._so_far[choice] = result = _appended(
                    self._so_far.get(choice, _NOTHING), result
                )
            yield {**({"index": choice} if self._listed else {}), **result}

    def _result(self, choice: int, delta: TextDelta) -> dict[str, Any]:
        request, seconds = self.request_of[choice], time.perf_counter() - self.exchange.started
        delta.prompt_logprobs = self.submission.prompt_logprobs.pop(choice, None)
        result = native_output(request, delta, seconds, self._tokenizer)
        result["meta_info"]["id"] = self.labels[request.rid]
        return {**result, "warnings": self.exchange.warnings} if self.exchange.warnings else result


# Both as one result. An entry of logprobs is encoded when it comes, not in every event that repeats
# it.
def _appended(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    before, meta = old["meta_info"], new["meta_info"]
    for name in [name for name, value in meta.items() if isinstance(value, list)]:
        meta[name] = [*before.get(name, ()), *(msgspec.Raw(to_json(entry)) for entry in meta[name])]
    return {**new, **{name: old[name] + new[name] for name in ("text", "output_ids")}}


async def tokenize(exchange: Exchange, body: TokenizeBody) -> None:
    """POST /tokenize: exactly the ids that the chat or the completions route would run."""
    manager = exchange.manager
    kind, foreign = (
        _one_of(body, "prompt", "messages"),
        ("add_generation_prompt", "chat_template_kwargs"),
    )
    for name in foreign if kind == "prompt" else ("add_special_tokens",):
        if getattr(body, name) is not None:
            raise refusal("invalid_combination", f"{name} does nothing with {kind}", name)
    if body.messages is not None:
        options = template_options(manager, body.chat_template_kwargs, None)
        options["add_generation_prompt"] = body.add_generation_prompt is not False
        lists = [await manager.encode_chat(template_messages(body.messages), **options)]
    else:
        lists = await manager.encode(
            body.prompt or [], "prompt", body.add_special_tokens is not False
        )
    counts: list[Any] = [len(ids) for ids in lists]
    listed = isinstance(body.prompt, list)
    tokens, count = (lists, counts) if listed else (lists[0], counts[0])
    await exchange.answer(
        {"tokens": tokens, "count": count, "max_model_len": manager.limits.context_length}
    )


async def detokenize(exchange: Exchange, body: DetokenizeBody) -> None:
    manager = exchange.manager
    texts = await manager.decode(
        await manager.encode(body.tokens, "tokens"), body.skip_special_tokens
    )
    await exchange.answer({"text": texts[0] if isinstance(body.tokens[0], int) else texts})


async def abort_request(exchange: Exchange, body: AbortBody) -> None:
    """POST /abort_request: always 200, however often it is asked."""
    if body.abort_all:
        if not exchange.is_admin:
            raise RequestError(403, "admin_key_required", "abort_all needs the admin key")
        count = exchange.manager.abort("")
    elif body.rid:
        count = exchange.manager.abort(body.rid)
    else:
        raise refusal("missing_field", "rid is required", "rid")
    await exchange.answer({"aborting": count})
