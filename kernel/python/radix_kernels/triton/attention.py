"""Attention over a paged or a contiguous KV in Triton: checks, tile choice and launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._arrays import torch_views
from .._checks.attention import (
    check_options,
    check_paged,
    check_softcap,
    check_varlen,
    is_fp8,
    is_int8,
    read_window,
)
from .attention_kernel import attend, combine
from .dies import count_dies

# A program walks at least this many keys, and a row is cut into at most this many splits. Both
# follow from the page table's width alone, so a step's split borders do not depend on its data.
_SPLIT_KEYS = 512
_MAX_SPLITS = 64
_KV_TILE_BYTES = 16384


@dataclass(frozen=True)
class Tiles:
    """Compile-time choices: packed queries and keys of a block, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Split(NamedTuple):
    """How the keys of a row are cut: `number` splits of `keys` keys."""

    keys: int
    number: int


WHOLE = Split(keys=0, number=1)


@dataclass(frozen=True)
class Options:
    """The numbers of a call; window_left: -1 for no window."""

    softmax_scale: float
    causal: bool
    window_left: int
    softcap: float


def choose_tiles(dim: int, group: int, itemsize: int, decode: bool, amd: bool = False) -> Tiles:
    """Tiles for an `out` of that itemsize: K and V take at most half of the 64 KiB of shared memory
    of a CDNA3 CU.

    A block of a prompt has 128 rows on AMD, 32 for each of its four waves, which is a matrix
    instruction's height: of 64 rows two waves would multiply the same. 32 keys of 128 dimensions
    leave registers for a second wave.
    """
    dim_pad = _power_of_two(dim)
    if amd and not decode and itemsize == 2 and dim_pad <= 128 and group <= 128:
        block_n = 64 if dim_pad <= 64 else 32
        return Tiles(block_m=128, block_n=block_n, num_warps=4, num_stages=2)
    block_n = max(16, min(64, _KV_TILE_BYTES // (dim_pad * itemsize)))
    least_m = max(16, _power_of_two(group))
    block_m = least_m if decode else max(least_m, 64 if dim_pad * itemsize <= 256 else 32)
    num_stages = 1 if itemsize == 4 else 2
    return Tiles(block_m=block_m, block_n=block_n, num_warps=4, num_stages=num_stages)


def choose_split(capacity: int) -> Split:
    """The splits of rows of up to `capacity` keys."""
    keys = max(_SPLIT_KEYS, _power_of_two(-(-capacity // _MAX_SPLITS)))
    return Split(keys=keys, number=max(1, -(-capacity // keys)))


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    page_table: Any,
    kv_lens: Any,
    cu_seqlens_q: Any,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Any,
    out: Any,
    lse: Any,
    k_scale: Any = None,
    v_scale: Any = None,
    workspace: Any = None,
    max_seqlen_q: int = 0,
    q_scale: Any = None,
    any_split: bool = True,
) -> None:
    """See `radix_kernels.flash_attn_with_kvcache`. INT8 is refused; workspace is not used, nor is
    any_split: it is batch invariant in any case.

    Reads no tensor on the host, so a CUDA graph may capture it. A batch with one query a row (by
    max_seqlen_q, or as many tokens as rows without it) is split over the keys; any other is not.
    Within each of the two a row's bits do not depend on the batch; between them the last bits may
    differ. Tokens before the first row and behind the last are left alone.
    """
    op = "flash_attn_with_kvcache"
    q, k, v = torch_views(q, k_cache, v_cache)
    table, lens, cu = torch_views(page_table, kv_lens, cu_seqlens_q)
    qs, ks, vs = torch_views(q_scale, k_scale, v_scale)
    sinks, out, lse = torch_views(sinks, out, lse)
    if is_int8(k):
        raise NotImplementedError(f"{op}: the Triton kernel has no INT8")
    check_paged(op, q, k, v, table, lens, cu, qs, ks, vs)
    if q.shape[0] > 0 and k.shape[1] == 0:
        raise ValueError(f"{op}: q has {q.shape[0]} rows, but pages hold no token")
    if table.shape[1] == 0:  # it has no memory, and no row a key
        out.zero_()
        if lse is not None:
            lse.copy_(float("-inf") if sinks is None else sinks)
        return
    decode = _is_decode(q.shape[0], table.shape[0], max_seqlen_q)
    split = choose_split(table.shape[1] * k.shape[1]) if decode else WHOLE
    options = _read_options(op, softmax_scale, causal, (window_left, window_right), softcap)
    _attend(op, (q, k, v), (table, lens, cu), (qs, ks, vs), options, sinks, out, lse, decode, split)


def flash_attn_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Any,
    out: Any,
    lse: Any,
    k_scale: Any = None,
    v_scale: Any = None,
    workspace: Any = None,
    max_seqlen_q: int = 0,
    q_scale: Any = None,
) -> None:
    """See `radix_kernels.flash_attn_varlen`. As `flash_attn_with_kvcache` here, but never split
    over the keys."""
    op = "flash_attn_varlen"
    q, k, v = torch_views(q, k, v)
    cu, cu_k = torch_views(cu_seqlens_q, cu_seqlens_k)
    qs, ks, vs = torch_views(q_scale, k_scale, v_scale)
    sinks, out, lse = torch_views(sinks, out, lse)
    check_varlen(op, q, k, v, cu, cu_k, qs, ks, vs)
    decode = _is_decode(q.shape[0], cu.shape[0] - 1, max_seqlen_q)
    options = _read_options(op, softmax_scale, causal, (window_left, window_right), softcap)
    _attend(op, (q, k, v), (None, cu_k, cu), (qs, ks, vs), options, sinks, out, lse, decode, WHOLE)


def _read_options(
    op: str, softmax_scale: float, causal: bool, window: tuple[int, int], softcap: float
) -> Options:
    """The numbers of a call, checked."""
    window_left, window_right = read_window(op, window)
    check_softcap(op, softcap)
    return Options(
        softmax_scale=float(softmax_scale),
        causal=bool(causal) or window_right == 0,
        window_left=window_left,
        softcap=float(softcap),
    )


def _attend(
    op: str,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lengths: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor],
    scales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    options: Options,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    decode: bool,
    split: Split,
) -> None:
    """Checks the rest and launches. lengths: page table (None: contiguous KV), KV lengths or
    starts, query starts. scales: of q, k and v."""
    q, k, v = qkv
    table, kv_lens, cu_seqlens_q = lengths
    check_options(op, q, v, sinks, out)
    tokens, heads, dim = q.shape
    v_dim = v.shape[-1]
    rows = cu_seqlens_q.shape[0] - 1
    if tokens == 0:
        return
    group = heads // k.shape[-2]
    tiles = choose_tiles(max(dim, v_dim), group, out.element_size(), decode, _on_amd())
    most = min(tokens, rows) if decode else tokens  # that the rows can have
    part_out, part_lse = _partials(q[:most], split.number, v_dim)
    common = {
        "HEADS": heads,
        "V_DIM": v_dim,
        "V_PAD": _power_of_two(v_dim),
        "SPLITS": split.number,
        "SINKS": sinks is not None,
        "WITH_LSE": lse is not None,
    }
    attend[(most // (tiles.block_m // group) + rows, k.shape[-2], split.number)](
        _bytes(q), _bytes(k), _bytes(v), table, kv_lens, cu_seqlens_q, sinks, *scales, out, lse,
        part_out, part_lse, rows, options.softmax_scale, options.softcap, options.window_left,
        q.stride(0), q.stride(1), *_token_strides(k), *_token_strides(v),
        out.stride(0), out.stride(1), 0 if table is None else table.stride(0),
        DIM=dim, DIM_PAD=_power_of_two(dim), GROUP=group,
        PAGE_SIZE=0 if table is None else k.shape[1],
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, SPLIT=split.keys if split.number > 1 else 0,
        CAUSAL=options.causal, WINDOW=options.window_left >= 0, SOFTCAP=options.softcap > 0,
        Q_BYTES=is_fp8(q), KV_BYTES=is_fp8(k), FNUZ=k.dtype == torch.float8_e4m3fnuz,
        PER_HEAD=_is_per_head(scales[1]), DIES=_choose_dies(k, decode),
        **common, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if split.number > 1:
        combine[(most, heads)](
            part_out, part_lse, cu_seqlens_q, sinks, out, lse, rows, out.stride(0), out.stride(1),
            SPLITS_PAD=_power_of_two(split.number), **common, num_warps=1,
        )  # fmt: skip


def _on_amd() -> bool:
    return torch.version.hip is not None


def _choose_dies(k: torch.Tensor, decode: bool) -> int:
    """The dies over which the KV heads go. 1 where no two programs read the same keys (decode), or
    where some dies would have more heads than others: later blocks of a prompt see more keys, so
    parts of a head are not alike."""
    dies = count_dies(k.device)
    return 1 if decode or k.shape[-2] % dies else dies


def _is_decode(tokens: int, rows: int, max_seqlen_q: int) -> bool:
    """One query per row: as the hint says or, without one, as the shapes do."""
    if max_seqlen_q > 0:
        return max_seqlen_q == 1
    return tokens == rows


def _token_strides(x: torch.Tensor) -> tuple[int, ...]:
    """Of keys or values: from page to page (0 where they are contiguous), token and head."""
    return x.stride()[:3] if x.ndim == 4 else (0, *x.stride()[:2])


def _is_per_head(scale: torch.Tensor | None) -> bool:
    return scale is not None and scale.shape[0] > 1


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """FP8 as its bytes: not every chip has a type for them."""
    return x.view(torch.uint8) if is_fp8(x) else x


def _partials(
    q: torch.Tensor, splits: int, dim: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """float32 space for the result and log-sum of each split; none without splits."""
    if splits == 1:
        return None, None
    tokens, heads, _ = q.shape
    part_out = q.new_empty((tokens, heads, splits, dim), dtype=torch.float32)
    part_lse = q.new_empty((tokens, heads, splits), dtype=torch.float32)
    return part_out, part_lse


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
