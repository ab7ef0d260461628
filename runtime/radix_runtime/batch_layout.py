"""BatchLayout: a StepPlan as the int32 blocks that one upload carries to the device.

Plain numpy. What depends on the lengths of decode rows, which only the device knows, is given
relative to them: as an element of `committed_len` and an offset to it."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from .step_plan import StepPlan
from .step_shape import StepShape


class Entry(IntEnum):
    """Rows of the first block, int32 [len(Entry), max_entries + 1]. The first four say what the
    entry tensors are made of, in the order of `fill_step_tensors`; each of the others is used where
    it arrives."""

    ROWS = 0  # [B] row of the page table
    BASE_ROWS = 1  # [B] element of committed_len that counts the tokens before LENGTHS
    LENGTHS = 2  # [B] tokens after the base, with the new ones
    COMMIT_ROWS = 3  # [B] element of committed_len that the entry sets to its length
    CU_SEQLENS_Q = 4  # [B + 1]
    DECODE_CU_SEQLENS = 5  # [B + 1]
    CHUNK_CU_SEQLENS = 6  # [B + 1]
    LOGIT_ROWS = 7  # [S]
    SAMPLE_ROWS = 8  # [N]
    GROW_ROWS = 9  # [N]
    CU_SAMPLES = 10  # [N + 1]


class Token(IntEnum):
    """Rows of the second block, int32 [len(Token), T]: what the token tensors are made of, in the
    order of `fill_step_tensors`."""

    BASE_ROWS = 0  # element of committed_len that counts the tokens before OFFSETS
    OFFSETS = 1  # tokens of the row between the base and this one
    TABLE_STARTS = 2  # first element of the token's row in the flat page table; -1 of padding
    SOURCES = 3  # the id of a chunk's token; of a decode token ~ its element of the flat next_token


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Sizes of a ForwardBatch. The dummy row has length 0 and reads the dummy page."""

    max_tokens: int
    max_batch: int  # entries of a plan
    max_rows: int
    max_context: int
    max_samples: int  # tokens of a decode entry
    max_pages: int  # of a row
    expands_decode: bool

    @property
    def max_entries(self) -> int:
        """Entries of a batch, and its samples."""
        return self.max_batch * self.max_samples

    @property
    def dummy_row(self) -> int:
        """The row of padding: of the page table, next_token and committed_len."""
        return self.max_rows

    @property
    def scratch_row(self) -> int:
        """The element of next_token and committed_len that takes updates which belong to no
        row."""
        return self.max_rows + 1


