"""The backend `torch_native`: plain torch on any device; slow, and what the others are held to."""

from dataclasses import replace

import torch

from ..batch import ForwardBatch
from ..device import Device
from ..memory.kv_layout import FP8_TYPES
from ..memory.kv_pool import KVPool
from ..model_config import ModelConfig
from .base import AttentionBackend, AttentionSpec, Expand, LatentSpec


class TorchNativeAttention(AttentionBackend):
    """Row by row: gathers a row's pages, then softmax(q k^T) v in float32."""

    capturable = False  # it reads the lengths on the host
    supports_latents = True

    @classmethod
    def supports(
        cls, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int
    ) -> bool:
        is_fp8 = kv_dtype in FP8_TYPES
        return not is_fp8 or not (device.is_cpu or config.spec.keeps_latents)

    def forward(
        self, layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor
    ) -> torch.Tensor:
        pool = batch.kv_pool
        query_lens = batch.cu_seqlens_q.diff().tolist()
        lengths = zip(query_lens, batch.kv_lens.tolist(), strict=True)
        start = 0
        for entry, (query_len, kv_len) in enumerate(lengths):
            k, v = _gather(pool, layer.layer_id, batch.page_table[entry], kv_len)
            rows = slice(start, start + query_len)
            out[rows] = _attend(q[rows], k, v, layer)
            start += query_len
        return out

    def decode_latents(
        self,
        layer: LatentSpec,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> torch.Tensor:
        q = torch.cat((q_latent, q_rope), -1)
        starts = batch.cu_seqlens_q.tolist()
        for entry in range(batch.num_decode):
            rows = slice(starts[entry], starts[entry + 1])
            keys = _gather_latents(batch, layer, entry)[:, None]
            out[rows] = _attend(q[rows], keys, keys[..., : layer.latent_dim], _one_head(layer))
        return out

    def prefill_latents(
        self,
        layer: LatentSpec,
        q: torch.Tensor,
        expand: Expand,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> torch.Tensor:
        starts = batch.chunk_cu_seqlens.sub(batch.num_decode_tokens).tolist()
        for entry in range(batch.num_decode, batch.batch_size):
            rows = slice(starts[entry], starts[entry + 1])
            tokens = _gather_latents(batch, layer, entry)
            k_nope, values = expand(tokens[:, : layer.latent_dim])
            rotary = tokens[:, None, layer.latent_dim :].expand(-1, layer.num_heads, -1)
            keys = torch.cat((k_nope, rotary), -1)
            heads = replace(_one_head(layer), num_kv_heads=layer.num_heads)
            out[rows] = _attend(q[rows], keys, values, heads)
        return out


def _gather_latents(batch: ForwardBatch, layer: LatentSpec, entry: int) -> torch.Tensor:
    """A row's tokens, [kv_len, latent + rotary values]."""
    pool = batch.kv_pool
    kv_len = int(batch.kv_lens[entry])
    pages = batch.page_table[entry][: -(-kv_len // pool.page_size)]
    return pool.latent[layer.layer_id].index_select(0, pages).flatten(0, 1)[:kv_len]


def _one_head(layer: LatentSpec) -> AttentionSpec:
    """Latent attention as attention with one KV head."""
    return AttentionSpec(
        layer_id=layer.layer_id,
        num_heads=layer.num_heads,
        num_kv_heads=1,
        head_dim=layer.latent_dim,
        scale=layer.scale,
    )


def _gather(
    pool: KVPool, layer_id: int, page_table: torch.Tensor, kv_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's keys and values, both [kv_len, num_kv_heads, head_dim]."""
    pages = page_table[: -(-kv_len // pool.page_size)]
    k = _read(pool.k[layer_id], pool.k_scale.get(layer_id), pages)
    v = _read(pool.v[layer_id], pool.v_scale.get(layer_id), pages)
    return k[:kv_len], v[:kv_len]


def _read(cache: torch.Tensor, scale: torch.Tensor | None, pages: torch.Tensor) -> torch.Tensor:
    """The tokens of these pages; times their scales where they are quantized."""
    # As bytes: torch does not index every type.
    tokens = cache.view(torch.uint8).index_select(0, pages).view(cache.dtype).flatten(0, 1)
    if scale is None:
        return tokens
    if scale.dim() > 1:
        scale = scale.index_select(0, pages).flatten(0, 1)[..., None]
    return tokens.float() * scale


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec
) -> torch.Tensor:
    """q [Tq, Hq, D] are the last tokens of k, v [Tk, Hkv, D]; returns [Tq, Hq, D] in q's dtype."""
    grouped = q.float().unflatten(1, (layer.num_kv_heads, -1))  # query heads by KV head
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k.float()) * layer.scale
    if layer.softcap is not None:
        scores = (scores / layer.softcap).tanh_().mul_(layer.softcap)
    key = torch.arange(len(k), device=q.device)
    last = key[len(k) - len(q) :, None]
    hidden = key > last
    if layer.window is not None:
        hidden |= key <= last - layer.window
    scores = scores.masked_fill_(hidden, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.view(layer.num_kv_heads, -1, 1, 1).expand(-1, -1, len(q), -1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hgqk,khd->qhgd", weights, v.float()).flatten(1, 2).to(q.dtype)
