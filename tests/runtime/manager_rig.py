"""A TokenizerManager alone, with a link that records what is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from radix_runtime.config import ServerArgs
from radix_runtime.errors import RequestError
from radix_runtime.grammar.service import Grammars
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.messages import (
    FinishReason,
    Generate,
    Message,
    RequestFailed,
    TextDelta,
    pack_ids,
)
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.server.shared_numbers import SharedNumbers
from radix_runtime.server.submission import Submission
from radix_runtime.server.tokenizer_manager import TokenizerManager
from radix_runtime.text.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(DEMO_MODEL_DIR)
DEAD = RequestError(status=500, code="engine_dead", message="the engine has died")


class RecordingLink:
    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.refuse_after: int | None = None

    def send(self, message: Message, instance: int = 0) -> None:
        if self.refuse_after is not None and isinstance(message, Generate):
            if self.refuse_after == 0:
                raise RequestError(
                    status=503, code="engine_overloaded", message="full", retry_after=1
                )
            self.refuse_after -= 1
        self.sent.append(message)

    def rids(self, kind: type) -> list[str]:
        return [m.rid for m in self.sent if isinstance(m, kind)]  # type: ignore[attr-defined]


def build(**settings: Any) -> tuple[TokenizerManager, RecordingLink]:
    """Ready, and the only one."""
    manager, link = build_one_of(SharedNumbers(), **settings)
    manager.set_ready({"max_total_num_tokens": 1024})
    return manager, link


def build_one_of(numbers: SharedNumbers, **settings: Any) -> tuple[TokenizerManager, RecordingLink]:
    """The manager of one API process among others; not ready."""
    link = RecordingLink()
    facts = SimpleNamespace(vocab_size=1536, max_context=128)
    args = ServerArgs(**settings)
    manager = TokenizerManager(
        args=args,
        model=facts,
        tokenizer=TOKENIZER,
        link=link,
        defaults={},
        grammars=Grammars(args, TOKENIZER, vocab_size=1536, eos_ids=[2]),
        numbers=numbers,
    )
    return manager, link


def delta(rid: str, choice: int, *ids: int, end: str | None = None, text: str = "x") -> TextDelta:
    finish = None if end is None else FinishReason(end)  # type: ignore[arg-type]
    return TextDelta(
        rid=rid,
        choice=choice,
        ids=pack_ids(ids),
        finish=finish,
        completion_tokens=len(ids),
        text=text,
    )


def failure(rid: str) -> RequestFailed:
    return RequestFailed(rid=rid, status=500, code="internal_error", message="late")


def prompt(n: int = 1) -> Generate:
    sampling = SamplingParams(n=n, max_new_tokens=4)
    return Generate(rid="", input_ids=pack_ids([5, 6]), sampling=sampling)


def submit(manager: TokenizerManager, requests: list[Generate], name: str) -> Submission:
    """Requests whose rids are their labels, as long as no label comes twice."""
    labels = [name] if len(requests) == 1 else [f"{name}-{i}" for i in range(len(requests))]
    for request, label in zip(requests, labels, strict=True):
        request.rid = request.rid or label
    rids = [request.rid for request in requests]
    return manager.submit(requests, name, dict(zip(rids, labels, strict=True)))


def is_empty(manager: TokenizerManager) -> bool:
    counts = manager.counts
    balanced = counts.accepted == counts.ok + counts.aborted + counts.failed + counts.refused
    return balanced and not manager._open and not manager._controls


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 20))
