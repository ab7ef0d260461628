"""Multi-head latent attention in Triton: tile and split choice, launch."""

from __future__ import annotations

from typing import Any

import torch

from .._arrays import torch_views
from .._checks.mla import check_decode
from .attention import Tiles
from .dies import count_dies, programs_for
from .mla_kernel import attend_latent, join_splits

# A split has at least this many keys, and a row at most this many splits.
_SPLIT_KEYS = 512
MAX_SPLITS = 64
# Of a batch whose bits may follow from its shape: about two programs for each multiprocessor of a
# large chip.
_PROGRAMS = 512
_INVARIANT_SPLITS = 16
_LATENT_SIZES = (256, 512)
_ROPE_SIZE = 64


def choose_tiles(heads: int, amd: bool) -> Tiles:
    """Tiles without spills, within 64 KiB of shared memory on AMD and 99 KiB on NVIDIA, for both
    forms of the cache.

    By the heads alone, so that a row's bits do not depend on how many of its tokens, or rows, a
    batch has.
    """
    num_warps = 4 if amd else 8
    if heads <= 16:
        return Tiles(block_m=16, block_n=32, num_warps=num_warps, num_stages=2)
    return Tiles(block_m=32, block_n=16 if amd else 32, num_warps=num_warps, num_stages=2)


def choose_splits(capacity: int, blocks: int, any_split: bool) -> int:
    """Into how many pieces rows of up to `capacity` keys are cut, in a batch of `blocks` query
    blocks.

    Without any_split the pieces of a row follow from its own length, whatever the capacity: below
    16 of them a piece has 512 keys. Either way the choice is of shapes alone, so a captured graph
    serves other lengths.
    """
    most = _INVARIANT_SPLITS
    if any_split:
        most = min(MAX_SPLITS, max(1, _PROGRAMS // max(blocks, 1)))
    return max(1, min(most, -(-capacity // _SPLIT_KEYS)))


def mla_decode(
    q_nope: Any,
    q_rope: Any,
    kv_cache: Any,
    page_table: Any,
    kv_lens: Any,
    cu_seqlens_q: Any,
    scale: float,
    causal: bool,
    out: Any,
    lse: Any,
    workspace: Any = None,
    max_seqlen_q: int = 0,
    any_split: bool = True,
) -> None:
    """See `radix_kernels.mla_decode`. workspace and max_seqlen_q are not used; reads no tensor on
    the host.

    Other sizes than L 256 and 512 and R 64, float32, and an FP8 cache whose tokens do not begin at
    multiples of 4 bytes are refused.
    """
    op = "mla_decode"
    q_nope, q_rope, kv_cache = torch_views(q_nope, q_rope, kv_cache)
    page_table, kv_lens, cu_seqlens_q = torch_views(page_table, kv_lens, cu_seqlens_q)
    out, lse = torch_views(out, lse)
    check_decode(op, q_nope, q_rope, kv_cache, page_table, kv_lens, cu_seqlens_q, out)
    if q_nope.numel() == 0:
        return
    tokens, heads, latent = q_nope.shape
    rows, columns = page_table.shape
    page_size = kv_cache.shape[1]
    fp8 = kv_cache.dtype == torch.uint8
    q_piece = _piece(q_nope, q_rope, out)
    kv_piece = _piece(kv_cache)
    _refuse_others(op, q_nope, q_rope, kv_piece if fp8 else 4)
    tiles = choose_tiles(heads, torch.version.hip is not None)
    blocks = tokens * heads // tiles.block_m + rows
    splits = choose_splits(columns * page_size, max(rows, blocks - rows), any_split)
    part_out, part_lse = _partials(q_nope, splits)
    common = {"LATENT": latent, "HEADS": heads, "Q_PIECE": q_piece, "WITH_LSE": lse is not None}
    out_strides = _strides_in_pieces(out, q_piece)
    dies = count_dies(q_nope.device)
    attend_latent[(programs_for(blocks * splits, dies),)](
        q_nope, q_rope, kv_cache, page_table, kv_lens, cu_seqlens_q, out, lse, part_out, part_lse,
        scale, rows, blocks, splits,
        *_strides_in_pieces(q_nope, q_piece), *_strides_in_pieces(q_rope, q_piece),
        *_strides_in_pieces(kv_cache, kv_piece), *out_strides, page_table.stride(0),
        PAGE_SIZE=page_size, KV_PIECE=kv_piece, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
        SPLIT_KEYS=_SPLIT_KEYS if splits > 1 else 0, FP8=fp8, CAUSAL=causal, DIES=dies, **common,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if splits > 1:
        join_splits[(tokens, heads)](
            part_out, part_lse, out, lse, splits, *out_strides,
            MAX_SPLITS=MAX_SPLITS, **common, num_warps=4,
        )  # fmt: skip


def _refuse_others(op: str, q_nope: torch.Tensor, q_rope: torch.Tensor, aligned: int) -> None:
    """NotImplementedError for sizes and dtypes that the kernel is not made for. aligned: the bytes
    in whose multiples tokens of the FP8 form begin."""
    latent = q_nope.shape[-1]
    rope = q_rope.shape[-1]
    if latent not in _LATENT_SIZES or rope != _ROPE_SIZE:
        sizes = f"{latent} latent and {rope} rotary values"
        raise NotImplementedError(f"{op}: Triton's kernel does not take {sizes}")
    if q_nope.dtype == torch.float32:
        raise NotImplementedError(f"{op}: Triton's kernel does not take float32")
    if aligned < 4:
        raise NotImplementedError(f"{op}: kv_cache has tokens that are not aligned to 4 bytes")


def _strides_in_pieces(x: torch.Tensor, piece: int) -> tuple[int, int]:
    """The first two strides in pieces of so many elements."""
    return x.stride(0) // piece, x.stride(1) // piece


def _piece(*tensors: torch.Tensor) -> int:
    """The most elements, up to 16 bytes, in whose multiples every row of the tensors begins."""
    piece = 16 // tensors[0].element_size()
    while piece > 1 and not all(_begins_at(x, piece) for x in tensors):
        piece //= 2
    return piece


def _begins_at(x: torch.Tensor, piece: int) -> bool:
    if x.data_ptr() % (piece * x.element_size()) != 0:
        return False
    steps = [x.stride(i) for i in range(x.ndim - 1) if x.shape[i] > 1]
    return all(step % piece == 0 for step in steps)


def _partials(q: torch.Tensor, splits: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """float32 space for the result and log-sum of each split; none without splits."""
    if splits == 1:
        return None, None
    tokens, heads, latent = q.shape
    part_out = q.new_empty((tokens, heads, splits, latent), dtype=torch.float32)
    return part_out, q.new_empty((tokens, heads, splits), dtype=torch.float32)
