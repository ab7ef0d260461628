"""ForwardBatch: one step on the device.

All tensors have fixed addresses; a step's are their first elements. One packed int32 upload carries
a StepPlan; what depends on the lengths of decode rows, which only the device knows, one operation
of the device makes from it."""

from typing import Any

import numpy as np
import torch

from . import ops
from .batch_layout import BatchLayout, BatchLimits, Entry, Token, lay_out
from .device import Device
from .errors import ConfigError
from .memory.kv_pool import KVPool
from .memory.page_table import make_page_table
from .step_plan import StepPlan
from .step_shape import StepShape

_MAX_PACKED_DELTAS = 16384  # page deltas beyond go up by themselves


class ForwardBatch:
    """Device view of a StepPlan with B entries, T tokens, S samples of N entries that sample:

        input_ids          int32 [T]
        positions          int32 [T]
        slot_mapping       int64 [T]      -1: the token is not stored
        rows               int32 [B]      row of the request table
        cu_seqlens_q       int32 [B + 1]
        decode_cu_seqlens  int32 [B + 1]  the same of decode entries; a chunk has no tokens
        chunk_cu_seqlens   int32 [B + 1]  the same of chunks; a decode entry has no tokens
        kv_lens            int32 [B]      with the new tokens
        page_table         int32 [B, at least the pages of the longest row]
        logit_rows         int32 [S]      token whose hidden state gives a sample
        sample_rows        int32 [N]      row of the request table; decode entries first
        grow_rows          int32 [N]      the same of decode entries, the scratch row of chunks
        sample_positions   int64 [max_entries]  where each sample will stand in its sequence; the
                                                elements behind those of samples mean nothing
        cu_samples         int32 [N + 1]  entry n has samples cu_samples[n] .. cu_samples[n + 1] - 1

    Entries 0 .. num_decode-1 are decode entries, then come chunks. A decode entry of the plan with
    q tokens is one entry, or q entries of one token each if the backend `expands_decode`.

    A step may be padded to a StepShape; padding stands behind the rest. In a decode step a padding
    entry is a decode entry: one token of the dummy row, which sees only itself. In a step with
    chunks padding entries have no tokens, and padding tokens belong to no entry. Padding is not
    stored. `num_tokens`, `batch_size` and, in a decode step, `num_decode` include padding;
    `num_padding` counts its tokens. There are `shape.sample_capacity` logit_rows then,
    of which those of padding name token 0, and `shape.samples` sample_rows and grow_rows, of which
    those of padding are the scratch row, an element of the row state that nobody reads.

    `num_samples` is S, `num_sampling` N, of which the first `num_decode_rows` are decode entries of
    the plan; none of them counts padding. `num_decode_tokens` counts the tokens of entries 0 ..
    num_decode-1. `samples_every_token`: logit_rows are all tokens in their order, as in each decode
    step that is not padded. Counts and maxima are host values, and so are `chunk_query_lens` and
    `chunk_kv_lens`, int32 of each chunk, and `rows_of_samples`, int32 [S], the row of the request
    table of each sample; `max_kv_len` is an upper bound, as `plan.kv_len` is, and so is the
    `max_query_len` of a padded step with chunks. `metadata` belongs to the attention backend.

    Owns the device page table [max_rows + 1, max_pages]. Row `max_rows` is the dummy row. What was
    never assigned is the dummy page. Used on the engine's stream only."""

    def __init__(
        self,
        device: Device,
        kv_pool: KVPool,
        *,
        max_tokens: int,
        max_batch: int,
        max_rows: int,
        max_context: int,
        max_samples: int = 1,
        expands_decode: bool = True,
        fixed_width: bool | None = None,
    ) -> None:
        """`max_batch` entries of a plan, `max_samples` tokens of a decode entry. `fixed_width`: the
        page table is always as wide as a row can be; by default on a GPU, where captured graphs
        need one shape and kernels may cut their work by the width. Raises ConfigError where an
        int32 cannot count the slots or the page table."""
        self.device = device
        self.kv_pool = kv_pool
        self.limits = BatchLimits(
            max_tokens=max_tokens,
            max_batch=max_batch,
            max_rows=max_rows,
            max_context=max_context,
            max_samples=max_samples,
            max_pages=-(-max_context // kv_pool.page_size),
            expands_decode=expands_decode,
        )
        self.max_tokens = max_tokens
        self.max_batch = max_batch
        self.max_rows = max_rows
        self.max_context = max_context
        self._fixed_width = not device.is_cpu if fixed_width is None else fixed_width
        max_pages = self.limits.max_pages
        max_entries = self.limits.max_entries
        slots = (kv_pool.num_pages + 1) * kv_pool.page_size
        if max((max_rows + 1) * max_pages, slots) >= 2**31:
            flags = "see --max-total-tokens, --max-running-requests and --context-length"
            raise ConfigError(
                f"the page table or the KV pool has more entries than int32 can count; {flags}"
            )
        self._table = make_page_table(device, (max_rows + 1, max_pages), kv_pool.dummy_page)
        entries_size = len(Entry) * (max_entries + 1)
        self._packed = self._empty(entries_size + len(Token) * max_tokens + 2 * _MAX_PACKED_DELTAS)
        self._input_ids = self._empty(max_tokens)
        self._positions = self._empty(max_tokens)
        self._slot_mapping = self._empty(max_tokens).long()
        self._kv_lens = self._empty(max_entries)
        self.sample_positions = self._empty(max_entries).long()
        self._page_table = self._empty(max_entries * max_pages)
        self._page_table_shape: tuple[int, int] | None = None  # that of `page_table`
        self._layout_key: tuple[Any, ...] | None = None
        self.metadata: Any = None

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.device.torch_device)

    def upload(self, plan: StepPlan, shape: StepShape | None = None) -> None:
        """Makes this the batch of `plan`, padded to `shape`, and applies its page deltas; `fill`
        must follow. Copies `plan`; does not synchronise. Raises ValueError for a step that does not
        fit, or that samples elsewhere than StepPlan says; its pages may be in the table then."""
        self.metadata = None
        self.max_kv_len = _longest(plan.kv_len)
        if self.max_kv_len > self.max_context:
            raise ValueError(
                f"step {plan.step_id} has {self.max_kv_len} tokens of context, "
                f"the batch holds {self.max_context}"
            )
        deltas = self._table.take(plan.page_rows, plan.page_index, plan.page_ids)
        packed = deltas[:, :_MAX_PACKED_DELTAS]
        key = _decode_key(plan, shape)
        if key is None or key != self._layout_key:
            self._layout_key = None  # until all went well
            layout = lay_out(plan, shape, self.limits)
            blocks = [layout.entry_block, layout.token_block, packed]
            entry_block, token_block, uploaded = self._copy(self._packed, blocks)
            self._set_counts(layout)
            self._set_views(entry_block, token_block)
            self._table.apply(uploaded)
            self._layout_key = key
        elif packed.size:
            self._table.apply(*self._copy(self._packed[self._layout_size :], [packed]))
        if deltas.shape[1] > _MAX_PACKED_DELTAS:
            rest = deltas[:, _MAX_PACKED_DELTAS:]
            self._table.apply(*self._copy(self._empty(rest.size), [rest]))
        self._view_page_table()

    def _view_page_table(self) -> None:
        """Makes `page_table` as long as there are entries and as wide as the longest of them needs.
        Mostly it is so from the step before."""
        width = self.limits.max_pages
        if not self._fixed_width:
            width = -(-self.max_kv_len // self.kv_pool.page_size)
        shape = (self.batch_size, width)
        if shape != self._page_table_shape:
            self.page_table = self._page_table[: self.batch_size * width].view(shape)
            self._page_table_shape = shape

    def _copy(self, target: torch.Tensor, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """Copies `arrays` one behind the other into `target`; returns their parts of it."""
        sizes = [array.size for array in arrays]
        host = self.device.host_empty(sum(sizes), dtype=torch.int32)
        np.concatenate([array.ravel() for array in arrays], out=host.numpy())
        target = target[: len(host)].copy_(host, non_blocking=True)
        parts = target.split(sizes)
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def _set_counts(self, layout: BatchLayout) -> None:
        self.shape = layout.shape
        self.batch_size = layout.batch_size
        self.num_decode = layout.num_decode
        self.num_tokens = layout.num_tokens
        self.num_decode_tokens = layout.num_decode_tokens
        self.chunk_query_lens = layout.chunk_query_lens
        self.chunk_kv_lens = layout.chunk_kv_lens
        self.num_padding = layout.num_padding
        self.num_samples = layout.num_samples
        self.num_sampling = layout.num_sampling
        self.num_decode_rows = layout.num_decode_rows
        self.rows_of_samples = layout.rows_of_samples
        self.samples_every_token = layout.samples_every_token
        self.max_query_len = layout.max_query_len
        self.has_chunks = layout.has_chunks
        self.is_ragged = layout.is_ragged

    def _set_views(self, entry_block: torch.Tensor, token_block: torch.Tensor) -> None:
        """The tensors of this batch: those that the upload has filled, and the memory of those that
        `fill` makes."""
        self._layout_size = entry_block.numel() + token_block.numel()
        size = self.batch_size
        logits = self.num_samples
        samples = self.num_sampling
        if self.shape is not None:
            logits = self.shape.sample_capacity
            samples = self.shape.samples
        entry = entry_block.unbind()
        self.rows = entry[Entry.ROWS][:size]
        self.cu_seqlens_q = entry[Entry.CU_SEQLENS_Q][: size + 1]
        self.decode_cu_seqlens = entry[Entry.DECODE_CU_SEQLENS][: size + 1]
        self.chunk_cu_seqlens = entry[Entry.CHUNK_CU_SEQLENS][: size + 1]
        self.logit_rows = entry[Entry.LOGIT_ROWS][:logits]
        self.sample_rows = entry[Entry.SAMPLE_ROWS][:samples]
        self.grow_rows = entry[Entry.GROW_ROWS][:samples]
        self.cu_samples = entry[Entry.CU_SAMPLES][: self.num_sampling + 1]
        self._entries = entry_block[: Entry.COMMIT_ROWS + 1, :size]
        self._tokens = token_block
        self.kv_lens = self._kv_lens[:size]
        self.input_ids = self._input_ids[: self.num_tokens]
        self.positions = self._positions[: self.num_tokens]
        self.slot_mapping = self._slot_mapping[: self.num_tokens]
        self._positions_of_samples = self.sample_positions[:logits]

    def fill(self, next_token: torch.Tensor, committed_len: torch.Tensor) -> None:
        """Makes the tensors that depend on the lengths of decode rows, in one operation of the
        device, which reads and writes fixed addresses and follows from the shape: a graph may hold
        it.

        `next_token` int32 [max_rows + 2, max_samples] holds the tokens that a row decodes next: the
        last accepted one (-1, a failed draw, is read as id 0), then drafts.
        `committed_len` int32 [max_rows + 2] counts the tokens of a row that are in its pages for
        good; that of the dummy row is 0. Decode entries start there; chunks set it to their
        `kv_len`. The last element, the scratch row's, means nothing."""
        ops.fill_step_tensors(
            self._entries,
            self._tokens,
            self.logit_rows,
            next_token,
            committed_len,
            self._table.pages,
            self.kv_pool.page_size,
            kv_lens=self.kv_lens,
            input_ids=self.input_ids,
            positions=self.positions,
            slot_mapping=self.slot_mapping,
            page_table=self.page_table,
            sample_positions=self._positions_of_samples,
        )

    def first_token(self, plan: StepPlan, entry: int) -> int:
        """Token of this batch at which chunk `entry` of the plan it was loaded from begins."""
        return int(plan.query_len[:entry].sum())


def _longest(lengths: np.ndarray) -> int:
    """The largest of int32 [B]; 0 of none."""
    if len(lengths) == 0:
        return 0
    # `max`, which goes through Python, takes 14 us longer when its code is not in the caches.
    return int(lengths[lengths.argmax()])


def _decode_key(plan: StepPlan, shape: StepShape | None) -> tuple[Any, ...] | None:
    """What the blocks of the upload depend on, for a step without chunks. Decode steps mostly
    repeat it: then the blocks of the step before are still there."""
    if plan.num_decode < len(plan.rows):
        return None
    return shape, plan.rows.tobytes(), plan.query_len.tobytes(), plan.num_samples.tobytes()
