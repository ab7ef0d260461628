"""ForwardBatch: one step on the device.

All tensors have addresses that never change (a captured graph replays on them); a step's tensors
are their first elements. One packed int32 upload carries a StepPlan:

    rows [B] | cu_seqlens_q [B+1] | kv_lens [B] | logit_rows [S] | sample_rows [S] |
    sample_positions [S] | tokens [5, T]: prompt id or -1, row of next_token, position, entry of
    the page table, offset in the page | page deltas [2, D]: entry of the page table, page

The parts before `tokens` sit at fixed offsets and are used where they arrive; the rest is input of
the few device operations that fill input_ids, positions, slot_mapping and page_table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .device import Device
from .memory.kv_pool import KVPool
from .step_plan import FROM_PROMPT, StepPlan

_MAX_PACKED_DELTAS = 16384


class ForwardBatch:
    """Device view of a StepPlan. Tensors (B, T: padded counts; S: sampled entries):

    input_ids int32 [T], positions int32 [T], slot_mapping int64 [T] (-1: do not store),
    cu_seqlens_q int32 [B+1], kv_lens int32 [B], page_table int32 [B, at least the longest row's],
    logit_rows int32 [S] (token index whose hidden state gives the next token), sample_rows
    int32 [S] (its table row), sample_positions int32 [S] (absolute position of the new token).

    Entries 0 .. num_decode-1 have one token each; the others are prefill chunks. Counts, maxima
    and `query_lens_host`, `kv_lens_host` are host values. A padding row has one token at slot -1
    and sees one slot of the dummy page. `metadata` belongs to the attention backend.

    Owns the device page table [max_rows + 1, max_pages]; row `max_rows` is all dummy pages. Used
    on the engine stream only.
    """

    def __init__(
        self, device: Device, kv_pool: KVPool, *, max_tokens: int, max_batch: int, max_rows: int, max_context: int
    ) -> None:
        self.device = device
        self.kv_pool = kv_pool
        self.max_tokens, self.max_batch, self.max_rows = max_tokens, max_batch, max_rows
        self.max_context = max_context
        self.max_pages = -(-max_context // kv_pool.page_size)
        self._table = self._empty((max_rows + 1, self.max_pages)).fill_(kv_pool.dummy_page)
        if max(self._table.numel(), (kv_pool.num_pages + 1) * kv_pool.page_size) >= 2**31:
            raise ValueError("the page table or the KV pool has more entries than int32 can count")
        b = max_batch
        self._offsets = (0, b, 2 * b + 1, 3 * b + 1, 4 * b + 1, 5 * b + 1)
        size = 6 * max_batch + 1 + 5 * max_tokens + 2 * _MAX_PACKED_DELTAS
        self._packed = self._empty((size,))
        self._input_ids = self._empty((max_tokens,))
        self._positions = self._empty((max_tokens,))
        self._slot_mapping = self._empty((max_tokens,), torch.int64)
        self._page_table = self._empty((max_batch * self.max_pages,))
        self.metadata: Any = None

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device.torch_device)

    def load(self, plan: StepPlan, next_token: torch.Tensor, padded_batch: int = 0) -> None:
        """Makes this the batch of `plan`. Applies its page deltas first.

        `next_token` int32 [max_rows + 1]: the last sampled token of each table row (-1, a failed
        draw, is read as id 0). `padded_batch` > B pads a decode step with dummy rows. Copies from
        host memory of its own, so `plan` may be reused at once. Does not synchronise.
        """
        self._count(plan, padded_batch)
        fixed, tokens, deltas = self._pack_rows(plan), self._pack_tokens(plan), self._deltas(plan)
        inside = deltas[:, :_MAX_PACKED_DELTAS]
        self._upload(self._packed, np.concatenate([fixed, tokens.ravel(), inside.ravel()]))
        first, middle = len(fixed), len(fixed) + tokens.size
        self._apply_deltas(self._packed[middle : middle + inside.size])
        if inside.size < deltas.size:
            rest = deltas[:, _MAX_PACKED_DELTAS:].ravel()
            self._apply_deltas(self._upload(self._empty((rest.size,)), rest))
        self._cut_fixed()
        self._fill_tokens(self._packed[first:middle].view(5, -1), next_token)
        self._fill_page_table()
        self.metadata = None

    def _count(self, plan: StepPlan, padded_batch: int) -> None:
        self.num_tokens, self.batch_size = plan.num_tokens, plan.batch_size
        self.num_decode = plan.num_decode
        padding = max(0, padded_batch - plan.batch_size)
        if padding and plan.num_decode != plan.batch_size:
            raise ValueError("only a decode step can be padded")
        self.padded_batch = plan.batch_size + padding
        self.padded_tokens = plan.num_tokens + padding
        self.num_samples = len(plan.sample_index)
        pad = np.ones(padding, np.int32)
        self.query_lens_host = np.concatenate([plan.query_len, pad])
        self.kv_lens_host = np.concatenate([plan.kv_len, pad])
        self.max_query_len = int(self.query_lens_host.max(initial=0))
        self.max_kv_len = int(self.kv_lens_host.max(initial=0))
        for what, got, limit in (
            ("tokens", self.padded_tokens, self.max_tokens),
            ("rows", self.padded_batch, self.max_batch),
            ("tokens of context", self.max_kv_len, self.max_context),
        ):
            if got > limit:
                raise ValueError(f"step {plan.step_id} has {got} {what}, the batch holds {limit}")

    def _pack_rows(self, plan: StepPlan) -> np.ndarray:
        padding = self.padded_batch - self.batch_size
        rows = np.concatenate([plan.rows, np.full(padding, self.max_rows, np.int32)])
        cu = np.zeros(self.padded_batch + 1, np.int32)
        np.cumsum(self.query_lens_host, out=cu[1:])
        self._rows_host, self._starts_host = rows, cu[:-1]
        sample = plan.sample_index
        kv = self.kv_lens_host
        parts = (rows, cu, kv, cu[sample + 1] - 1, rows[sample], kv[sample])
        fixed = np.zeros(6 * self.max_batch + 1, np.int32)
        for offset, values in zip(self._offsets, parts, strict=True):
            fixed[offset : offset + len(values)] = values
        return fixed

    def _pack_tokens(self, plan: StepPlan) -> np.ndarray:
        query, page_size = self.query_lens_host, self.kv_pool.page_size
        tokens = np.zeros((5, self.padded_tokens), np.int32)
        ids, rows, positions, entries, offsets = tokens
        ids[: self.num_tokens][plan.source == FROM_PROMPT] = plan.input_ids
        ids[: self.num_tokens][plan.source != FROM_PROMPT] = -1
        np.maximum(plan.source, 0, out=rows[: self.num_tokens])
        first = self.kv_lens_host - query - self._starts_host
        np.add(np.arange(self.padded_tokens), np.repeat(first, query), out=positions, casting="unsafe")
        np.divmod(positions, page_size, out=(entries, offsets))
        entries += np.repeat(self._rows_host * self.max_pages, query)
        return tokens

    def _deltas(self, plan: StepPlan) -> np.ndarray:
        """Of an entry that is named twice the last page: a device scatter promises no order."""
        entries = plan.page_rows * self.max_pages + plan.page_index
        unique, last = np.unique(entries[::-1], return_index=True)
        return np.stack([unique, plan.page_ids[::-1][last]])

    def _upload(self, target: torch.Tensor, values: np.ndarray) -> torch.Tensor:
        host = self.device.host_empty(len(values), dtype=torch.int32)
        host.numpy()[:] = values
        target = target[: len(values)]
        return target.copy_(host, non_blocking=True)

    def _apply_deltas(self, deltas: torch.Tensor) -> None:
        if len(deltas):
            entries, pages = deltas.view(2, -1)
            self._table.view(-1).index_put_((entries,), pages)

    def _cut_fixed(self) -> None:
        b, s = self.padded_batch, self.num_samples
        sizes = (b, b + 1, b, s, s, s)
        cut = [self._packed[o : o + n] for o, n in zip(self._offsets, sizes, strict=True)]
        self.rows, self.cu_seqlens_q, self.kv_lens = cut[:3]
        self.logit_rows, self.sample_rows, self.sample_positions = cut[3:]

    def _fill_tokens(self, tokens: torch.Tensor, next_token: torch.Tensor) -> None:
        count = self.padded_tokens
        ids, rows, positions, entries, offsets = tokens
        sampled = next_token.index_select(0, rows).clamp_(min=0)
        self.input_ids = self._input_ids[:count]
        torch.where(ids < 0, sampled, ids, out=self.input_ids)
        self.positions = self._positions[:count].copy_(positions)
        pages = self._table.view(-1).index_select(0, entries)
        self.slot_mapping = self._slot_mapping[:count]
        torch.add(offsets, pages, alpha=self.kv_pool.page_size, out=self.slot_mapping)
        if count > self.num_tokens:
            self.slot_mapping[self.num_tokens :].fill_(-1)

    def _fill_page_table(self) -> None:
        """On the CPU only as wide as the longest row needs. On a GPU as wide as can be: captured
        graphs need one shape, and kernels may cut their work by the width."""
        width = self.max_pages
        if self.device.is_cpu:
            width = -(-self.max_kv_len // self.kv_pool.page_size)
        view = self._page_table[: self.padded_batch * width]
        self.page_table = view.view(self.padded_batch, width)
        torch.index_select(self._table[:, :width], 0, self.rows, out=self.page_table)
