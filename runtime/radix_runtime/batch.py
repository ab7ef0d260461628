"""ForwardBatch: one step on the device.

All tensors have fixed addresses; a step's are their first elements. One packed int32 upload carries
a StepPlan."""

from typing import Any

import numpy as np
import torch

from .device import Device
from .errors import ConfigError
from .memory.kv_pool import KVPool
from .step_plan import StepPlan

# The upload's parts. The first is used where it arrives; from the rest a few device operations make
# the other tensors.
#
#   [5, max_batch + 1]  rows, cu_seqlens_q, kv_lens, logit_rows, sample_rows
#   [5, T]              prompt id or -1, row of next_token, position, entry of the page table, offset in the page
#   [2, D]              page deltas: entry of the page table, page
_MAX_PACKED_DELTAS = 16384  # larger D go up by themselves


class ForwardBatch:
    """Device view of a StepPlan. Tensors (B entries, T tokens, S sampled entries):

    input_ids int32 [T], positions int32 [T], slot_mapping int64 [T], cu_seqlens_q int32 [B+1],
    kv_lens int32 [B], page_table int32 [B, at least the longest row's], logit_rows int32 [S] (token
    index whose hidden state gives the next token), sample_rows int32 [S] (its table row).

    Entries 0 .. num_decode-1 have one token each; the others are prefill chunks. Counts, maxima and
    `query_lens_host`, `kv_lens_host` are host values. `metadata` belongs to the attention backend.

    Owns the device page table [max_rows, max_pages]; what was never assigned is the dummy page."""

    def __init__(
        self,
        device: Device,
        kv_pool: KVPool,
        *,
        max_tokens: int,
        max_batch: int,
        max_rows: int,
        max_context: int,
    ) -> None:
        self.device, self.kv_pool = device, kv_pool
        self.max_tokens, self.max_batch, self.max_rows, self.max_context = (
            max_tokens,
            max_batch,
            max_rows,
            max_context,
        )
        self.max_pages = -(-max_context // kv_pool.page_size)
        self._table = self._empty(max_rows, self.max_pages).fill_(kv_pool.dummy_page)
        if max(self._table.numel(), (kv_pool.num_pages + 1) * kv_pool.page_size) >= 2**31:
            flags = "see --max-total-tokens, --max-running-requests and --context-length"
            raise ConfigError(
                f"the page table or the KV pool has more entries than int32 can count; {flags}"
            )
        self._packed = self._empty(5 * (max_batch + 1) + 5 * max_tokens + 2 * _MAX_PACKED_DELTAS)
        self._input_ids, self._positions = self._empty(max_tokens), self._empty(max_tokens)
        self._slot_mapping = self._empty(max_tokens).long()
        self._page_table = self._empty(max_batch * self.max_pages)
        self.metadata: Any = None

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.device.torch_device)

    def load(self, plan: StepPlan, next_token: torch.Tensor) -> None:
        """Makes this the batch of `plan`; its page deltas come first. Copies `plan`; does not
        synchronise.

        `next_token` int32 [max_rows + 1, 1]: the last sampled token of each table row (-1, a failed draw,
        is read as id 0)."""
        self.metadata = None
        fixed, tokens = self._layout(plan)
        # Of an entry that is named twice the last page: a device scatter promises no order.
        entries, last = np.unique(
            (plan.page_rows * self.max_pages + plan.page_index)[::-1], return_index=True
        )
        deltas = np.stack([entries, plan.page_ids[::-1][last]])
        inside, rest = deltas[:, :_MAX_PACKED_DELTAS], deltas[:, _MAX_PACKED_DELTAS:]
        lists, token_parts, *changes = self._upload(self._packed, fixed, tokens, inside)
        if rest.size:
            changes += self._upload(self._empty(rest.size), rest)
        for where, pages in changes:
            self._table.view(-1).index_put_((where,), pages)
        b, s = self.batch_size, int(plan.num_samples.sum())
        cut = (part[:n] for part, n in zip(lists, (b, b + 1, b, s, s), strict=True))
        self.rows, self.cu_seqlens_q, self.kv_lens, self.logit_rows, self.sample_rows = cut
        self._fill_tokens(token_parts, next_token)
        # On the CPU only as wide as the longest row needs. On a GPU as wide as can be: captured
        # graphs need one shape, and kernels may cut their work by the width.
        width = (
            -(-self.max_kv_len // self.kv_pool.page_size) if self.device.is_cpu else self.max_pages
        )
        view = self._page_table[: b * width].view(b, width)
        self.page_table = torch.index_select(self._table[:, :width], 0, self.rows, out=view)

    def _layout(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        self.num_tokens, self.batch_size, self.num_decode = (
            plan.num_tokens,
            len(plan.rows),
            plan.num_decode,
        )
        query, kv = self.query_lens_host, self.kv_lens_host = (
            plan.query_len.copy(),
            plan.kv_len.copy(),
        )
        self.max_query_len, self.max_kv_len = int(query.max(initial=0)), int(kv.max(initial=0))
        for what, got, limit in (
            ("tokens", self.num_tokens, self.max_tokens),
            ("rows", self.batch_size, self.max_batch),
            ("tokens of context", self.max_kv_len, self.max_context),
        ):
            if got > limit:
                raise ValueError(f"step {plan.step_id} has {got} {what}, the batch holds {limit}")
        rows, cu = plan.rows, np.concatenate([[0], query.cumsum(dtype=np.int32)])
        sample, fixed = (
            np.flatnonzero(plan.num_samples),
            np.zeros((5, self.max_batch + 1), np.int32),
        )
        for part, values in zip(
            fixed, (rows, cu, kv, cu[sample + 1] - 1, rows[sample]), strict=True
        ):
            part[: len(values)] = values
        tokens = np.empty((5, self.num_tokens), np.int32)
        ids, source_rows, positions, entries, offsets = tokens
        ids[: plan.num_decode] = -1
        ids[plan.num_decode :] = plan.input_ids
        source_rows[:] = np.repeat(rows, query)
        positions[:] = np.arange(self.num_tokens) + np.repeat(kv - cu[1:], query)
        np.divmod(positions, self.kv_pool.page_size, out=(entries, offsets))
        entries += np.repeat(rows * self.max_pages, query)
        return fixed, tokens

    def _upload(self, target: torch.Tensor, *arrays: np.ndarray) -> list[torch.Tensor]:
        host = self.device.host_empty(sum(array.size for array in arrays), dtype=torch.int32)
        np.concatenate([array.ravel() for array in arrays], out=host.numpy())
        target = target[: len(host)].copy_(host, non_blocking=True)
        parts = target.split([array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def _fill_tokens(self, tokens: torch.Tensor, next_token: torch.Tensor) -> None:
        ids, rows, positions, entries, offsets = tokens
        count = len(ids)
        sampled = next_token[:, 0].index_select(0, rows).clamp_(min=0)
        self.input_ids = torch.where(ids < 0, sampled, ids, out=self._input_ids[:count])
        self.positions = self._positions[:count].copy_(positions)
        pages = self._table.view(-1).index_select(0, entries)
        page_size, slots = self.kv_pool.page_size, self._slot_mapping[:count]
        self.slot_mapping = torch.add(offsets, pages, alpha=page_size, out=slots)
