"""Greedy rows under masks: without logits where that is certain, and always the same ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from radix_runtime.engine.plain_steps import PlainSteps

VOCAB = 1000
WORDS = -(-VOCAB // 32)


class Head:
    """The identity: hidden states are logits. Counts how it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        self.asked.append("ids")
        return hidden.argmax(-1).to(torch.int32)

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        self.asked.append("logits")
        return hidden


class Greedy:
    """A sampler whose rows are all greedy."""

    def is_greedy(self, rows: np.ndarray) -> bool:
        return True

    def sample(self, logits: torch.Tensor, rows: Any, positions: Any, bitmask: Any) -> Any:
        bits = np.unpackbits(bitmask.numpy().view(np.uint8), axis=1, bitorder="little")
        allowed = torch.from_numpy(bits[:, :VOCAB].astype(bool))
        return SimpleNamespace(ids=logits.masked_fill(~allowed, -torch.inf).argmax(-1).int())


def run(hidden: torch.Tensor, masks: np.ndarray) -> tuple[list[int], list[str]]:
    head = Head()
    steps = PlainSteps(
        head,  # type: ignore[arg-type]
        batch=SimpleNamespace(sample_positions=torch.zeros(len(hidden))),  # type: ignore[arg-type]
        state=None,  # type: ignore[arg-type]
        sampler=Greedy(),  # type: ignore[arg-type]
        communicator=None,  # type: ignore[arg-type]
    )
    bitmask = torch.from_numpy(masks.view(np.int32))
    sampled = steps._sample(hidden, np.zeros(len(hidden), np.int32), bitmask)
    return sampled.ids.tolist(), head.asked


@pytest.mark.parametrize("rows", [1, 3])
def test_the_same_ids_by_the_shorter_way(rows: int) -> None:
    torch.manual_seed(torch.seed() % 2**31)
    hidden = torch.randn(rows, VOCAB)
    best = hidden.argmax(-1).tolist()
    full = np.full((rows, WORDS), 0xFFFFFFFF, np.uint32)
    assert run(hidden, full) == (best, ["ids"])

    without_best = full.copy()
    last = best[-1]
    without_best[-1, last // 32] &= ~np.uint32(1 << last % 32)
    ids, asked = run(hidden, without_best)
    expected = hidden.clone()
    expected[-1, last] = -torch.inf
    assert (ids, asked) == (expected.argmax(-1).tolist(), ["ids", "logits"])

    sparse = full.copy()
    sparse[0] = 0
    sparse[0, 3] = 0b100
    ids, asked = run(hidden, sparse)
    assert (ids[0], asked) == (98, ["logits"])
