"""How tests drive a model: random steps over several sequences, and ranks as threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch


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


class ThreadGroup:
    """Ranks of one process: every collective meets at a barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots = [torch.empty(0)] * size
        self.meeting = threading.Barrier(size, timeout=60)


class ThreadCommunicator:
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


def run_ranks(size: int, work: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    group = ThreadGroup(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadCommunicator(group, rank))
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
