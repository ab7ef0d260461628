"""How tests drive a model: random steps over several sequences, and ranks as threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch

from radix_runtime.distributed import Communicator
from tests.runtime.tiny_models import (
    Driver,
    Sequence,
    random_ids,
    reference_logits,
    relative_error,
)

_LENGTHS = [37, 21, 66]
_PROMPTS = [30, 1, 40]


def mixed_schedule(
    lengths: list[int], prompts: list[int], seed: int
) -> list[list[tuple[int, int]]]:
    """Steps of (sequence, tokens): each prompt in random chunks, then token by token, several
    sequences in a step, decode rows first. `prompts[i]` is where sequence i begins to decode."""
    rng = random.Random(seed)
    done = [0] * len(lengths)
    steps = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        decode, chunks = [], []
        for i, length in enumerate(lengths):
            if done[i] < length and rng.random() < 0.8:
                chunk = min(rng.randint(1, 9), prompts[i] - done[i])
                is_decode = done[i] >= prompts[i]
                (decode if is_decode else chunks).append((i, 1 if is_decode else chunk))
                done[i] += 1 if is_decode else chunk
        if decode or chunks:
            steps.append(decode + chunks)
    return steps


def worst_error(driver: Driver, reference: Any, seed: int) -> float:
    """The largest relative error of a step's logits; greedy tokens must be equal. 0 on the ranks
    that have no logits."""
    ids = [random_ids(driver.config, n, seed + i) for i, n in enumerate(_LENGTHS)]
    expected = [reference_logits(reference, x) for x in ids]
    sequences = [Sequence(row, x) for row, x in zip([4, 0, 7], ids, strict=True)]
    worst = 0.0
    for work in mixed_schedule(_LENGTHS, _PROMPTS, seed=seed):
        spans = [(i, sequences[i].computed, count) for i, count in work]
        decoding = tuple(sequences[i] for i, at, count in spans if at >= _PROMPTS[i])
        logits = driver.step([(sequences[i], n) for i, n in work], from_device=decoding)
        if logits is None:
            continue
        wanted = torch.cat([expected[i][at : at + count] for i, at, count in spans])
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1))
        worst = max(worst, relative_error(logits, wanted))
    return worst


class ThreadGroup:
    """Ranks of one process: every collective meets at a barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots = [torch.empty(0)] * size
        self.meeting = threading.Barrier(size, timeout=60)


class ThreadCommunicator(Communicator):
    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.world_size = group.size

    def _exchange(self, tensor: torch.Tensor) -> torch.Tensor:
        self.group.slots[self.rank] = tensor.clone()
        self.group.meeting.wait()
        result = torch.stack(self.group.slots)
        self.group.meeting.wait()
        return result

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self._exchange(tensor).sum(0))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchange(tensor)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        result = self._exchange(tensor)
        return result if self.rank == 0 else None


class FusingCommunicator(ThreadCommunicator):
    """One that sums, adds the residual and norms at once, as GPUs do: the norm is that of the new
    residual before it is rounded, in the memory of what was summed."""

    fused = 0  # calls
    reduced = 0

    @property
    def fuses_norms(self) -> bool:
        return True

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.reduced += 1
        return super().all_reduce(tensor)

    def all_reduce_add_rmsnorm(
        self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        assert tensor.is_contiguous() and residual.is_contiguous()
        assert tensor.data_ptr() != residual.data_ptr()
        self.fused += 1
        new = self._exchange(tensor).double().sum(0).to(tensor.dtype).double() + residual.double()
        scale = (new.square().mean(-1, keepdim=True) + eps).rsqrt()
        residual.copy_(new)
        return tensor.copy_(new * scale * weight.double())


def run_ranks(
    size: int,
    work: Callable[[Any], Any],
    communicator: type[ThreadCommunicator] = ThreadCommunicator,
) -> list[Any]:
    """work(communicator) on each rank, a thread each; their results in rank order."""
    group = ThreadGroup(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(communicator(group, rank))
        except BaseException as error:
            errors.append(error)
            group.meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
