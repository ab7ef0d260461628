"""/generate, /tokenize, /detokenize and /abort_request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from ..errors import RequestError, refusal
from ..messages import Logprobs, TextDelta, unpack_ids
from ..sampling_params import SamplingParams
from .admission import MAX_PROMPTS, admit, check_prompt_length, check_sampling, check_token_ids
from .exchange import Exchange
from .logprobs import TokenNames, native, native_top
from .openai_chat import template_messages, template_options
from .openai_common import cache_key, check_name, sampling_from
from .protocol import AbortBody, DetokenizeBody, NativeBody, NativeSampling, TokenizeBody
from .responses import event
from .submission import Submission, merge
from .tokenizer_manager import Prompt, TokenizerManager, new_id

_MAX_TOP = 20
_NAMES = {name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__}
T = TypeVar("T")


class Generate:
    """POST or PUT /generate, in SGLang's shapes."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def __call__(self, exchange: Exchange) -> None:
        manager = self._manager
        manager.require_ready()
        body, warnings = exchange.decode(NativeBody)
        prompts = await self._prompts(body)
        submission = manager.submit(
            prompts,
            name=new_id("") if not isinstance(body.rid, str) else body.rid,
            stream=bool(body.stream),
            extra_key=cache_key(body),
            started=exchange.started,
        )
        with submission:
            answer = _Answer(body, prompts, submission, manager, warnings)
            if body.stream:
                await answer.stream(exchange)
            else:
                await exchange.json(answer.whole(await submission.collect()))

    async def _prompts(self, body: NativeBody) -> list[Prompt]:
        param, all_ids = await self._ids(body)
        count = len(all_ids)
        given = _spread(body.sampling_params, count, "sampling_params")
        samplings = [self._sampling(p) for p in given]
        rids: list[str | None] = [None] * count
        if isinstance(body.rid, list):
            rids = _spread(body.rid, count, "rid")
        wanted = _spread(body.return_logprob, count, "return_logprob")
        starts = _spread(body.logprob_start_len, count, "logprob_start_len")
        tops = _spread(body.top_logprobs_num, count, "top_logprobs_num")
        for rid in body.rid if isinstance(body.rid, list) else [body.rid]:
            check_name(rid, "rid")
        prompts = []
        for i, ids in enumerate(all_ids):
            sampling, clip = samplings[i]
            sampling = admit(
                ids, sampling, self._manager.limits, prompt_param=param, names=_NAMES, clip=clip
            )
            start = _logprob_start(starts[i], len(ids)) if wanted[i] else -1
            top = _top_logprobs(tops[i]) if wanted[i] else 0
            prompts.append(Prompt(ids, sampling, rids[i], bool(wanted[i]), start, top))
        return prompts

    def _sampling(self, given: NativeSampling | None) -> tuple[SamplingParams, bool]:
        """The parameters, and whether the output limit is ours."""
        given = given or NativeSampling()
        sampling = sampling_from(
            given,
            self._manager.sampling_defaults,
            max_new_tokens=given.max_new_tokens,
            min_new_tokens=given.min_new_tokens,
            seed=given.sampling_seed if given.seed is None else given.seed,
        )
        check_sampling(sampling, self._manager.limits, _NAMES)
        return sampling, given.max_new_tokens is None

    async def _ids(self, body: NativeBody) -> tuple[str, list[list[int]]]:
        if (body.text is None) == (body.input_ids is None):
            raise refusal(
                "missing_field" if body.text is None else "invalid_combination",
                "exactly one of text and input_ids is needed",
                "text",
            )
        if body.text is not None:
            texts = [body.text] if isinstance(body.text, str) else body.text
            _check_count(texts, "text")
            return "text", await self._manager.encode(texts, "text")
        lists = _id_lists(body.input_ids or [], "input_ids")
        _check_count(lists, "input_ids")
        for ids in lists:
            check_token_ids(ids, self._manager.limits.vocab_size, "input_ids")
        return "input_ids", lists


def _check_count(items: Sequence[Any], param: str) -> None:
    if not items:
        raise refusal("empty_input", f"{param} is empty", param)
    if len(items) > MAX_PROMPTS:
        raise refusal("invalid_value", f"at most {MAX_PROMPTS} prompts", param)


def _id_lists(given: Sequence[Any], param: str) -> list[list[int]]:
    """[[int]] of [int] or [[int]]."""
    if all(isinstance(item, int) for item in given):
        return [list(given)] if given else []
    if any(isinstance(item, int) for item in given):
        raise refusal("invalid_type", f"{param}: ids and lists of ids are mixed", param)
    return list(given)


