"""PlainSteps: steps run as they are, without padding and graphs."""

from dataclasses import dataclass

import numpy as np
import torch

from ..batch import ForwardBatch
from ..distributed import Communicator
from ..models.base import CausalLM
from .candidate_draw import CandidateDraw
from .row_state import RowState
from .sampler import Sampled, Sampler


@dataclass(slots=True)
class Drawn:
    """A step's samples. `counts`, int32 [entries that sample], is how many of each entry are
    accepted; None where every entry has one."""

    sampled: Sampled
    counts: torch.Tensor | None = None


class PlainSteps:
    """Runs the step that `batch` was last loaded with, on the engine's stream. Every rank calls the
    same methods in the same order: they contain collectives. `sampler` is rank 0's alone;
    `candidates` is None where draws are from whole logits."""

    def __init__(
        self,
        model: CausalLM,
        *,
        batch: ForwardBatch,
        state: RowState,
        sampler: Sampler | None,
        communicator: Communicator,
        candidates: CandidateDraw | None = None,
        logits: torch.Tensor | None = None,
    ) -> None:
        """`logits`: memory, float32 [the largest number of samples, vocab_size], for those of a
        step."""
        self._model = model
        self._batch = batch
        self._state = state
        self._sampler = sampler
        self._comm = communicator
        self._candidates = candidates
        self._by_candidates = False
        self._logits = logits

    def forward(self, *, by_candidates: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden states of all tokens, and those before each sample. `by_candidates`: the draw
        will be from candidates."""
        self._by_candidates = by_candidates
        batch = self._batch
        batch.fill(self._state.next_token, self._state.committed_len)
        hidden: torch.Tensor = self._model(batch)
        if batch.samples_every_token:
            return hidden, hidden  # both are only read, and new in every step
        return hidden, hidden.index_select(0, batch.logit_rows)

    def draw(self, hidden: torch.Tensor, rows: np.ndarray, bitmask: torch.Tensor | None) -> Drawn:
        """Samples from `hidden`, the second that `forward` gave, and moves the rows on. `rows` and
        `bitmask` as `Sampler.sample` takes them."""
        return self._settle(self._sample(hidden, rows, bitmask))

    def fail_draw(self, hidden: torch.Tensor) -> Drawn:
        """Instead of `draw`, on rank 0: every sample is -1, as for logits that are not finite."""
        count = len(hidden)
        if count:
            self._compute_logits(hidden)  # the other ranks draw: it is a collective
        ids = torch.full((count,), -1, dtype=torch.int32, device=hidden.device)
        return self._settle(Sampled(ids))

    def _sample(
        self, hidden: torch.Tensor, rows: np.ndarray, bitmask: torch.Tensor | None
    ) -> Sampled:
        """Rank 0's samples; on the others memory for the ids, which are to be received."""
        if self._by_candidates:
            return Sampled(self._ids_of_candidates(hidden))
        count = len(rows)
        sampler = self._sampler
        if sampler is not None and count and sampler.is_greedy(rows):
            ids = self._greedy_ids(hidden, bitmask)
            if ids is not None:
                return Sampled(ids)
        if count:
            logits = self._compute_logits(hidden)
            if logits is not None and sampler is not None:
                positions = self._batch.sample_positions[:count]
                return sampler.sample(logits, rows, positions, bitmask)
        return Sampled(torch.empty(count, dtype=torch.int32, device=hidden.device))

    def _ids_of_candidates(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self._candidates is not None
        count = len(hidden)
        positions = self._batch.sample_positions[:count]
        ids = torch.empty(count, dtype=torch.int32, device=hidden.device)
        records = self._candidates.records(hidden, positions)
        if records is not None:
            self._candidates.draw(records, positions, out=ids)
        return ids

    def _greedy_ids(
        self, hidden: torch.Tensor, bitmask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """The likeliest ids without logits; None where the model does not give them so, or where
        the masks make it unlikely, or forbid, that they are the ones."""
        if bitmask is None:
            return self._model.greedy_tokens(hidden)
        if not bitmask.is_cpu or not _allows_most(bitmask.numpy()):
            return None
        ids = self._model.greedy_tokens(hidden)
        return ids if ids is not None and _allows(bitmask.numpy(), ids.numpy()) else None

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        out = None if self._logits is None else self._logits[: len(hidden)]
        return self._model.compute_logits(hidden, out)

    def _settle(self, sampled: Sampled) -> Drawn:
        """Tells the other ranks the ids and moves the rows on."""
        if self._batch.num_samples == 0:
            return Drawn(sampled)
        self._comm.broadcast(sampled.ids)
        return Drawn(sampled, self._state.accept(self._batch, sampled.ids))


def _allows_most(masks: np.ndarray) -> bool:
    """Whether each of `masks`, int32 [S, words], allows more than half of the ids, as far as every
    16th word tells."""
    words = np.ascontiguousarray(masks[:, ::16])
    bits = np.unpackbits(words.view(np.uint8), axis=1)
    return bool((2 * bits.sum(axis=1) > bits.shape[1]).all())


def _allows(masks: np.ndarray, ids: np.ndarray) -> bool:
    """Whether each of `ids`, int32 [S], is in its mask; an id of -1 is in none."""
    words = masks[np.arange(len(ids)), ids // 32]
    return bool(((ids >= 0) & (words >> (ids % 32) & 1)).all())
