"""The backend `torch_native`: plain torch on any device; slow, and what the others are held to."""

import torch

from ..batch import ForwardBatch
from ..device import Device
from ..memory.kv_pool import KVPool
from ..model_config import ModelConfig
from .base import AttentionBackend, AttentionSpec


class TorchNativeAttention(AttentionBackend):
    """Row by row: gathers a row's pages, then softmax(q k^T) v in float32."""

    @classmethod
    def supports(
        cls, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int
    ) -> bool:
        return True

    def forward(
        self, layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor
    ) -> torch.Tensor:
        pool = batch.kv_pool
        lengths = zip(batch.query_lens_host.tolist(), batch.kv_lens.tolist(), strict=True)
        start = 0
        for entry, (query_len, kv_len) in enumerate(lengths):
            k, v = _gather(pool, layer.layer_id, batch.page_table[entry], kv_len)
            rows = slice(start, start + query_len)
            out[rows] = _attend(q[rows], k, v, layer)
            start += query_len
        return out


def _gather(
    pool: KVPool, layer_id: int, page_table: torch.Tensor, kv_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row's keys and values, both [kv_len, num_kv_heads, head_dim]."""
    pages = page_table[: -(-kv_len // pool.page_size)]
    k = pool.k[layer_id].index_select(0, pages).flatten(0, 1)
    v = pool.v[layer_id].index_select(0, pages).flatten(0, 1)
    return k[:kv_len], v[:kv_len]


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
