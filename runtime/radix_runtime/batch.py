"""ForwardBatch: one step on the device.

All tensors have fixed addresses; a step's are their first elements. One packed int32 upload carries
a StepPlan; what depends on the lengths of decode rows, which only the device knows, a few device
operations make from it."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from .device import Device
from .errors import ConfigError
from .memory.kv_pool import KVPool
from .step_plan import StepPlan

_MAX_PACKED_DELTAS = 16384  # page deltas beyond go up by themselves


class _Entry(IntEnum):
    """Rows of the upload's first block, int32 [7, max_entries + 1]; each used where it arrives."""

    ROWS = 0  # [B] row of the page table
    CU_SEQLENS_Q = 1  # [B + 1]
    BASE_ROWS = 2  # [B] element of committed_len that counts the tokens before LENGTHS
    LENGTHS = 3  # [B] tokens after the base, with the new ones
    LOGIT_ROWS = 4  # [S]
    SAMPLE_ROWS = 5  # [N]
    CU_SAMPLES = 6  # [N + 1]


class _Token(IntEnum):
    """Rows of the upload's second block, int32 [4, T]: what the token tensors are made of."""

    BASE_ROWS = 0  # element of committed_len that counts the tokens before OFFSETS
    OFFSETS = 1  # tokens of the row between the base and this one
    TABLE_STARTS = 2  # first element of the token's row in the flat page table
    SOURCES = 3  # of a decode token its element of the flat next_token, of a chunk's its id


@dataclass(slots=True)
class _Entries:
    """The entries of a batch on the host: decode entries as the backend takes them, padding
    entries, chunks. All int32 [B]."""

    rows: np.ndarray
    base_rows: np.ndarray
    query_len: np.ndarray
    lengths: np.ndarray