def _spread(value: T | list[T] | None, count: int, param: str) -> list[T | None]:
    """One value for each prompt. Raises RequestError on a list of another length."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise refusal(
            "invalid_value", f"{param} has {len(value)} entries for {count} prompts", param
        )
    return list(value)


def _logprob_start(start: int | None, length: int) -> int:
    """-1 and the end of the prompt ask for no prompt logprobs."""
    if start is None or start == -1 or start == length:
        return -1
    if not 0 <= start < length:
        raise refusal(
            "invalid_value", f"logprob_start_len must be in [-1, {length}]", "logprob_start_len"
        )
    return start


def _top_logprobs(count: int | None) -> int:
    if count is not None and not 0 <= count <= _MAX_TOP:
        raise refusal(
            "invalid_value", f"top_logprobs_num must be in [0, {_MAX_TOP}]", "top_logprobs_num"
        )
    return count or 0


class _Answer:
    """Builds what goes back. A stream repeats all text so far unless the client asked for pieces;
    with several prompts or choices every event has its `index`."""

    def __init__(
        self,
        body: NativeBody,
        prompts: list[Prompt],
        submission: Submission,
        manager: TokenizerManager,
        warnings: list[str],
    ) -> None:
        self._submission = submission
        self._prompts = prompts
        self._warnings = warnings
        self._pieces = bool(body.incremental_streaming_output)
        self._listed = len(submission.prompt_of) > 1 or any(
            isinstance(value, list) and not all(isinstance(v, int) for v in value)
            for value in (body.text, body.input_ids)
        )
        self._names = None
        if body.return_text_in_logprobs:
            self._names = TokenNames(manager.tokenizer, skip_special=False, keeps_stop=True)

    def whole(self, deltas: list[TextDelta]) -> Any:
        results = [self._result(i, delta) for i, delta in enumerate(deltas)]
        return results if self._listed else results[0]

    async def stream(self, exchange: Exchange) -> None:
        so_far: dict[int, TextDelta] = {}
        while batch := await self._submission.next_batch():
            frames = b""
            for choice, delta in batch.items():
                shown = delta if self._pieces else so_far.setdefault(choice, delta)
                if shown is not delta:
                    merge(shown, delta)
                result = self._result(choice, shown)
                frames += event({"index": choice, **result} if self._listed else result)
            await exchange.events.write(frames)
        await exchange.events.done()

    def _result(self, choice: int, delta: TextDelta) -> dict[str, Any]:
        submission = self._submission
        prompt = submission.prompt_of[choice]
        meta: dict[str, Any] = {
            "id": submission.rids[prompt],
            "finish_reason": _finish(delta),
            "prompt_tokens": submission.prompt_lengths[prompt],
            "completion_tokens": delta.completion_tokens,
            "cached_tokens": delta.cached_tokens,
            "e2e_latency": time.perf_counter() - submission.started,
            "weight_version": "default",
        }
        if self._prompts[prompt].return_logprob:
            meta.update(self._logprobs(prompt, delta))
        result = {
            "text": delta.text,
            "output_ids": unpack_ids(delta.ids).tolist(),
            "meta_info": meta,
        }
        return {**result, "warnings": self._warnings} if self._warnings else result

    def _logprobs(self, prompt: int, delta: TextDelta) -> dict[str, Any]:
        parts: dict[str, Logprobs | None] = {
            "input": delta.prompt_logprobs, "output": delta.logprobs,
        }  # fmt: skip
        result: dict[str, Any] = {}
        for side, logprobs in parts.items():
            result[f"{side}_token_logprobs"] = native(logprobs, self._names)
            if self._prompts[prompt].top_logprobs:
                result[f"{side}_top_logprobs"] = native_top(logprobs, self._names)
        return result


def _finish(delta: TextDelta) -> dict[str, Any] | None:
    finish = delta.finish
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": delta.completion_tokens}
    return {"type": "abort", "message": finish.message or "", "status_code": finish.status}


class Tokenize:
    """POST /tokenize: exactly the ids that the chat or the completions route would run."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def __call__(self, exchange: Exchange) -> None:
        manager = self._manager
        body, warnings = exchange.decode(TokenizeBody)
        manager.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise refusal(
                "missing_field" if body.prompt is None else "invalid_combination",
                "exactly one of prompt and messages is needed",
                "prompt",
            )
        tokens: Any
        if body.messages is not None:
            tokens = await manager.encode_chat(
                template_messages(body.messages),
                add_generation_prompt=body.add_generation_prompt,
                **template_options(manager, body.chat_template_kwargs),
            )
        else:
            texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
            _check_count(texts, "prompt")
            tokens = await manager.encode(
                texts, "prompt", add_special_tokens=body.add_special_tokens
            )
            tokens = tokens[0] if isinstance(body.prompt, str) else tokens
        listed = isinstance(body.prompt, list)
        result = {
            "tokens": tokens,
            "count": [len(t) for t in tokens] if listed else len(tokens),
            "max_model_len": manager.limits.context_length,
        }
        await exchange.json({**result, "warnings": warnings} if warnings else result)


class Detokenize:
    """POST /detokenize."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def __call__(self, exchange: Exchange) -> None:
        manager = self._manager
        body, warnings = exchange.decode(DetokenizeBody)
        manager.check_model(body.model)
        lists = _id_lists(body.tokens, "tokens")
        _check_count(lists, "tokens")
        for ids in lists:
            check_token_ids(ids, manager.limits.vocab_size, "tokens")
            check_prompt_length(len(ids), manager.limits, "tokens")
        decode, skip = manager.tokenizer.decode, body.skip_special_tokens
        texts = await manager.in_thread(lambda: [decode(ids, skip) for ids in lists])
        one = bool(body.tokens) and isinstance(body.tokens[0], int)
        result: dict[str, Any] = {"text": texts[0] if one else texts}
        await exchange.json({**result, "warnings": warnings} if warnings else result)


class AbortRequest:
    """POST /abort_request: always 200, however often it is asked."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def __call__(self, exchange: Exchange) -> None:
        body, _ = exchange.decode(AbortBody)
        if body.abort_all:
            if not exchange.is_admin:
                raise RequestError(403, "admin_key_required", "abort_all needs the admin key")
            count = self._manager.abort_all()
        elif body.rid:
            count = self._manager.abort(body.rid)
        else:
            raise refusal("missing_field", "rid is required", "rid")
        await exchange.json({"aborting": count})
