"""CandidateDraw: draws of several ranks from what each lists of its part of the vocabulary.

A record of a sample and rank is two kilobytes, where its logits are hundreds; the drawn ids are
those that the whole logits give (`ops.sampling_candidates`, `ops.sample_candidates`)."""

import numpy as np
import torch

from .. import ops
from ..distributed import Communicator
from ..models.base import CausalLM
from ..step_plan import StepPlan
from .draw_settings import CANDIDATES, DrawSettings

RECORD = 3 + CANDIDATES  # int64 words of a sample and rank


def has_kernels(device_kind: str) -> bool:
    """Whether the wheel has kernels for it on cpu, cuda or rocm."""
    lists = ops.has_native("sampling_candidates", "float32", device_kind)
    return lists and ops.has_native("sample_candidates", "int64", device_kind)


class CandidateDraw:
    """Of a model with a `vocabulary_shard`. Every rank calls `records`, a collective; rank 0 alone
    `draw`. Both are device operations alone: a graph may hold them."""

    def __init__(
        self,
        model: CausalLM,
        *,
        vocab_size: int,
        communicator: Communicator,
        settings: DrawSettings,
    ) -> None:
        shard = model.vocabulary_shard()
        assert shard is not None
        self._model = model
        self._first_id = shard.start
        self._vocab_size = vocab_size
        self._comm = communicator
        self._settings = settings

    @property
    def ranks(self) -> int:
        """Records of a sample."""
        return self._comm.world_size

    def begin(self, plan: StepPlan, rows: np.ndarray) -> bool:
        """Whether the step of `plan`, whose samples have these rows, is drawn from candidates: the
        same on every rank. If so, their settings become those of the calls to come."""
        if plan.has_masks or len(rows) == 0 or not self._settings.listed.are_listed(rows):
            return False
        self._settings.fill(rows)
        return True

    def records(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """hidden [S, hidden_size], positions int64 [S] -> int64 [ranks, S, RECORD] on rank 0; None
        on the others."""
        logits = self._model.shard_logits(hidden)
        own = ops.sampling_candidates(
            logits,
            *self._settings.columns(len(hidden)),
            positions,
            first_id=self._first_id,
            vocab_size=self._vocab_size,
            num_candidates=CANDIDATES,
        )
        return self._comm.gather(own)

    def draw(self, records: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """The ids of the samples of `records`, into `out` int32 [S], -1 where the logits were not
        finite."""
        ops.sample_candidates(
            records,
            *self._settings.columns(len(out)),
            positions,
            vocab_size=self._vocab_size,
            out=out,
        )
