"""Logits to token ids, with per-row state that outlives the step.

SamplingParams has the order of effects. Log-probabilities come from the logits as the model gave
them. A draw is keyed by (seed of the row, absolute position of the token), so it depends on neither
batch nor rank. State is kept by row of the request table; what a batch needs of it is gathered once
and kept while the batch stays the same."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from .. import ops
from ..device import upload
from ..messages import unpack_ids
from ..sampling_params import SamplingParams
from ..step_plan import RowSampling

_IN_PROMPT = 1 << 30


class Sampled(NamedTuple):
    """Device tensors of S sampled rows: ids int32 [S], -1 where the logits were not finite; the
    rest is None when no row asks: logprobs float32 [S] (NaN where not asked), top_* [S, top_n]."""

    ids: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


@dataclass(slots=True)
class _Batch:
    """State of the rows of one batch; tensors are on the device, None where no row needs them."""

    rows: bytes
    greedy: bool  # the largest logits, as the model gives them, are all that is asked for
    # temperature, top_k, top_p, min_p, seed
    draw: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    penalties: list[torch.Tensor] | None  # row of the counts or -1, repetition, frequency, presence
    bias: list[torch.Tensor] | None  # batch index, id, value
    stops: np.ndarray  # int64 [3, n]: batch index, id, position before which it is masked
    scored: torch.Tensor | None  # batch indices that want logprobs
    top_n: int


class Sampler:
    """Sampling state of `max_rows` rows. Used by one thread, on the engine's stream."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._rows = [RowSampling(0, 0, SamplingParams(temperature=0))] * max_rows
        self._slots = np.full(max_rows, -1, np.int32)  # the row's row of the counts
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._free_slots: list[int] = []
        self._batch: _Batch | None = None

    def admit(self, state: RowSampling) -> None:
        if (slot := int(self._slots[state.row])) >= 0:
            self._free_slots.append(slot)
        self._slots[state.row] = self._fill_counts(state) if state.params.has_penalties else -1
        self._rows[state.row] = state
        self._batch = None

    def _fill_counts(self, state: RowSampling) -> int:
        if not self._free_slots:
            old = self._counts
            more = max(4, len(old))
            self._counts = torch.cat([old, old.new_zeros((more, self._vocab_size))])
            self._free_slots = list(range(len(old), len(old) + more))
        slot = self._free_slots.pop()
        words = np.bincount(unpack_ids(state.output_ids), minlength=self._vocab_size).astype(
            np.int32
        )
        words[unpack_ids(state.prompt_ids)] |= _IN_PROMPT
        self._counts[slot] = self._upload(words)
        return slot

    def is_greedy(self, rows: np.ndarray) -> bool:
        """Whether the largest logit of each row, as the model gives it, says all that `sample`
        would."""
        return self._gather(rows).greedy

    def sample(self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> Sampled:
        """One token a row. `logits` float32 [S, V] may be overwritten; `positions` [S]: where each
        token will stand."""
        batch = self._gather(rows)
        # index_select copies, so the raw values survive the edits below.
        raw = None if batch.scored is None else logits.index_select(0, batch.scored)
        if batch.bias is not None:
            *places, values = batch.bias
            logits.index_put_(tuple(places), values, accumulate=True)
        if batch.penalties is not None:
            ops.apply_penalties_inplace(logits, self._counts, *batch.penalties)
        index, ids, ends = batch.stops
        early = positions[index] < ends
        if early.any():
            where = self._upload(index[early]), self._upload(ids[early])
            # Assigning a Python number would make the host wait for the device.
            logits.index_put_(where, logits.new_full((), -torch.inf))
        # Greedy rows cost no more than an argmax.
        tokens = ops.top_k_top_p_sampling(
            logits, *batch.draw, self._upload(positions.astype(np.int64))
        )
        if batch.penalties is not None:
            ops.count_tokens_inplace(self._counts, batch.penalties[0], tokens)
        if raw is None or (scored := batch.scored) is None:
            return Sampled(tokens)
        chosen = tokens.index_select(0, scored).clamp_min(0)
        logprobs, top, top_ids = ops.token_logprobs(raw, chosen, batch.top_n)

        def spread(scores: torch.Tensor, absent: float) -> torch.Tensor:
            full = scores.new_full((len(tokens), *scores.shape[1:]), absent)
            return full.index_copy_(0, scored, scores)

        tops = (spread(top_ids, -1), spread(top, torch.nan)) if batch.top_n else ()
        return Sampled(tokens, spread(logprobs, torch.nan), *tops)

    def _gather(self, rows: np.ndarray) -> _Batch:
        key = rows.tobytes()
        if self._batch is not None and self._batch.rows == key:
            return self._batch
        states, slots = [self._rows[row] for row in rows.tolist()], self._slots[rows]
        bias = [
            (i, token, value)
            for i, s in enumerate(states)
            for token, value in s.params.logit_bias.items()
        ]
        stops = [
            (i, token, s.min_end) for i, s in enumerate(states) if s.min_end for token in s.stop_ids
        ]
        scored = [i for i, s in enumerate(states) if s.return_logprob]

        def column(values: Iterable[float], dtype: type = np.float32) -> torch.Tensor:
            return self._upload(np.array([*values], dtype))

        def floats(*names: str) -> list[torch.Tensor]:
            return [column(getattr(s.params, name) for s in states) for name in names]

        temperature, top_p, min_p = floats("temperature", "top_p", "min_p")
        top_k = column((min(s.params.top_k, self._vocab_size) for s in states), np.int32)
        factors = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        self._batch = _Batch(
            rows=key,
            greedy=not (
                bias
                or stops
                or scored
                or any(s.params.temperature or s.params.has_penalties for s in states)
            ),
            draw=(temperature, top_k, top_p, min_p, column((s.seed for s in states), np.int64)),
            penalties=[self._upload(slots), *floats(*factors)] if (slots >= 0).any() else None,
            bias=[*map(column, zip(*bias, strict=True), (np.int64, np.int64, np.float32))]
            if bias
            else None,
            stops=np.array(stops, np.int64).reshape(-1, 3).T,
            scored=column(scored, np.int64) if scored else None,
            top_n=max((s.top_logprobs for s in states if s.return_logprob), default=0),
        )
        return self._batch

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return upload(array, self._device)
