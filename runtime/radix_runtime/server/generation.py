"""What has come of a generation, as the server and `Engine` share it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..config import ServerArgs
from ..messages import FinishReason, Generate, Logprobs, TextDelta, unpack_ids
from ..text.generation_config import load_generation_config
from ..text.tokenizer import Tokenizer

FLOOR = -9999.0


def sampling_defaults(args: ServerArgs, model_dir: Path) -> dict[str, Any]:
    return (
        dict(load_generation_config(model_dir).sampling_defaults())
        if args.sampling_defaults == "model"
        else {}
    )


class Choices:
    """What has come of some requests: pieces, merged by choice. Choices are numbered through all
    requests."""

    def __init__(self, requests: Sequence[Generate]) -> None:
        self.requests = requests
        self.request_of = [r for r in requests for _ in range(r.sampling.n)]
        self._first = {r.rid: i for i, r in reversed([*enumerate(self.request_of)])}
        self.unfinished = len(self.request_of)
        self.pieces: dict[int, TextDelta] = {}
        self.prompt_logprobs: dict[
            int, Logprobs
        ] = {}  # by choice; they come with the first one of a request

    def add(self, delta: TextDelta) -> int:
        """Takes ownership of `delta`; the number of its choice."""
        choice = (first := self._first[delta.rid]) + delta.choice
        if delta.prompt_logprobs is not None:
            choices = range(first, first + self.request_of[first].sampling.n)
            self.prompt_logprobs |= dict.fromkeys(choices, delta.prompt_logprobs)
        if (piece := self.pieces.setdefault(choice, delta)) is not delta:
            merge(piece, delta)
        self.unfinished -= delta.finish is not None
        return choice


def merge(into: TextDelta, new: TextDelta) -> None:
    into.text += new.text
    into.ids += new.ids
    into.finish, into.completion_tokens = new.finish, new.completion_tokens
    into.cached_tokens = into.cached_tokens or new.cached_tokens
    into.logprobs = _joined(into.logprobs, new.logprobs)


def _joined(a: Logprobs | None, b: Logprobs | None) -> Logprobs | None:
    if a is None or b is None:
        return a or b
    tops = a.top_ids + b.top_ids, a.top_logprobs + b.top_logprobs
    return Logprobs(a.ids + b.ids, a.logprobs + b.logprobs, a.top_n, *tops)


class Scored(NamedTuple):
    """A token, its logprob (at least FLOOR; None: the first token of a prompt has none) and the
    likeliest."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


def scored(logprobs: Logprobs | None) -> list[Scored]:
    if logprobs is None:
        return []
    ids, top_ids = unpack_ids(logprobs.ids).tolist(), unpack_ids(logprobs.top_ids).tolist()
    packed, n = (logprobs.logprobs, logprobs.top_logprobs), logprobs.top_n
    values, top_values = (np.maximum(np.frombuffer(part, "<f4"), FLOOR).tolist() for part in packed)
    tops = [
        list(zip(top_ids[i : i + n], top_values[i : i + n], strict=True))
        for i in range(0, n * len(ids), n or 1)
    ]
    rows = zip(ids, values, tops or [[]] * len(ids), strict=True)
    return [
        Scored(*row) if row[1] == row[1] else Scored(row[0], None, []) for row in rows
    ]  # not NaN


def native_output(
    request: Generate, delta: TextDelta, seconds: float, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The choice as far as `delta` has it, in SGLang's shape. `tokenizer`: logprobs also give the
    text of tokens."""
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": delta.finish and _finish_reason(delta, delta.finish),
        "prompt_tokens": len(request.input_ids) // 4,
        "completion_tokens": delta.completion_tokens,
        "cached_tokens": delta.cached_tokens,
        "e2e_latency": seconds,
        "weight_version": "default",
    }

    def items(tokens: Iterable[tuple[int, float | None]]) -> list[list[Any]]:
        return [
            [value, token, tokenizer and tokenizer.id_to_text(token)] for token, value in tokens
        ]

    if request.return_logprob:
        for side, logprobs in (("input", delta.prompt_logprobs), ("output", delta.logprobs)):
            entries = scored(logprobs)
            meta[f"{side}_token_logprobs"] = items(entry[:2] for entry in entries)
            if request.top_logprobs:
                meta[f"{side}_top_logprobs"] = [
                    None if e.logprob is None else items(e.top) for e in entries
                ]
    return {"text": delta.text, "output_ids": unpack_ids(delta.ids).tolist(), "meta_info": meta}


def _finish_reason(delta: TextDelta, finish: FinishReason) -> dict[str, Any]:
    abort = {"message": finish.message or "", "status_code": finish.status}
    details: Any = {
        "stop": {"matched": finish.matched},
        "length": {"length": delta.completion_tokens},
        "abort": abort,
    }
    return {"type": finish.type, **details[finish.type]}
