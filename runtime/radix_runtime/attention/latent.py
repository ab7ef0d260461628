"""Latent attention over the paged cache by the kernel wheel.

Decode entries attend in the absorbed form to the latents as they lie in the cache. Chunks do not:
their cached latents are gathered and expanded to keys and values, and attention over these costs a
fraction of the absorbed form's operations."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .. import ops
from ..batch import ForwardBatch
from ..device import upload
from .base import Expand, LatentSpec

_WORKSPACE = 512 << 20  # bytes of expanded keys and values at a time, where a row fits


def decode(
    layer: LatentSpec,
    q_latent: torch.Tensor,
    q_rope: torch.Tensor,
    batch: ForwardBatch,
    out: torch.Tensor,
) -> torch.Tensor:
    """See AttentionBackend.decode_latents."""
    count = batch.num_decode
    ops.mla_decode(
        q_latent,
        q_rope,
        batch.kv_pool.latent[layer.layer_id],
        batch.page_table[:count],
        batch.kv_lens[:count],
        batch.cu_seqlens_q[: count + 1],
        softmax_scale=layer.scale,
        max_seqlen_q=1 if batch.limits.expands_decode else batch.max_query_len,
        out=out,
    )
    return out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """Consecutive chunks of a batch and the part of their KV that is expanded at once.

    entries: of the batch; tokens: those of their queries among the chunks' tokens. Device tensors:
    cu_seqlens_q, cu_seqlens_k int32 [n + 1], starts int32 [n], the first position of each. Host:
    num_keys, max_query_len. is_last: the queries are the last of these tokens, else they stand
    behind all of them."""

    entries: slice
    tokens: slice
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    starts: torch.Tensor
    num_keys: int
    max_query_len: int
    is_last: bool


def pieces(batch: ForwardBatch, max_keys: int) -> list[Piece]:
    """The chunks of a batch in pieces of about `max_keys` KV tokens. On a GPU a longer row is cut;
    on the CPU, where a row's bits must not depend on where its chunks begin, it is one piece."""
    built = []
    for first, ranges in _cut(batch, max_keys):
        count = len(ranges)
        before = int(batch.chunk_query_lens[:first].sum())
        queries = batch.chunk_query_lens[first : first + count]
        starts = np.array([begin for begin, _ in ranges], np.int32)
        sizes = np.array([end - begin for begin, end in ranges], np.int32)
        block = np.concatenate([[0], queries.cumsum(), [0], sizes.cumsum(), starts])
        device = batch.device.torch_device
        cu_q, cu_k, first_positions = upload(block.astype(np.int32), device).split(
            [count + 1, count + 1, count]
        )
        entry = batch.num_decode + first
        built.append(
            Piece(
                entries=slice(entry, entry + count),
                tokens=slice(before, before + int(queries.sum())),
                cu_seqlens_q=cu_q,
                cu_seqlens_k=cu_k,
                starts=first_positions,
                num_keys=int(sizes.sum()),
                max_query_len=int(queries.max()),
                is_last=ranges[-1][1] == batch.chunk_kv_lens[first + count - 1],
            )
        )
    return built


def _cut(batch: ForwardBatch, max_keys: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """(first chunk, the positions [begin, end) of it and of each chunk behind it) of each piece."""
    lens = batch.chunk_kv_lens.tolist()
    queries = batch.chunk_query_lens.tolist()
    waiting: list[tuple[int, int]] = []
    for index, (kv_len, query_len) in enumerate(zip(lens, queries, strict=True)):
        if waiting and sum(end for _, end in waiting) + kv_len > max_keys:
            yield index - len(waiting), waiting
            waiting = []
        if kv_len <= max_keys or batch.device.is_cpu:
            waiting.append((0, kv_len))
            continue
        cached = kv_len - query_len
        for begin in range(0, cached, max_keys):
            yield index, [(begin, min(begin + max_keys, cached))]
        yield index, [(cached, kv_len)]
    if waiting:
        yield len(lens) - len(waiting), waiting


def prefill(
    layer: LatentSpec,
    q: torch.Tensor,
    expand: Expand,
    batch: ForwardBatch,
    out: torch.Tensor,
) -> torch.Tensor:
    """See AttentionBackend.prefill_latents."""
    cache = batch.kv_pool.latent[layer.layer_id]
    joined: tuple[torch.Tensor, torch.Tensor] | None = None  # of a row in several pieces
    token_bytes = 2 * layer.num_heads * (q.shape[-1] + out.shape[-1]) * q.element_size()
    if batch.metadata is None:  # the same for all layers
        batch.metadata = pieces(batch, max(1, _WORKSPACE // token_bytes))
    for piece in batch.metadata:
        tokens = ops.gather_mla_kv(
            cache,
            batch.page_table[piece.entries],
            piece.cu_seqlens_k,
            q.new_empty(piece.num_keys, layer.latent_dim + layer.rope_dim),
            starts=piece.starts,
        )
        latents, rotary = tokens.split([layer.latent_dim, layer.rope_dim], -1)
        k_nope, values = expand(latents)
        keys = q.new_empty(piece.num_keys, layer.num_heads, q.shape[-1])
        ops.concat_mla_k(keys, k_nope, rotary[:, None])
        result, sums = ops.flash_attn_varlen(
            q[piece.tokens],
            keys,
            values,
            piece.cu_seqlens_q,
            piece.cu_seqlens_k,
            softmax_scale=layer.scale,
            causal=piece.is_last,
            return_softmax_lse=True,
            max_seqlen_q=piece.max_query_len,
            out=out[piece.tokens] if joined is None and piece.is_last else None,
        )
        if joined is not None:
            target = out[piece.tokens] if piece.is_last else joined[0]
            result, sums = ops.merge_state(*joined, result, sums, out=target, lse=joined[1])
        joined = None if piece.is_last else (result, sums)
    return out
