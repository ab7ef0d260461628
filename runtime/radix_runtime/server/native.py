"""/generate, /tokenize, /detokenize and /abort_request."""

from __future__ import annotations

import time
from typing import Any

from ..errors import RequestError, refusal
from ..messages import Generate, TextDelta, unpack_ids
from ..sampling_params import SamplingParams
from .answer import Answer, new_request
from .exchange import Exchange
from .logprobs import native, native_top
from .openai_chat import template_messages, template_options
from .protocol import AbortBody, Body, DetokenizeBody, NativeBody, NativeSampling, TokenizeBody
from .responses import event
from .submission import Batch, merge
from .tokenizer_manager import new_id

_DEFAULT_MAX_NEW_TOKENS = 128
_NAMES = {name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__}


async def generate(exchange: Exchange) -> None:
    """POST or PUT /generate, in SGLang's shapes."""
    manager = exchange.manager
    manager.require_ready()
    body = exchange.decode(NativeBody)
    param = _one_of(body, "text", "input_ids")
    all_ids = await manager.encode(getattr(body, param), param)
    count = len(all_ids)
    samplings = _spread(body.sampling_params, count, "sampling_params")
    wanted = _spread(body.return_logprob, count, "return_logprob")
    starts = _spread(body.logprob_start_len, count, "logprob_start_len")
    tops = _spread(body.top_logprobs_num, count, "top_logprobs_num")
    # One name is that of the whole call.
    rids = _spread(body.rid if isinstance(body.rid, list) else "", count, "rid")
    requests = []
    for i, ids in enumerate(all_ids):
        request = new_request(
            manager, samplings[i] or NativeSampling(), ids,
            prompt_param=param, names=_NAMES, max_new_tokens=_DEFAULT_MAX_NEW_TOKENS,
        )  # fmt: skip
        request.rid = rids[i]
        if wanted[i]:
            request.return_logprob = True
            request.logprob_start = _logprob_start(starts[i], len(ids))
            request.top_logprobs = tops[i] or 0
        requests.append(request)
    await _NativeAnswer(exchange, body, requests).send()


def _one_of(body: Body, first: str, second: str) -> str:
    """Which of two fields the client gave. Raises RequestError unless it is exactly one."""
    given = [name for name in (first, second) if getattr(body, name) is not None]
    if len(given) != 1:
        code = "invalid_combination" if given else "missing_field"
        raise refusal(code, f"exactly one of {first} and {second} is needed", first)
    return given[0]


def _spread(value: Any, count: int, param: str) -> list[Any]:
    """One value for each prompt. Raises RequestError on a list of another length."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        message = f"{param} has {len(value)} entries for {count} prompts"
        raise refusal("invalid_value", message, param)
    return value


def _logprob_start(start: int | None, length: int) -> int:
    """-1 and the end of the prompt ask for no prompt logprobs."""
    if start is None or start in (-1, length):
        return -1
    if not 0 <= start < length:
        message = f"logprob_start_len must be in [-1, {length}]"
        raise refusal("invalid_value", message, "logprob_start_len")
    return start


class _NativeAnswer(Answer):
    """A stream repeats all text so far unless the client asked for pieces; with several prompts or
    choices every event has its `index`."""

    def __init__(self, exchange: Exchange, body: NativeBody, requests: list[Generate]) -> None:
        name = body.rid if isinstance(body.rid, str) else new_id("")
        super().__init__(exchange, body, requests, name)
        self._pieces = bool(body.incremental_streaming_output)
        self._so_far: dict[int, TextDelta] = {}
        self._listed = len(self.request_of) > 1 or any(
            isinstance(value, list) and not isinstance(value[0], int) for value in (body.text, body.input_ids)
        )
        self._names = exchange.manager.tokenizer if body.return_text_in_logprobs else None

    def whole(self, deltas: list[TextDelta]) -> Any:
        results = [self._result(i, delta) for i, delta in enumerate(deltas)]
        return results if self._listed else results[0]

    def frames(self, batch: Batch) -> bytes:
        frames = b""
        for choice, delta in batch.items():
            shown = delta if self._pieces else self._so_far.setdefault(choice, delta)
            if shown is not delta:
                merge(shown, delta)
            result = self._result(choice, shown)
            frames += event({"index": choice, **result} if self._listed else result)
        return frames

    def _result(self, choice: int, delta: TextDelta) -> dict[str, Any]:
        request = self.request_of[choice]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": _finish(delta),
            "prompt_tokens": len(request.input_ids) // 4,
            "completion_tokens": delta.completion_tokens,
            "cached_tokens": delta.cached_tokens,
            "e2e_latency": time.perf_counter() - self.exchange.started,
            "weight_version": "default",
        }
        if request.return_logprob:
            for side, logprobs in (("input", delta.prompt_logprobs), ("output", delta.logprobs)):
                meta[f"{side}_token_logprobs"] = native(logprobs, self._names)
                if request.top_logprobs:
                    meta[f"{side}_top_logprobs"] = native_top(logprobs, self._names)
        ids = unpack_ids(delta.ids).tolist()
        result = {"text": delta.text, "output_ids": ids, "meta_info": meta}
        return {**result, "warnings": self.exchange.warnings} if self.exchange.warnings else result


def _finish(delta: TextDelta) -> dict[str, Any] | None:
    finish = delta.finish
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": delta.completion_tokens}
    return {"type": "abort", "message": finish.message or "", "status_code": finish.status}


async def tokenize(exchange: Exchange) -> None:
    """POST /tokenize: exactly the ids that the chat or the completions route would run."""
    manager = exchange.manager
    body = exchange.decode(TokenizeBody)
    manager.check_model(body.model)
    _one_of(body, "prompt", "messages")
    if body.messages is not None:
        options = template_options(manager, body.chat_template_kwargs)
        options["add_generation_prompt"] = body.add_generation_prompt
        lists = [await manager.encode_chat(template_messages(body.messages), **options)]
    else:
        special = body.add_special_tokens
        lists = await manager.encode(body.prompt or [], "prompt", add_special_tokens=special)
    counts = [len(ids) for ids in lists]
    listed = isinstance(body.prompt, list)
    await exchange.answer(
        {
            "tokens": lists if listed else lists[0],
            "count": counts if listed else counts[0],
            "max_model_len": manager.limits.context_length,
        }
    )


async def detokenize(exchange: Exchange) -> None:
    """POST /detokenize."""
    manager = exchange.manager
    body = exchange.decode(DetokenizeBody)
    manager.check_model(body.model)
    lists = await manager.encode(body.tokens, "tokens")
    decode, skip = manager.tokenizer.decode, body.skip_special_tokens
    texts = await manager.in_thread(lambda: [decode(ids, skip) for ids in lists])
    await exchange.answer({"text": texts[0] if isinstance(body.tokens[0], int) else texts})


async def abort_request(exchange: Exchange) -> None:
    """POST /abort_request: always 200, however often it is asked."""
    body = exchange.decode(AbortBody)
    if body.abort_all:
        if not exchange.scope["radix.is_admin"]:
            raise RequestError(403, "admin_key_required", "abort_all needs the admin key")
        count = exchange.manager.abort_all()
    elif body.rid:
        count = exchange.manager.abort(body.rid)
    else:
        raise refusal("missing_field", "rid is required", "rid")
    await exchange.answer({"aborting": count})
