"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..errors import refusal
from ..messages import TextDelta
from .admission import MAX_PROMPTS, admit, check_sampling, check_token_ids
from .exchange import Exchange
from .logprobs import CompletionLogprobs, Scored, TokenNames, scored
from .openai_common import (
    answer_call,
    check_stream_options,
    finish_of,
    openai_sampling,
    token_names,
)
from .protocol import CompletionBody, OpenAIBody
from .responses import to_json
from .tokenizer_manager import Prompt, TokenizerManager

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
        call = _Call(body, prompts, echoed, token_names(manager, prompts[0].sampling))
        await answer_call(manager, exchange, call, "text_completion", warnings)

    async def _prompts(self, body: CompletionBody) -> list[Prompt]:
        manager = self._manager
        limit = _max_tokens(body)
        wanted = _DEFAULT_MAX_TOKENS if limit is None else limit
        sampling = openai_sampling(body, manager.sampling_defaults, wanted)
        check_sampling(sampling, manager.limits, _NAMES)
        check_stream_options(body)
        if body.logprobs is not None and not 0 <= body.logprobs <= _MAX_LOGPROBS:
            raise refusal("invalid_value", f"logprobs must be in [0, {_MAX_LOGPROBS}]", "logprobs")
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
            raise refusal("empty_input", "prompt is empty", "prompt")
        kinds = {type(item) for item in prompt}
        if len(kinds) > 1:
            raise refusal("invalid_type", "prompt: strings and token ids are mixed", "prompt")
        lists: list[Any] = [prompt] if kinds == {int} else list(prompt)
        if len(lists) > MAX_PROMPTS:
            raise refusal("invalid_value", f"at most {MAX_PROMPTS} prompts", "prompt")
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
        raise refusal("invalid_value", f"max_tokens must be at least {lowest}", "max_tokens")
    return body.max_tokens


class _Call:
    """`echoed`: the text that goes before the choices of each prompt."""

    def __init__(
        self, body: CompletionBody, prompts: list[Prompt], echoed: list[str], names: TokenNames
    ) -> None:
        self.body: OpenAIBody = body
        self.prompts = prompts
        self._names = names
        self._echo = bool(body.echo)
        self._echoed = echoed
        self._n = prompts[0].sampling.n
        self._logprobs: list[CompletionLogprobs] = []
        if body.logprobs is not None:
            self._logprobs = [CompletionLogprobs(names) for _ in range(len(prompts) * self._n)]
        self._prompt_scores: dict[int, list[Scored]] = {}

    def choice(self, choice: int, delta: TextDelta, first: bool = True) -> dict[str, Any]:
        text = self._echoed[choice // self._n] + delta.text if first else delta.text
        return {"text": text, "logprobs": self._scores(choice, delta, first)}

    def chunks(self, choice: int, delta: TextDelta, first: bool) -> Iterator[bytes]:
        content = self.choice(choice, delta, first)
        if content["text"] or content["logprobs"] or delta.finish or first:
            yield to_json({"index": choice, **content, **finish_of(delta.finish)})

    def _scores(self, choice: int, delta: TextDelta, first: bool) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        entries = list(self._names.of_delta(delta))
        prompt = choice // self._n
        if delta.prompt_logprobs is not None:
            self._prompt_scores[prompt] = scored(delta.prompt_logprobs)
        if self._echo and first:
            entries = [(s, False) for s in self._prompt_scores.get(prompt, ())] + entries
        return self._logprobs[choice].take(entries) if entries else None
