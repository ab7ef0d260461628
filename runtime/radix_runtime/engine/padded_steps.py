"""PaddedSteps: steps padded to a shape, in parts that CUDA graphs can hold.

    body   the batch's tensors, the model, and the hidden states before each sample
    head   their logits, or the candidates that each rank lists of its part of the vocabulary
    draw   a sample of each, told to all ranks, and the rows moved on

A body depends on the number of tokens and on whether there are chunks, head and draw on the number
of samples and on what is drawn from. What one part leaves for the next lies at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from ..batch import ForwardBatch
from ..device import GraphRecorder
from ..distributed import Communicator
from ..models.base import CausalLM
from ..sampling_params import SamplingParams
from ..step_plan import RowSampling, StepPlan, decode_plan, prefill_plan
from ..step_shape import StepShape, StepShapes
from .candidate_draw import RECORD, CandidateDraw
from .graphs import StepGraphs
from .plain_steps import Drawn
from .row_state import RowState
from .sampler import Sampled, Sampler


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """What parts of steps leave for each other, on the device."""

    hidden: torch.Tensor  # [the largest number of entries, hidden_size] before each sample
    logits: torch.Tensor | None  # float32 [the largest number of samples, vocab_size] of rank 0
    ids: torch.Tensor  # int32 [the largest number of samples]
    # int64, of rank 0: the words of the records of the largest number of samples, of all ranks.
    records: torch.Tensor

    @classmethod
    def empty(
        cls,
        shapes: StepShapes,
        *,
        hidden_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        with_logits: bool,
        record_ranks: int,
    ) -> StepBuffers:
        """For steps of these shapes. `with_logits`: on rank 0. `record_ranks`: how many ranks list
        candidates for this one."""
        samples = shapes.decode_sizes[-1]
        logits = None
        if with_logits:
            logits = torch.empty(samples, vocab_size, dtype=torch.float32, device=device)
        return cls(
            hidden=torch.empty(shapes.max_batch, hidden_size, dtype=dtype, device=device),
            logits=logits,
            ids=torch.empty(samples, dtype=torch.int32, device=device),
            records=torch.empty(record_ranks * samples * RECORD, dtype=torch.int64, device=device),
        )


class PaddedSteps:
    """Runs the step that `batch` was last loaded with, which has a shape, on the engine's stream.
    Every rank calls the same methods in the same order: they contain collectives. `sampler` is rank
    0's alone; `candidates` is None where draws are from whole logits."""

    def __init__(
        self,
        shapes: StepShapes,
        model: CausalLM,
        *,
        batch: ForwardBatch,
        state: RowState,
        sampler: Sampler | None,
        communicator: Communicator,
        candidates: CandidateDraw | None,
        buffers: StepBuffers,
        recorder: GraphRecorder | None,
    ) -> None:
        """Without a `recorder` no graphs are captured."""
        self.shapes = shapes
        self.graphs = StepGraphs(recorder)
        self._model = model
        self._batch = batch
        self._state = state
        self._sampler = sampler
        self._comm = communicator
        self._candidates = candidates
        self._by_candidates = False
        self._hidden = buffers.hidden
        self._logits = buffers.logits
        self._ids = buffers.ids
        self._records = buffers.records

    @property
    def _shape(self) -> StepShape:
        assert self._batch.shape is not None
        return self._batch.shape

    def forward(self, *, by_candidates: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Body and head. The hidden states of all tokens, and those before each sample.
        `by_candidates`: the draw will be from candidates."""
        shape = self._shape
        self._by_candidates = by_candidates
        hidden = self.graphs.run(("body", shape.tokens, shape.has_chunks), self._body)
        if shape.samples:
            head = self._list_candidates if by_candidates else self._head
            self.graphs.run(("head", shape.samples, by_candidates), partial(head, shape.samples))
        return hidden, self._hidden[: self._batch.num_samples]

    def draw(self, hidden: torch.Tensor, rows: np.ndarray, bitmask: torch.Tensor | None) -> Drawn:
        """Samples from what `forward` has left, and moves the rows on. `rows` and `bitmask` as
        `Sampler.sample` takes them."""
        count = len(rows)
        padded = self._shape.samples
        sampler = self._sampler
        if self._by_candidates:
            self.graphs.run(("draw", padded, True), partial(self._draw_candidates, padded))
            return Drawn(Sampled(self._ids[:count]))
        if count and sampler is not None and (bitmask is not None or not sampler.is_plain(rows)):
            assert self._logits is not None
            positions = self._batch.sample_positions[:count]
            sampled = sampler.sample(self._logits[:count], rows, positions, bitmask)
            self._ids[:count].copy_(sampled.ids)
            self._settle(padded)
            return Drawn(sampled)
        if count:
            self.graphs.run(("draw", padded, False), partial(self._draw, padded))
        return Drawn(Sampled(self._ids[:count]))

    def fail_draw(self, hidden: torch.Tensor) -> Drawn:
        """Instead of `draw`, on rank 0: every sample is -1, as for logits that are not finite."""
        padded = self._shape.samples
        self._ids[:padded].fill_(-1)
        if padded:
            self._settle(padded)
        return Drawn(Sampled(self._ids[: len(hidden)]))

    def _body(self) -> torch.Tensor:
        batch = self._batch
        batch.fill(self._state.next_token, self._state.committed_len)
        hidden: torch.Tensor = self._model(batch)
        samples = self._hidden[: len(batch.logit_rows)]
        torch.index_select(hidden, 0, batch.logit_rows, out=samples)
        return hidden

    def _head(self, samples: int) -> None:
        out = None if self._logits is None else self._logits[:samples]
        logits = self._model.compute_logits(self._hidden[:samples], out)
        if logits is not None and out is not None and logits.data_ptr() != out.data_ptr():
            out.copy_(logits)

    def _list_candidates(self, samples: int) -> None:
        assert self._candidates is not None
        positions = self._batch.sample_positions[:samples]
        records = self._candidates.records(self._hidden[:samples], positions)
        if records is not None:
            self._records_of(samples).copy_(records)

    def _records_of(self, samples: int) -> torch.Tensor:
        """Those of all ranks, at the address where the head leaves them."""
        assert self._candidates is not None
        ranks = self._candidates.ranks
        return self._records[: ranks * samples * RECORD].view(ranks, samples, RECORD)

    def _draw_candidates(self, samples: int) -> None:
        if self._sampler is not None:
            assert self._candidates is not None
            positions = self._batch.sample_positions[:samples]
            records = self._records_of(samples)
            self._candidates.draw(records, positions, out=self._ids[:samples])
        self._settle(samples, all_drawn=True)

    def _draw(self, samples: int) -> None:
        if self._sampler is not None and self._logits is not None:
            positions = self._batch.sample_positions[:samples]
            self._sampler.draw(self._logits[:samples], positions, out=self._ids[:samples])
        # Without masks nobody is late; but other ranks do not know whether rank 0 has some.
        self._settle(samples, all_drawn=self._comm.world_size == 1)

    def _settle(self, samples: int, *, all_drawn: bool = False) -> None:
        """Tells the other ranks the ids, of padding too, and moves the rows on."""
        ids = self._ids[:samples]
        self._comm.broadcast(ids)
        self._state.accept(self._batch, ids, all_drawn=all_drawn)

    def capture_plans(self) -> list[StepPlan]:
        """A step of each shape, without page deltas, drawn from whole logits. Those with chunks are
        first, and larger ones before smaller ones, whose graphs then find their memory in the
        pool."""
        rows = range(self._batch.max_batch)
        length = min(2, self._batch.max_context)
        decodes = [decode_plan(rows[:n], [length] * n) for n in self.shapes.decode_sizes]
        chunks = [self._chunk_plan(n) for n in self.shapes.token_sizes]
        plans = [*reversed(chunks), *reversed(decodes)]
        for plan in plans:
            plan.has_masks = True  # so that candidates are not enough
        return plans

    def candidate_plans(self) -> list[StepPlan]:
        """The decode steps of `capture_plans` once more, of rows that are drawn from candidates;
        none where nothing is."""
        if self._candidates is None:
            return []
        plans = self.capture_plans()[len(self.shapes.token_sizes) :]
        for plan in plans:
            plan.has_masks = False
            plan.new_rows = [
                RowSampling(row=row, seed=0, params=SamplingParams(temperature=0))
                for row in plan.rows.tolist()
            ]
        return plans

    def _chunk_plan(self, tokens: int) -> StepPlan:
        """Prompts of so many tokens together, none longer than a row may be."""
        longest = self._batch.max_context
        prompts = [
            np.zeros(min(longest, tokens - start), np.int32) for start in range(0, tokens, longest)
        ]
        return prefill_plan(range(len(prompts)), prompts)
