"""The triton backend: the kernel wheel's portable GPU attention, for CUDA and ROCm."""

from __future__ import annotations

import torch

from .. import ops
from ..batch import ForwardBatch
from ..device import Device
from ..errors import ConfigError
from ..model_config import ModelConfig
from .base import AttentionBackend, AttentionSpec


class TritonAttention(AttentionBackend):
    def __init__(self, config: ModelConfig, device: Device) -> None:
        super().__init__(config, device)
        kernels = ops.triton_kernels()
        if kernels is None:
            raise ConfigError("attention backend triton: Triton is not installed")
        self._attention = kernels.flash_attn_with_kvcache

    @classmethod
    def supports(cls, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int) -> bool:
        return not device.is_cpu and ops.triton_kernels() is not None

    def forward(self, layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor) -> torch.Tensor:
        self._attention(
            q,
            batch.kv_pool.k[layer.layer_id],
            batch.kv_pool.v[layer.layer_id],
            batch.page_table,
            batch.kv_lens,
            batch.cu_seqlens_q,
            layer.scale,
            True,  # causal
            -1 if layer.window is None else layer.window - 1,
            -1,  # nothing to the right but what causal leaves
            0.0,  # no soft cap
            None,  # no sinks
            out,
            None,  # no log-sum-exp
        )
        return out
