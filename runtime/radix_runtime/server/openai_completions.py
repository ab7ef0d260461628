"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..messages import Generate, TextDelta
from .answer import OpenAIAnswer, finish_of, new_request
from .exchange import Exchange
from .logprobs import CompletionLogprobs, Scored, scored
from .protocol import OPENAI_NAMES, CompletionBody
from .responses import to_json

_DEFAULT_MAX_TOKENS = 16


async def completions(exchange: Exchange) -> None:
    manager = exchange.manager
    manager.require_ready()
    body = exchange.decode(CompletionBody)
    manager.check_model(body.model)
    scores = body.logprobs is not None
    all_ids = await manager.encode(body.prompt, "prompt")
    requests = [
        new_request(
            manager, body, ids,
            prompt_param="prompt", names=OPENAI_NAMES, max_new_tokens=_DEFAULT_MAX_TOKENS,
            return_logprob=scores, logprob_start=0 if body.echo and scores else -1,
            top_logprobs=body.logprobs or 0,
        )
        for ids in all_ids
    ]  # fmt: skip
    echoed: list[Any] = [""] * len(requests)
    if body.echo:
        echoed = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not isinstance(echoed[0], str):
            decode, skip = manager.tokenizer.decode, requests[0].sampling.skip_special_tokens
            echoed = await manager.in_thread(lambda: [decode(ids, skip) for ids in all_ids])
    await _CompletionAnswer(exchange, body, requests, echoed).send()


class _CompletionAnswer(OpenAIAnswer):
    """`echoed`: the text that goes before the choices of each prompt."""

    def __init__(self, exchange: Exchange, body: CompletionBody, requests: list[Generate], echoed: list[str]) -> None:
        super().__init__(exchange, body, requests, "text_completion", "cmpl-")
        n = requests[0].sampling.n
        self._echoed = [text for text in echoed for _ in range(n)]
        self._echoes_scores = requests[0].logprob_start == 0
        self._logprobs: list[CompletionLogprobs] = []
        if body.logprobs is not None:
            self._logprobs = [CompletionLogprobs(self.names) for _ in self.request_of]
        self._prompt_scores: dict[str, list[Scored]] = {}

    def choice(self, choice: int, delta: TextDelta, first: bool = True) -> dict[str, Any]:
        text = self._echoed[choice] + delta.text if first else delta.text
        return {"text": text, "logprobs": self._scores(choice, delta, first)}

    def chunks(self, choice: int, delta: TextDelta, first: bool) -> Iterator[bytes]:
        content = self.choice(choice, delta, first)
        if content["text"] or content["logprobs"] or delta.finish or first:
            yield to_json({"index": choice, **content, **finish_of(delta.finish)})

    def _scores(self, choice: int, delta: TextDelta, first: bool) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        entries = self.names.of_delta(delta)
        rid = self.request_of[choice].rid
        if delta.prompt_logprobs is not None:
            self._prompt_scores[rid] = scored(delta.prompt_logprobs)
        if self._echoes_scores and first:
            prompt = self._prompt_scores.get(rid, [])
            entries = [(s, self.names.shown(s.token)) for s in prompt] + entries
        return self._logprobs[choice].take(entries) if entries else None
