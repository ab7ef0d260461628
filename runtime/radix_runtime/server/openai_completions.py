"""POST /v1/completions."""

from __future__ import annotations

import time
from typing import Any

from ..errors import RequestError
from ..messages import TextDelta
from .admission import MAX_PROMPTS, admit, check_sampling, check_token_ids
from .exchange import Exchange
from .logprobs import CompletionLogprobs, Scored, TokenNames, scored
from .openai_common import (
    FINGERPRINT,
    Usage,
    cache_key,
    check_name,
    check_stream_options,
    finish_of,
    openai_sampling,
)
from .protocol import CompletionBody
from .responses import event
from .submission import Submission
from .tokenizer_manager import Prompt, TokenizerManager, new_id

_MAX_LOGPROBS = 5
_DEFAULT_MAX_TOKENS = 16
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class Completions:
    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def __call__(self, exchange: Exchange) -> None:
        manager = self._manager
        manager.require_ready()
        body, warnings = exchange.decode(CompletionBody)
        manager.check_model(body.model)
        prompts = await self._prompts(body)
        echoed = await self._echoed(body, prompts)
        submission = manager.submit(
            prompts,
            name=body.rid or new_id("cmpl-"),
            stream=bool(body.stream),
            extra_key=cache_key(body),
            started=exchange.started,
        )
        names = TokenNames(
            manager.tokenizer,
            skip_special=prompts[0].sampling.skip_special_tokens,
            keeps_stop=prompts[0].sampling.no_stop_trim,
        )
        with submission:
            answer = _Answer(body, submission, names, echoed, manager.model_name, warnings)
            if body.stream:
                await answer.stream(exchange)
            else:
                await exchange.json(answer.whole(await submission.collect()))

    async def _prompts(self, body: CompletionBody) -> list[Prompt]:
        manager = self._manager
        limit = _max_tokens(body)
        wanted = _DEFAULT_MAX_TOKENS if limit is None else limit
        sampling = openai_sampling(body, manager.sampling_defaults, wanted)
        check_sampling(sampling, manager.limits, _NAMES)
        check_stream_options(body)
        check_name(body.rid, "rid")
        if body.logprobs is not None and not 0 <= body.logprobs <= _MAX_LOGPROBS:
            raise RequestError(
                400, "invalid_value", f"logprobs must be in [0, {_MAX_LOGPROBS}]",
                param="logprobs",
            )  # fmt: skip
        all_ids = await self._ids(body)
        return [
            Prompt(
                ids,
                admit(
                    ids, sampling, manager.limits,
                    prompt_param="prompt", names=_NAMES, clip=limit is None,
                ),
                return_logprob=body.logprobs is not None,
                logprob_start=0 if body.echo and body.logprobs is not None else -1,
                top_logprobs=body.logprobs or 0,
            )
            for ids in all_ids
        ]  # fmt: skip

    async def _ids(self, body: CompletionBody) -> list[list[int]]:
        """The prompts as ids: str, [str], [int] or [[int]]."""
        prompt = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not prompt:
            raise RequestError(400, "empty_input", "prompt is empty", param="prompt")
        kinds = {type(item) for item in prompt}
        if len(kinds) > 1:
            raise RequestError(
                400, "invalid_type", "prompt: strings and token ids are mixed", param="prompt"
            )
        lists: list[Any] = [prompt] if kinds == {int} else list(prompt)
        if len(lists) > MAX_PROMPTS:
            raise RequestError(
                400, "invalid_value", f"at most {MAX_PROMPTS} prompts", param="prompt"
            )
        if kinds == {str}:
            return await self._manager.encode(lists, "prompt")
        for ids in lists:
            check_token_ids(ids, self._manager.limits.vocab_size, "prompt")
        return lists

    async def _echoed(self, body: CompletionBody, prompts: list[Prompt]) -> list[str]:
        """The text that goes before each prompt's choices."""
        if not body.echo:
            return [""] * len(prompts)
        if isinstance(body.prompt, str):
            return [body.prompt]
        if isinstance(body.prompt[0], str):
            return [str(text) for text in body.prompt]
        decode = self._manager.tokenizer.decode
        skip = prompts[0].sampling.skip_special_tokens
        return await self._manager.in_thread(lambda: [decode(p.ids, skip) for p in prompts])


def _max_tokens(body: CompletionBody) -> int | None:
    lowest = 0 if body.echo else 1
    if body.max_tokens is not None and body.max_tokens < lowest:
        raise RequestError(
            400, "invalid_value", f"max_tokens must be at least {lowest}", param="max_tokens"
        )
    return body.max_tokens


class _Answer:
    """Builds what goes back, whole or as chunks."""

    def __init__(
        self,
        body: CompletionBody,
        submission: Submission,
        names: TokenNames,
        echoed: list[str],
        model: str,
        warnings: list[str],
    ) -> None:
        self._submission = submission
        self._names = names
        self._echo = bool(body.echo)
        self._echoed = echoed
        self._warnings = warnings
        self._usage = Usage(submission)
        choices = len(submission.prompt_of)
        self._logprobs = None
        if body.logprobs is not None:
            self._logprobs = [CompletionLogprobs(names) for _ in range(choices)]
        self._prompt_scores: dict[int, list[Scored]] = {}
        options = body.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        self._head = {
            "id": submission.name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def whole(self, deltas: list[TextDelta]) -> dict[str, Any]:
        self._usage.add(enumerate(deltas))
        choices = [self._choice(i, delta, first=True) for i, delta in enumerate(deltas)]
        result = {**self._head, "choices": choices, "usage": self._usage.object()}
        return {**result, "warnings": self._warnings} if self._warnings else result

    async def stream(self, exchange: Exchange) -> None:
        started: set[int] = set()
        while batch := await self._submission.next_batch():
            self._usage.add(batch.items())
            frames = b""
            for choice, delta in batch.items():
                first = choice not in started
                content = self._choice(choice, delta, first=first)
                chunk: dict[str, Any] = {**self._head, "choices": [content]}
                if self._include_usage or self._usage_always:
                    chunk["usage"] = self._usage.object() if self._usage_always else None
                if self._warnings and not started:
                    chunk["warnings"] = self._warnings
                started.add(choice)
                if content["text"] or content["logprobs"] or delta.finish or first:
                    frames += event(chunk)
            if frames:
                await exchange.events.write(frames)
        tail = b""
        if self._include_usage:
            tail = event({**self._head, "choices": [], "usage": self._usage.object()})
        await exchange.events.done(tail)

    def _choice(self, choice: int, delta: TextDelta, *, first: bool) -> dict[str, Any]:
        prompt = self._submission.prompt_of[choice]
        text = self._echoed[prompt] + delta.text if first else delta.text
        return {
            "index": choice,
            "text": text,
            "logprobs": self._scores(choice, prompt, delta, first=first),
            **finish_of(delta.finish),
        }

    def _scores(
        self, choice: int, prompt: int, delta: TextDelta, *, first: bool
    ) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        entries = list(self._names.of_delta(delta))
        if delta.prompt_logprobs is not None:
            self._prompt_scores[prompt] = scored(delta.prompt_logprobs)
        if self._echo and first:
            entries = [(s, False) for s in self._prompt_scores.get(prompt, ())] + entries
        return self._logprobs[choice].take(entries) if entries else None
