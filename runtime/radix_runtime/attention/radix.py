"""The radix backend: the kernel wheel's paged attention."""

from __future__ import annotations

import torch

from .. import ops
from ..batch import ForwardBatch
from ..device import Device
from ..model_config import ModelConfig
from .base import AttentionBackend, AttentionSpec


class RadixAttention(AttentionBackend):
    """One call serves prefill, decode and mixed batches; nothing to plan."""

    @classmethod
    def supports(cls, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int) -> bool:
        if device.is_cpu:  # a source tree without the library runs the wheel's reference
            return True
        dtype = str(kv_dtype).removeprefix("torch.")
        return ops.has_native("flash_attn_with_kvcache", dtype, device.kind)

    def forward(self, layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor) -> torch.Tensor:
        ops.flash_attn_with_kvcache(
            q,
            batch.kv_pool.k[layer.layer_id],
            batch.kv_pool.v[layer.layer_id],
            batch.page_table,
            batch.kv_lens,
            batch.cu_seqlens_q,
            softmax_scale=layer.scale,
            causal=True,
            window_size=(-1 if layer.window is None else layer.window - 1, -1),
            out=out,
        )
        return out
