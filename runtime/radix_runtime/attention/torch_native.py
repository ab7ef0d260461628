"""The torch_native backend: plain torch on any device; slow, and what the others are held to."""

import torch

from ..batch import ForwardBatch
from ..device import Device
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
        pool, start = batch.kv_pool, 0
        lengths = zip(batch.query_lens_host.tolist(), batch.kv_lens.tolist(), strict=True)
        for entry, (query_len, kv_len) in enumerate(lengths):
            pages = batch.page_table[entry, : -(-kv_len // pool.page_size)]
            caches = (pool.k[layer.layer_id], pool.v[layer.layer_id])
            k, v = (cache.index_select(0, pages).flatten(0, 1)[:kv_len] for cache in caches)
            start, rows = start + query_len, slice(start, start + query_len)
            out[rows] = _attend(q[rows], k, v, layer)
        return out


# q [Tq, Hq, D] are the last tokens of k, v [Tk, Hkv, D]; returns [Tq, Hq, D] in q's dtype.
def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec
) -> torch.Tensor:
    query = q.float().unflatten(1, (layer.num_kv_heads, -1))  # query heads grouped by KV head
    scores = torch.einsum("qhgd,khd->hgqk", query, k.float()) * layer.scale
    key = torch.arange(len(k), device=q.device)
    last = key[len(k) - len(q) :, None]
    hidden = key > last
    if layer.window is not None:
        hidden |= key <= last - layer.window
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v.float()).flatten(1, 2).to(q.dtype)
