"""Paged attention in Triton: checks, tile choice and launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import _arrays
from .._attention_checks import check_options, check_paged
from .attention_kernel import attend, combine

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


def choose_tiles(dim: int, group: int, itemsize: int, decode: bool) -> Tiles:
    """Tiles that keep K and V within half of the 64 KiB of shared memory that a CDNA3 CU has."""
    dim_pad = _power_of_two(dim)
    block_n = max(16, min(64, _KV_TILE_BYTES // (dim_pad * itemsize)))
    least_m = max(16, _power_of_two(group))
    block_m = least_m if decode else max(least_m, 64 if dim_pad * itemsize <= 256 else 32)
    return Tiles(block_m, block_n, num_warps=4, num_stages=1 if itemsize == 4 else 2)


def choose_split(capacity: int) -> tuple[int, int]:
    """(keys in a split, number of splits) for rows of up to `capacity` keys."""
    keys = max(_SPLIT_KEYS, _power_of_two(-(-capacity // _MAX_SPLITS)))
    return keys, max(1, -(-capacity // keys))


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
) -> None:
    """See `radix_kernels.flash_attn_with_kvcache`. FP8 is refused; workspace is not used.

    Reads no tensor on the host, so a CUDA graph may capture it. A batch with one query a row is
    split over the keys; any other is not. Within each of the two a row's bits do not depend on
    the batch; between them the last bits may differ.
    """
    arrays = (q, k_cache, v_cache, page_table, kv_lens, cu_seqlens_q, sinks, out, lse)
    q, k_cache, v_cache, page_table, kv_lens, cu_seqlens_q, sinks, out, lse = (_arrays.as_torch(x) for x in arrays)
    op = "flash_attn_with_kvcache"
    if any(scale is not None for scale in (q_scale, k_scale, v_scale)):
        raise NotImplementedError(f"{op}: the Triton kernel has no FP8")
    check_paged(op, q, k_cache, v_cache, page_table, kv_lens, cu_seqlens_q)
    check_options(op, q, v_cache, window_left, window_right, softcap, sinks, out)
    tokens, heads, dim = q.shape
    v_dim = v_cache.shape[3]
    rows, page_size, kv_heads = page_table.shape[0], k_cache.shape[1], k_cache.shape[2]
    if tokens == 0:
        return
    if rows == 0 or page_size == 0 or page_table.shape[1] == 0:
        raise ValueError(f"{op}: q has {tokens} rows, but the page table or cache is empty")
    decode = tokens == rows
    group = heads // kv_heads
    tiles = choose_tiles(max(dim, v_dim), group, q.element_size(), decode)
    split, splits = choose_split(page_table.shape[1] * page_size) if decode else (0, 1)
    if splits == 1:
        split = 0
    part_out, part_lse = _partials(q, splits, v_dim)
    common = {
        "HEADS": heads,
        "V_DIM": v_dim,
        "V_PAD": _power_of_two(v_dim),
        "SPLITS": splits,
        "SINKS": sinks is not None,
        "WITH_LSE": lse is not None,
    }
    per_block = tiles.block_m // group
    attend[(tokens // per_block + rows, kv_heads, splits)](
        q, k_cache, v_cache, page_table, kv_lens, cu_seqlens_q, sinks, out, lse,
        part_out, part_lse, rows, softmax_scale, softcap, window_left,
        q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        out.stride(0), out.stride(1), page_table.stride(0),
        DIM=dim, DIM_PAD=_power_of_two(dim), GROUP=group, PAGE_SIZE=page_size,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, SPLIT=split,
        CAUSAL=causal or window_right == 0, WINDOW=window_left >= 0,
        SOFTCAP=softcap > 0, **common, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        combine[(tokens, heads)](
            part_out, part_lse, sinks, out, lse, out.stride(0), out.stride(1),
            SPLITS_PAD=_power_of_two(splits), **common, num_warps=1,
        )  # fmt: skip


def _partials(q: torch.Tensor, splits: int, dim: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """float32 space for the result and log-sum of each split; none without splits."""
    if splits == 1:
        return None, None
    tokens, heads, _ = q.shape
    part_out = torch.empty((tokens, heads, splits, dim), dtype=torch.float32, device=q.device)
    return part_out, torch.empty_like(part_out[..., 0], memory_format=torch.contiguous_format)


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
