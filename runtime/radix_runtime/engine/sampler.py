"""Logits to token ids, with per-row state that outlives the step.

SamplingParams has the order of effects. Log-probabilities come from the logits as the model gave
them. A draw is keyed by (seed of the row, absolute position of the token), so it depends on neither
batch nor rank. State is kept by row of the request table; what a batch needs of it is gathered once
and kept while the batch stays the same."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from .. import ops
from ..device import upload
from ..messages import unpack_ids
from ..step_plan import RowSampling
from .draw_settings import DrawSettings, needs_all_logits

_IN_PROMPT = 1 << 30
_FIRST_COUNT_SLOTS = 4

# One record a row, beside those of DrawSettings. `slot`: row of the penalty counts, -1 without
# penalties. `min_end`: position from which stop ids may be sampled. `plain`: nothing but the
# largest logit is asked for.
_ROW = np.dtype(
    [
        ("slot", np.int32),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("min_end", np.int64),
        ("scored", np.bool_),
        ("top_n", np.int32),
        ("plain", np.bool_),
    ]
)


class Sampled(NamedTuple):
    """Device tensors of S samples: ids int32 [S], -1 where the logits were not finite; the rest is
    None when no row asks: logprobs float32 [S] (NaN where not asked for), top_ids int32 and
    top_logprobs float32 [S, top_n of the step]."""

    ids: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


@dataclass(slots=True)
class _Batch:
    """State of the rows of one batch; tensors are on the device."""

    key: bytes  # the rows, one a sample
    edits: ops.LogitEdits | None
    penalty_slots: torch.Tensor | None  # int32 [S]; None: no row has penalties
    scored: bool  # some row wants logprobs
    unscored: torch.Tensor | None  # int64: samples that want none although another does
    top_n: int


class Sampler:
    """Sampling state of `max_rows` rows, for steps of at most `max_samples` samples. Used by one
    thread, on the engine's stream. `settings`: how the rows are drawn."""

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device, *, max_samples: int
    ) -> None:
        self.settings = DrawSettings(
            max_rows=max_rows, vocab_size=vocab_size, device=device, max_samples=max_samples
        )
        self._vocab_size = vocab_size
        self._device = device
        self._rows = np.zeros(max_rows, _ROW)
        self._rows["slot"] = -1
        self._rows["plain"] = True
        self._stop_ids: list[list[int]] = [[] for _ in range(max_rows)]
        self._bias: list[dict[int, float]] = [{} for _ in range(max_rows)]
        # [slots, V]: bit 30 of a word is "in the prompt", the rest how often it was generated.
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._free_slots: list[int] = []
        self._batch: _Batch | None = None
        self._greedy: tuple[bytes, bool] | None = None  # rows, and what `is_greedy` says of them

    def admit(self, state: RowSampling) -> None:
        """Replaces all state of `state.row`."""
        self.settings.admit(state)
        params = state.params
        row = self._rows[state.row]
        if row["slot"] >= 0:
            self._free_slots.append(int(row["slot"]))
        row["slot"] = self._fill_counts(state) if params.has_penalties else -1
        row["repetition"] = params.repetition_penalty
        row["frequency"] = params.frequency_penalty
        row["presence"] = params.presence_penalty
        row["min_end"] = state.min_end if state.stop_ids else 0
        row["scored"] = state.return_logprob
        row["top_n"] = state.top_logprobs if state.return_logprob else 0
        row["plain"] = params.temperature == 0 and not needs_all_logits(state)
        self._stop_ids[state.row] = state.stop_ids
        self._bias[state.row] = params.logit_bias
        self._batch = None
        self._greedy = None

    def _fill_counts(self, state: RowSampling) -> int:
        """A slot of the counts, filled with the row's prompt bits and generated tokens."""
        if not self._free_slots:
            old = self._counts
            more = max(_FIRST_COUNT_SLOTS, len(old))
            self._counts = torch.cat([old, old.new_zeros((more, self._vocab_size))])
            self._free_slots = list(range(len(old), len(old) + more))
        slot = self._free_slots.pop()
        words = np.bincount(unpack_ids(state.output_ids), minlength=self._vocab_size)
        words = words.astype(np.int32)
        words[unpack_ids(state.prompt_ids)] |= _IN_PROMPT
        self._counts[slot] = self._upload(words)
        return slot

    def is_greedy(self, rows: np.ndarray) -> bool:
        """Whether `sample` for these rows would only give the id of the largest logit of each, as
        the model gives it. `rows` is that of `sample`."""
        key = rows.tobytes()
        if self._greedy is None or self._greedy[0] != key:
            self._greedy = (key, bool(self._rows["plain"][rows].all()))
        return self._greedy[1]

    def sample(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        positions: torch.Tensor,
        bitmask: torch.Tensor | None = None,
    ) -> Sampled:
        """One token for each row of `logits` float32 [S, V].

        `rows` int32 [S], on the host, is the request-table row of each sample. `positions` int64
        [S] is where each token will stand in its sequence. `bitmask` int32 [S, ceil(V / 32)]: bit
        `id % 32` of word `id // 32` allows an id. Raises ValueError if a row with penalties has
        more than one sample: its counts must know every token before."""
        batch = self._gather(rows)
        edits = batch.edits
        if bitmask is not None:
            edits = replace(edits or ops.LogitEdits(), bitmask=bitmask)
        columns = (*self.settings.columns(len(rows)), positions)
        if batch.scored:
            ids, logprobs, top_logprobs, top_ids = ops.top_k_top_p_sampling_with_logprobs(
                logits, *columns, top_n=batch.top_n, edits=edits
            )
            if batch.unscored is not None:
                logprobs.index_fill_(0, batch.unscored, torch.nan)
                top_logprobs.index_fill_(0, batch.unscored, torch.nan)
                top_ids.index_fill_(0, batch.unscored, -1)
            sampled = Sampled(ids, logprobs)
            if batch.top_n:
                sampled = sampled._replace(top_ids=top_ids, top_logprobs=top_logprobs)
        else:
            # Rows of temperature 0 cost no more than an argmax.
            sampled = Sampled(ops.top_k_top_p_sampling(logits, *columns, edits=edits))
        if batch.penalty_slots is not None:
            ops.count_tokens_inplace(self._counts, batch.penalty_slots, sampled.ids)
        return sampled

    def is_plain(self, rows: np.ndarray) -> bool:
        """Whether `sample` for these rows is a draw from the logits as they are, without
        log-probabilities: then `draw` gives the same. Makes their settings those of `draw`."""
        batch = self._gather(rows)
        return batch.edits is None and not batch.scored

    def draw(self, logits: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """A draw from each row of `logits` float32 [S, V], by the settings at fixed addresses that
        `is_plain` has filled, into `out` int32 [S]; rows beyond its samples draw anything. Device
        operations alone: a graph may hold them."""
        columns = (*self.settings.columns(len(logits)), positions)
        ops.top_k_top_p_sampling(logits, *columns, out=out)

    def _gather(self, rows: np.ndarray) -> _Batch:
        self.settings.fill(rows)
        key = rows.tobytes()
        if self._batch is not None and self._batch.key == key:
            return self._batch
        state = self._rows[rows]
        penalties = self._gather_penalties(rows, state)
        edits = ops.LogitEdits(
            bias=self._gather_bias(rows),
            penalties=penalties,
            min_tokens=self._gather_min_tokens(rows, state),
        )
        scored = state["scored"]
        unscored = np.flatnonzero(~scored)
        self._batch = _Batch(
            key=key,
            edits=edits if any(part is not None for part in edits.flat()) else None,
            penalty_slots=None if penalties is None else penalties[1],
            scored=bool(scored.any()),
            unscored=self._upload(unscored) if len(unscored) else None,
            top_n=int(state["top_n"].max(initial=0)),
        )
        return self._batch

    def _gather_penalties(
        self, rows: np.ndarray, state: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """The counts, a row's slot in them, and its three penalties."""
        penalised = rows[state["slot"] >= 0]
        if len(penalised) == 0:
            return None
        if len(np.unique(penalised)) < len(penalised):
            raise ValueError("a row with penalties takes one sample a step")
        return (
            self._counts,
            self._column(state, "slot"),
            self._column(state, "repetition"),
            self._column(state, "frequency"),
            self._column(state, "presence"),
        )

    def _gather_bias(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Ids int32 [S, M], a row's list ended by -1, and values float32 [S, M]."""
        biases = [self._bias[row] for row in rows.tolist()]
        longest = max(len(bias) for bias in biases)
        if longest == 0:
            return None
        ids = np.full((len(rows), longest), -1, np.int32)
        values = np.zeros((len(rows), longest), np.float32)
        for sample, bias in enumerate(biases):
            ids[sample, : len(bias)] = list(bias.keys())
            values[sample, : len(bias)] = list(bias.values())
        return self._upload(ids), self._upload(values)

    def _gather_min_tokens(
        self, rows: np.ndarray, state: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Stop ids int32 [S, M], a row's list ended by -1, and the position int64 [S] before which
        they are masked."""
        if not state["min_end"].any():
            return None
        stop_ids = [self._stop_ids[row] for row in rows.tolist()]
        ids = np.full((len(rows), max(len(stops) for stops in stop_ids)), -1, np.int32)
        for sample, stops in enumerate(stop_ids):
            ids[sample, : len(stops)] = stops
        return self._upload(ids), self._column(state, "min_end")

    def _column(self, state: np.ndarray, name: str) -> torch.Tensor:
        return self._upload(state[name].copy())

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return upload(array, self._device)
