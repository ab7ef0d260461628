"""Between two calls of a model: the tensors of a step, and the tokens that it accepts."""

from __future__ import annotations

from . import _dispatch
from ._arrays import Array, empty_like, torch_views
from ._checks.step import check_accept, check_fill
from ._lazy import reference


def fill_step_tensors(
    entries: Array,
    tokens: Array,
    sample_tokens: Array,
    next_token: Array,
    committed_len: Array,
    row_pages: Array,
    page_size: int,
    *,
    kv_lens: Array,
    input_ids: Array,
    positions: Array,
    slot_mapping: Array,
    page_table: Array,
    sample_positions: Array,
) -> None:
    """Make the tensors of a step of B entries, T tokens and S samples in one kernel, from what the
    host has uploaded and from what only the device knows: the lengths of rows and their next
    tokens. It reads and writes given memory alone, so a graph may hold it.

    All are int32 unless said otherwise, and contiguous but for the rows of `entries` and `tokens`.

    entries: [4, B], of each entry its row of `row_pages`; its base, an element of `committed_len`;
    how many tokens it has after those that the base counts, with the new ones; and its commit, the
    element of `committed_len` that takes its length.
    tokens: [4, T], of each token its base; how many tokens lie between the base and it; the first
    element of its row in the flat `row_pages`, or -1 for a token that is not stored; and its
    source, an id or `~e` for element e of the flat `next_token`.
    sample_tokens: [S], the token whose result gives a sample.
    next_token: any shape; -1 is read as id 0. committed_len: [R]. row_pages: [rows, pages], of
    `page_size` tokens each.

    Written: kv_lens [B] and positions [T], the base's length and what comes on top; input_ids [T];
    slot_mapping int64 [T], `page * page_size + position % page_size`, -1 for what is not stored;
    page_table [B, at most pages], the first elements of each entry's row; sample_positions int64
    [S], one behind the token's position. At last `committed_len[commit] = kv_lens`: no commit is
    a base; of a commit that several entries name one's length remains.

    Errors: TypeError (dtype), ValueError (shape, stride, page_size; on the CPU also an index
    outside of its tensor, before anything is written; on a GPU its entry, token or sample is
    skipped).
    """
    op = "fill_step_tensors"
    run = _dispatch.native(op, entries)
    given = (entries, tokens, sample_tokens, next_token, committed_len, row_pages)
    made = (kv_lens, input_ids, positions, slot_mapping, page_table, sample_positions)
    if run is not None:
        run(*given, page_size, *made)
        return
    given = torch_views(*given)
    made = torch_views(*made)
    check_fill(op, *given, page_size, *made)
    names = ("kv_lens", "input_ids", "positions", "slot_mapping", "page_table", "sample_positions")
    reference.fill_step_tensors(*given, page_size, **dict(zip(names, made, strict=True)))


def accept_tokens(
    ids: Array,
    rows: Array,
    grow_rows: Array,
    next_token: Array,
    committed_len: Array,
    *,
    cu_samples: Array | None = None,
    drafts: Array | None = None,
    all_drawn: bool = False,
    counts: Array | None = None,
) -> Array | None:
    """Move rows past what they accept of a step's samples. All int32; updates in place.

    ids: [S], the samples of N entries. rows, grow_rows: [N]. next_token: [R, any]. committed_len:
    [R]. Without `cu_samples` and `drafts` every entry has one sample. With them, [N + 1] and [S],
    entry n has the samples `cu_samples[n]` .. `cu_samples[n + 1] - 1`, at least one: the first is
    accepted, and each further one i while `drafts[i] == ids[i - 1]`.

    `next_token[rows[n], 0]` becomes the last accepted id, and `committed_len[grow_rows[n]]` grows
    by the number of accepted ones. Where the first id is negative neither changes, unless
    `all_drawn`, which says that nobody need look. Rows may repeat; `next_token` then holds either
    id.

    Returns how many are accepted of each entry, whatever the ids, in `counts` ([N], new by
    default); None without `cu_samples` and `counts`.

    Errors: TypeError (dtype), ValueError (shape, stride; on the CPU also an index outside of its
    tensor, before anything is written; on a GPU the entry is skipped).
    """
    op = "accept_tokens"
    run = _dispatch.native(op, ids)
    if counts is None and cu_samples is not None:
        counts = empty_like(rows)
    if run is not None:
        run(ids, rows, grow_rows, next_token, committed_len, cu_samples, drafts, all_drawn, counts)
        return counts
    views = torch_views(ids, rows, grow_rows, next_token, committed_len, cu_samples, drafts, counts)
    check_accept(op, *views)
    reference.accept_tokens(
        *views[:5],
        cu_samples=views[5],
        drafts=views[6],
        all_drawn=all_drawn,
        counts=views[7],
    )
    return counts