@dataclass(slots=True, kw_only=True)
class _Entries:
    """The entries of a batch: decode entries as the backend takes them, chunks, padding. All
    int32 [B]."""

    rows: np.ndarray
    base_rows: np.ndarray
    query_len: np.ndarray
    lengths: np.ndarray
    commit_rows: np.ndarray
    num_decode: int  # real ones


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Blocks and counts of a batch; ForwardBatch says what the counts mean."""

    shape: StepShape | None
    entry_block: np.ndarray
    token_block: np.ndarray
    batch_size: int
    num_decode: int
    num_tokens: int
    num_decode_tokens: int
    chunk_query_lens: np.ndarray
    chunk_kv_lens: np.ndarray
    num_padding: int
    num_samples: int
    num_sampling: int
    num_decode_rows: int
    rows_of_samples: np.ndarray
    max_query_len: int
    has_chunks: bool

    @property
    def samples_every_token(self) -> bool:
        """Whether the samples are those of all tokens, in their order."""
        return self.shape is None and not self.has_chunks

    @property
    def is_ragged(self) -> bool:
        """Whether some entry has several samples."""
        return self.num_samples > self.num_sampling


def lay_out(plan: StepPlan, shape: StepShape | None, limits: BatchLimits) -> BatchLayout:
    """The layout of `plan`, padded to `shape`. Raises ValueError for a step that does not fit, or
    that samples elsewhere than StepPlan says."""
    entries = _entries(plan, shape, limits)
    num_real_tokens = plan.num_tokens
    num_tokens = num_real_tokens if shape is None else shape.tokens
    has_chunks = plan.num_decode < len(plan.rows)
    num_samples = int(plan.num_samples.sum())
    for what, got, limit in (
        ("tokens", num_tokens, limits.max_tokens),
        ("rows", len(plan.rows), limits.max_batch),
        ("entries", len(entries.rows), limits.max_entries),
        ("samples", num_samples, limits.max_entries),
    ):
        if got > limit:
            raise ValueError(f"step {plan.step_id} has {got} {what}, the batch holds {limit}")
    _check_samples(plan)
    num_decode = entries.num_decode
    max_query_len = int(entries.query_len.max(initial=0))
    if shape is not None and not has_chunks:
        num_decode = shape.entries
    if shape is not None and has_chunks:
        max_query_len = shape.tokens
    return BatchLayout(
        shape=shape,
        entry_block=_entry_block(plan, entries, has_chunks, limits),
        token_block=_token_block(plan, entries, num_tokens, limits),
        batch_size=len(entries.rows),
        num_decode=num_decode,
        num_tokens=num_tokens,
        num_decode_tokens=int(entries.query_len[:num_decode].sum()),
        chunk_query_lens=plan.query_len[plan.num_decode :],
        chunk_kv_lens=plan.kv_len[plan.num_decode :],
        num_padding=num_tokens - num_real_tokens,
        num_samples=num_samples,
        num_sampling=int(np.count_nonzero(plan.num_samples)),
        num_decode_rows=plan.num_decode,
        rows_of_samples=np.repeat(plan.rows, plan.num_samples),
        max_query_len=max_query_len,
        has_chunks=has_chunks,
    )


def _check_samples(plan: StepPlan) -> None:
    decode = slice(plan.num_decode)
    if not np.array_equal(plan.num_samples[decode], plan.query_len[decode]):
        raise ValueError(f"step {plan.step_id}: a decode entry samples after every token")
    if plan.num_samples[plan.num_decode :].max(initial=0) > 1:
        raise ValueError(f"step {plan.step_id}: a chunk samples after its last token only")


def _entries(plan: StepPlan, shape: StepShape | None, limits: BatchLimits) -> _Entries:
    rows = plan.rows[: plan.num_decode]
    query_len = plan.query_len[: plan.num_decode]
    lengths = query_len
    if limits.expands_decode and query_len.max(initial=1) > 1:
        ends = query_len.cumsum(dtype=np.int32)
        lengths = np.arange(1, ends[-1] + 1, dtype=np.int32)
        lengths -= np.repeat(ends - query_len, query_len)
        rows = np.repeat(rows, query_len)
        query_len = np.ones(len(rows), np.int32)
    chunk_rows = plan.rows[plan.num_decode :]
    padding = 0
    if shape is not None:
        padding = shape.entries - len(rows) - len(chunk_rows)
        if padding < 0 or shape.has_chunks != bool(len(chunk_rows)):
            raise ValueError(f"step {plan.step_id} does not fit {shape}")
    # In a decode step a padding entry is one token of the dummy row, which sees only itself; with
    # chunks it has no tokens.
    pad_rows = np.full(padding, limits.dummy_row, np.int32)
    pad_len = np.full(padding, 0 if len(chunk_rows) else 1, np.int32)
    scratch = limits.scratch_row
    return _Entries(
        rows=np.concatenate([rows, chunk_rows, pad_rows]),
        # The dummy row's length is 0: a chunk's positions are the plan's.
        base_rows=np.concatenate([rows, np.full_like(chunk_rows, limits.dummy_row), pad_rows]),
        query_len=np.concatenate([query_len, plan.query_len[plan.num_decode :], pad_len]),
        lengths=np.concatenate([lengths, plan.kv_len[plan.num_decode :], pad_len]),
        commit_rows=np.concatenate(
            [np.full_like(rows, scratch), chunk_rows, np.full(padding, scratch, np.int32)]
        ),
        num_decode=len(rows),
    )


def _entry_block(
    plan: StepPlan, entries: _Entries, has_chunks: bool, limits: BatchLimits
) -> np.ndarray:
    block = np.zeros((len(Entry), limits.max_entries + 1), np.int32)
    count = len(entries.rows)
    block[Entry.ROWS, :count] = entries.rows
    cu_seqlens = block[Entry.CU_SEQLENS_Q, : count + 1]
    np.cumsum(entries.query_len, out=cu_seqlens[1:])
    # Where the chunks' tokens begin. For each kind the entries of the other have no tokens.
    border = cu_seqlens[entries.num_decode] if has_chunks else cu_seqlens[count]
    block[Entry.DECODE_CU_SEQLENS, : count + 1] = np.minimum(cu_seqlens, border)
    block[Entry.CHUNK_CU_SEQLENS, : count + 1] = np.maximum(cu_seqlens, border)
    block[Entry.BASE_ROWS, :count] = entries.base_rows
    block[Entry.LENGTHS, :count] = entries.lengths
    block[Entry.COMMIT_ROWS, :count] = entries.commit_rows
    # Every decode token gives a sample, and of a chunk that samples the last one.
    decode_samples = int(plan.num_samples[: plan.num_decode].sum())
    logit_rows = block[Entry.LOGIT_ROWS]
    logit_rows[:decode_samples] = np.arange(decode_samples)
    sampling = plan.num_samples > 0
    chunks_sampling = sampling[plan.num_decode :]
    ends = cu_seqlens[entries.num_decode + 1 :][: len(chunks_sampling)]
    chunk_ends = ends[chunks_sampling]
    logit_rows[decode_samples : decode_samples + len(chunk_ends)] = chunk_ends - 1
    sample_rows = plan.rows[sampling]
    block[Entry.SAMPLE_ROWS : Entry.GROW_ROWS + 1] = limits.scratch_row
    block[Entry.SAMPLE_ROWS, : len(sample_rows)] = sample_rows
    block[Entry.GROW_ROWS, : plan.num_decode] = plan.rows[: plan.num_decode]
    cu_samples = block[Entry.CU_SAMPLES, 1 : len(sample_rows) + 1]
    np.cumsum(plan.num_samples[sampling], out=cu_samples)
    return block


def _token_block(
    plan: StepPlan, entries: _Entries, num_tokens: int, limits: BatchLimits
) -> np.ndarray:
    block = np.empty((len(Token), num_tokens), np.int32)
    query_len = entries.query_len
    base_rows = np.repeat(entries.base_rows, query_len)
    used = len(base_rows)  # the tokens behind belong to no entry
    first_offsets = entries.lengths - query_len.cumsum()
    offsets = np.arange(used) + np.repeat(first_offsets, query_len)
    block[Token.BASE_ROWS, :used] = base_rows
    block[Token.BASE_ROWS, used:] = limits.dummy_row
    block[Token.OFFSETS, :used] = offsets
    block[Token.OFFSETS, used:] = 0
    block[Token.TABLE_STARTS, :used] = np.repeat(entries.rows * limits.max_pages, query_len)
    block[Token.TABLE_STARTS, plan.num_tokens :] = -1
    sources = block[Token.SOURCES]
    sources[:] = ~np.int32(limits.dummy_row * limits.max_samples)
    decoded = int(query_len[: entries.num_decode].sum())
    sources[:decoded] = ~(base_rows[:decoded] * limits.max_samples + offsets[:decoded])
    sources[decoded : plan.num_tokens] = plan.input_ids
    return block