class ForwardBatch:
    """Device view of a StepPlan with B entries, T tokens, S samples of N entries that sample:

        input_ids     int32 [T]
        positions     int32 [T]
        slot_mapping  int64 [T]      -1: the token is not stored
        rows          int32 [B]      row of the request table
        cu_seqlens_q  int32 [B + 1]
        kv_lens       int32 [B]      with the new tokens
        page_table    int32 [B, at least the pages of the longest row]
        logit_rows    int32 [S]      token whose hidden state gives a sample
        sample_rows   int32 [N]      row of the request table; decode entries first
        cu_samples    int32 [N + 1]  entry n has samples cu_samples[n] .. cu_samples[n + 1] - 1

    Entries 0 .. num_decode-1 are decode entries, the others chunks. A decode entry of the plan with
    q tokens is one entry, or q entries of one token each if the backend `expands_decode`. The last
    `num_padding` of the decode entries are padding: one token of the dummy row, which sees only
    itself and is not stored or sampled. The counts `num_tokens`, `num_decode_tokens`, `batch_size`
    and `num_decode` include padding.

    `num_samples` is S, `num_sampling` N, of which the first `num_decode_rows` are decode entries of
    the plan. Counts, maxima and `query_lens_host` int32 [B] are host values; `max_kv_len` is an
    upper bound, as `plan.kv_len` is. `metadata` belongs to the attention backend.

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
    ) -> None:
        """`max_batch` entries of a plan, `max_samples` tokens of a decode entry. Raises ConfigError
        where an int32 cannot count the slots or the page table."""
        self.device = device
        self.kv_pool = kv_pool
        self.max_tokens = max_tokens
        self.max_batch = max_batch
        self.max_rows = max_rows
        self.max_context = max_context
        self.max_entries = max_batch * max_samples
        self.expands_decode = expands_decode
        self.max_pages = -(-max_context // kv_pool.page_size)
        self._table = self._empty(max_rows + 1, self.max_pages).fill_(kv_pool.dummy_page)
        if max(self._table.numel(), (kv_pool.num_pages + 1) * kv_pool.page_size) >= 2**31:
            flags = "see --max-total-tokens, --max-running-requests and --context-length"
            raise ConfigError(
                f"the page table or the KV pool has more entries than int32 can count; {flags}"
            )
        entries_size = len(_Entry) * (self.max_entries + 1)
        self._packed = self._empty(entries_size + len(_Token) * max_tokens + 2 * _MAX_PACKED_DELTAS)
        self._input_ids = self._empty(max_tokens)
        self._positions = self._empty(max_tokens)
        self._slot_mapping = self._empty(max_tokens).long()
        self._kv_lens = self._empty(self.max_entries)
        self._page_table = self._empty(self.max_entries * self.max_pages)
        self._layout: tuple[Any, ...] | None = None
        self.metadata: Any = None

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.device.torch_device)

    def load(
        self,
        plan: StepPlan,
        next_token: torch.Tensor,
        committed_len: torch.Tensor,
        *,
        padded_size: int | None = None,
    ) -> None:
        """Makes this the batch of `plan`; its page deltas come first. Copies `plan`; does not
        synchronise.

        `next_token` int32 [max_rows + 1, max_samples] holds the tokens that a row decodes next: the
        last accepted one (-1, a failed draw, is read as id 0), then drafts. `committed_len` int32
        [max_rows + 1] counts the tokens of a row that are in its pages for good; that of the dummy
        row is 0. Decode entries start there; chunks set it to their `kv_len`.

        Decode entries are padded up to `padded_size`. Raises ValueError for a step that does not
        fit, or that samples elsewhere than StepPlan says."""
        self.metadata = None
        deltas = self._last_deltas(plan)
        packed = deltas[:, :_MAX_PACKED_DELTAS]
        layout = self._decode_layout(plan, padded_size)
        if layout is None or layout != self._layout:
            self._layout = None  # until all went well
            entries = self._host_entries(plan, padded_size)
            self._count(plan, entries)
            self._check_limits(plan)
            entry_block = self._pack_entries(plan, entries)
            token_block = self._pack_tokens(plan, entries, next_token)
            blocks = self._upload(self._packed, [entry_block, token_block, packed])
            self._set_views(*blocks[:2])
            self._apply_deltas(blocks[2])
            self._layout = layout
        else:  # the lengths, which alone have changed, are the device's
            self.max_kv_len = int(plan.kv_len.max())
            self._check_limits(plan)
            if packed.size:
                self._apply_deltas(*self._upload(self._packed[self._layout_size :], [packed]))
        if deltas.shape[1] > _MAX_PACKED_DELTAS:
            rest = deltas[:, _MAX_PACKED_DELTAS:]
            self._apply_deltas(*self._upload(self._empty(rest.size), [rest]))
        self._fill_tokens(next_token, committed_len)
        self._fill_page_table()
        if self.num_decode < self.batch_size:
            chunks = slice(self.num_decode, self.batch_size)
            committed_len.index_put_((self.rows[chunks],), self.kv_lens[chunks])

    def _decode_layout(self, plan: StepPlan, padded_size: int | None) -> tuple[Any, ...] | None:
        """What the blocks of the upload depend on, for a step without chunks. Decode steps mostly
        repeat it: then the blocks of the step before are still there."""
        if plan.num_decode < len(plan.rows):
            return None
        arrays = (plan.rows, plan.query_len, plan.num_samples)
        return padded_size, *(array.tobytes() for array in arrays)

    def _host_entries(self, plan: StepPlan, padded_size: int | None) -> _Entries:
        rows = plan.rows[: plan.num_decode]
        query_len = plan.query_len[: plan.num_decode]
        lengths = query_len
        if self.expands_decode and query_len.max(initial=1) > 1:
            ends = query_len.cumsum(dtype=np.int32)
            lengths = np.arange(1, ends[-1] + 1, dtype=np.int32)
            lengths -= np.repeat(ends - query_len, query_len)
            rows = np.repeat(rows, query_len)
            query_len = np.ones(len(rows), np.int32)
        self.num_padding = 0 if padded_size is None else max(0, padded_size - len(rows))
        one_token = np.ones(self.num_padding, np.int32)
        dummy_rows = np.full(self.num_padding, self.max_rows, np.int32)
        chunk_rows = plan.rows[plan.num_decode :]
        return _Entries(
            rows=np.concatenate([rows, dummy_rows, chunk_rows]),
            # The dummy row's length is 0: a chunk's positions are the plan's.
            base_rows=np.concatenate([rows, dummy_rows, np.full_like(chunk_rows, self.max_rows)]),
            query_len=np.concatenate([query_len, one_token, plan.query_len[plan.num_decode :]]),
            lengths=np.concatenate([lengths, one_token, plan.kv_len[plan.num_decode :]]),
        )

    def _count(self, plan: StepPlan, entries: _Entries) -> None:
        self.query_lens_host = entries.query_len
        self.batch_size = len(entries.rows)
        self.num_decode = self.batch_size - (len(plan.rows) - plan.num_decode)
        self.num_tokens = int(entries.query_len.sum())
        self.num_decode_tokens = int(entries.query_len[: self.num_decode].sum())
        self.num_samples = int(plan.num_samples.sum())
        self.num_sampling = int(np.count_nonzero(plan.num_samples))
        self.num_decode_rows = plan.num_decode
        self.max_query_len = int(entries.query_len.max(initial=0))
        self.max_kv_len = int(plan.kv_len.max(initial=0))

    def _check_limits(self, plan: StepPlan) -> None:
        for what, got, limit in (
            ("tokens", self.num_tokens, self.max_tokens),
            ("rows", len(plan.rows), self.max_batch),
            ("entries", self.batch_size, self.max_entries),
            ("samples", self.num_samples, self.max_entries),
            ("tokens of context", self.max_kv_len, self.max_context),
        ):
            if got > limit:
                raise ValueError(f"step {plan.step_id} has {got} {what}, the batch holds {limit}")
        decode = slice(plan.num_decode)
        if not np.array_equal(plan.num_samples[decode], plan.query_len[decode]):
            raise ValueError(f"step {plan.step_id}: a decode entry samples after every token")
        if plan.num_samples[plan.num_decode :].max(initial=0) > 1:
            raise ValueError(f"step {plan.step_id}: a chunk samples after its last token only")

    def _pack_entries(self, plan: StepPlan, entries: _Entries) -> np.ndarray:
        packed = np.empty((len(_Entry), self.max_entries + 1), np.int32)
        packed[:, 0] = 0  # where the cumulative sums begin
        count = self.batch_size
        packed[_Entry.ROWS, :count] = entries.rows
        np.cumsum(entries.query_len, out=packed[_Entry.CU_SEQLENS_Q, 1 : count + 1])
        packed[_Entry.BASE_ROWS, :count] = entries.base_rows
        packed[_Entry.LENGTHS, :count] = entries.lengths
        # Every decode token gives a sample, and of a chunk that samples the last one.
        decode_samples = self.num_decode_tokens - self.num_padding
        logit_rows = packed[_Entry.LOGIT_ROWS]
        logit_rows[:decode_samples] = np.arange(decode_samples)
        sampling = plan.num_samples > 0
        chunks_sampling = sampling[plan.num_decode :]
        ends = packed[_Entry.CU_SEQLENS_Q, self.num_decode + 1 : count + 1]
        logit_rows[decode_samples : self.num_samples] = ends[chunks_sampling] - 1
        packed[_Entry.SAMPLE_ROWS, : self.num_sampling] = plan.rows[sampling]
        cu_samples = packed[_Entry.CU_SAMPLES, 1 : self.num_sampling + 1]
        np.cumsum(plan.num_samples[sampling], out=cu_samples)
        return packed

    def _pack_tokens(
        self, plan: StepPlan, entries: _Entries, next_token: torch.Tensor
    ) -> np.ndarray:
        packed = np.empty((len(_Token), self.num_tokens), np.int32)
        query_len = entries.query_len
        base_rows = np.repeat(entries.base_rows, query_len)
        first_offsets = entries.lengths - query_len.cumsum()
        offsets = np.arange(self.num_tokens) + np.repeat(first_offsets, query_len)
        packed[_Token.BASE_ROWS] = base_rows
        packed[_Token.OFFSETS] = offsets
        packed[_Token.TABLE_STARTS] = np.repeat(entries.rows * self.max_pages, query_len)
        decode = slice(self.num_decode_tokens)
        sources = packed[_Token.SOURCES]
        sources[decode] = base_rows[decode] * next_token.shape[1] + offsets[decode]
        sources[self.num_decode_tokens :] = plan.input_ids
        return packed

    def _last_deltas(self, plan: StepPlan) -> np.ndarray:
        """int32 [2, D]: element of the flat page table, page. Of an element that is named twice the
        last page: a device scatter promises no order."""
        if len(plan.page_ids) == 0:
            return np.zeros((2, 0), np.int32)
        elements = plan.page_rows * self.max_pages + plan.page_index
        unique, last = np.unique(elements[::-1], return_index=True)
        return np.stack([unique, plan.page_ids[::-1][last]])

    def _apply_deltas(self, deltas: torch.Tensor) -> None:
        if deltas.shape[1]:
            self._table.view(-1).index_put_((deltas[0],), deltas[1])

    def _upload(self, target: torch.Tensor, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        """Copies `arrays` one behind the other into `target`; returns their parts of it."""
        sizes = [array.size for array in arrays]
        host = self.device.host_empty(sum(sizes), dtype=torch.int32)
        np.concatenate([array.ravel() for array in arrays], out=host.numpy())
        target = target[: len(host)].copy_(host, non_blocking=True)
        parts = target.split(sizes)
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def _set_views(self, entry_block: torch.Tensor, token_block: torch.Tensor) -> None:
        """The tensors of this batch: those that the upload has filled, and the memory of those that
        `_fill_tokens` makes."""
        self._layout_size = entry_block.numel() + token_block.numel()
        entry = entry_block.unbind()
        self.rows = entry[_Entry.ROWS][: self.batch_size]
        self.cu_seqlens_q = entry[_Entry.CU_SEQLENS_Q][: self.batch_size + 1]
        self.logit_rows = entry[_Entry.LOGIT_ROWS][: self.num_samples]
        self.sample_rows = entry[_Entry.SAMPLE_ROWS][: self.num_sampling]
        self.cu_samples = entry[_Entry.CU_SAMPLES][: self.num_sampling + 1]
        self._base_rows = entry[_Entry.BASE_ROWS][: self.batch_size]
        self._lengths = entry[_Entry.LENGTHS][: self.batch_size]
        self._tokens = token_block.unbind()
        self.kv_lens = self._kv_lens[: self.batch_size]
        self.input_ids = self._input_ids[: self.num_tokens]
        self.positions = self._positions[: self.num_tokens]
        self.slot_mapping = self._slot_mapping[: self.num_tokens]

    def _fill_tokens(self, next_token: torch.Tensor, committed_len: torch.Tensor) -> None:
        torch.add(committed_len.index_select(0, self._base_rows), self._lengths, out=self.kv_lens)
        bases = committed_len.index_select(0, self._tokens[_Token.BASE_ROWS])
        torch.add(bases, self._tokens[_Token.OFFSETS], out=self.positions)
        page_size = self.kv_pool.page_size
        blocks = self.positions // page_size
        elements = self._tokens[_Token.TABLE_STARTS] + blocks
        pages = self._table.view(-1).index_select(0, elements)
        # page * page_size + position % page_size
        torch.add(self.positions, pages.sub_(blocks), alpha=page_size, out=self.slot_mapping)
        decoded = self.num_decode_tokens
        if self.num_padding:
            self.slot_mapping[decoded - self.num_padding : decoded].fill_(-1)
        sources = self._tokens[_Token.SOURCES]
        if decoded:
            ids = self.input_ids[:decoded]
            torch.index_select(next_token.view(-1), 0, sources[:decoded], out=ids).clamp_(min=0)
        if decoded < self.num_tokens:
            self.input_ids[decoded:].copy_(sources[decoded:])

    def _fill_page_table(self) -> None:
        # On the CPU only as wide as the longest row needs. On a GPU as wide as can be: captured
        # graphs need one shape, and kernels may cut their work by the width.
        width = self.max_pages
        if self.device.is_cpu:
            width = -(-self.max_kv_len // self.kv_pool.page_size)
        view = self._page_table[: self.batch_size * width].view(self.batch_size, width)
        self.page_table = torch.index_select(self._table[:, :width], 0, self.rows, out=view)

    def first_token(self, plan: StepPlan, entry: int) -> int:
        """Token of this batch at which chunk `entry` of the plan it was loaded from begins."""
        return self.num_padding + int(plan.query_len[:entry].sum())
