"""What stands around a model's call: the tensors of a decode step, and its accepted tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import radix_kernels as rk

from ..harness import Case

PAGE_SIZE = 16
# (rows, tokens of context that a row may have)
SIZES = {
    "cpu": ((1, 4096), (64, 4096), (1024, 4096)),
    "cuda": ((1, 4096), (64, 4096), (256, 4096), (256, 40960)),
}


def step(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Decode steps whose rows are half as long as they may be; torch's operations beside them."""
    for rows, context in SIZES[device.type]:
        yield _fill(device, rows, context)
        yield _accept(device, rows)


@dataclass
class _DecodeStep:
    """A decode step of rows without padding. `lists` are its next tokens and what is made of it, in
    the order of `inputs`."""

    rows: int
    context: int
    device: torch.device

    def __post_init__(self) -> None:
        pages = self.context // PAGE_SIZE
        self.every = torch.arange(self.rows, dtype=torch.int32, device=self.device)
        one = torch.ones_like(self.every)
        self.entries = torch.stack([self.every, self.every, one, self.rows * one])
        self.tokens = torch.stack([self.every, 0 * one, pages * self.every, ~self.every])
        shape = (self.rows, pages)
        self.table = torch.randint(0, 1 << 20, shape, dtype=torch.int32, device=self.device)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Lengths, next tokens; kv_lens, ids, positions, slots, sample positions, page table."""
        rows, device = self.rows, self.device
        lengths = torch.full((rows + 1,), self.context // 2, dtype=torch.int32, device=device)
        next_token = torch.randint(0, 1000, (rows, 1), dtype=torch.int32, device=device)
        narrow = [torch.empty_like(self.every) for _ in range(3)]
        wide = [torch.empty_like(self.every, dtype=torch.int64) for _ in range(2)]
        return lengths, next_token, *narrow, *wide, torch.empty_like(self.table)

    def ours(self, lengths: torch.Tensor, next_token: torch.Tensor, *made: torch.Tensor) -> None:
        """One op."""
        kv_lens, ids, positions, slots, sampled, table = made
        rk.fill_step_tensors(
            self.entries,
            self.tokens,
            self.every,
            next_token,
            lengths,
            self.table,
            PAGE_SIZE,
            kv_lens=kv_lens,
            input_ids=ids,
            positions=positions,
            slot_mapping=slots,
            page_table=table,
            sample_positions=sampled,
        )

    def eager(self, lengths: torch.Tensor, next_token: torch.Tensor, *made: torch.Tensor) -> None:
        """The operations of torch that a batch without padding and chunks needs."""
        kv_lens, ids, positions, slots, sampled, table = made
        torch.add(lengths.index_select(0, self.every), 1, out=kv_lens)
        torch.index_select(lengths, 0, self.every, out=positions)
        blocks = positions // PAGE_SIZE
        found = self.table.view(-1).index_select(0, self.tokens[2] + blocks)
        torch.add(positions, found.sub_(blocks), alpha=PAGE_SIZE, out=slots)
        torch.index_select(next_token.view(-1), 0, self.every, out=ids)
        ids.clamp_(min=0)
        torch.index_select(self.table, 0, self.every, out=table)
        torch.add(positions, 1, out=sampled)


def _fill(device: torch.device, rows: int, context: int) -> Case:
    decode = _DecodeStep(rows=rows, context=context, device=device)
    return Case(
        op="fill_step_tensors",
        shape=f"{rows} rows of {context}",
        dtype=torch.int32,
        bytes=rows * (2 * 4 * (context // PAGE_SIZE) + 80),
        flops=0,
        make_inputs=decode.inputs,
        contenders={"radix": decode.ours, "torch": decode.eager},
    )


def _accept(device: torch.device, rows: int) -> Case:
    every = torch.arange(rows, dtype=torch.int32, device=device)
    one = torch.ones_like(every)

    def make() -> tuple[torch.Tensor, ...]:
        ids = torch.randint(0, 1000, (rows,), dtype=torch.int32, device=device)
        return ids, torch.zeros((rows, 1), dtype=torch.int32, device=device), 0 * one

    def eager(ids: torch.Tensor, next_token: torch.Tensor, lengths: torch.Tensor) -> None:
        next_token[:, 0].index_put_((every,), ids)
        lengths.index_add_(0, every, one)

    return Case(
        op="accept_tokens",
        shape=f"{rows} rows",
        dtype=torch.int32,
        bytes=rows * 24,
        flops=0,
        make_inputs=make,
        contenders={
            "radix": lambda ids, tokens, lengths: rk.accept_tokens(
                ids, every, every, tokens, lengths, all_drawn=True
            ),
            "torch": eager,
        },
    )
