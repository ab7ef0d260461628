"""The backends `radix` and `triton`: the kernel wheel's paged attention, native and portable (CUDA and ROCm)."""

from __future__ import annotations

import torch

from .. import ops
from ..batch import ForwardBatch
from ..device import Device
from ..errors import ConfigError
from ..model_config import ModelConfig
from .base import AttentionBackend, AttentionSpec


class RadixAttention(AttentionBackend):
    """One call serves prefill, decode and mixed batches; nothing to plan."""

    @classmethod
    def supports(cls, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int) -> bool:
        dtype = str(kv_dtype).removeprefix("torch.")
        # On the CPU a source tree without the library runs the wheel's reference.
        return device.is_cpu or ops.has_native("flash_attn_with_kvcache", dtype, device.kind)

    def forward(self, layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor) -> torch.Tensor:
        window = (_left(layer), -1)
        ops.flash_attn_with_kvcache(*_arrays(layer, q, batch), softmax_scale=layer.scale, window_size=window, out=out)
        return out


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
        causal, right, softcap, sinks, lse = True, -1, 0.0, None, None
        arrays = _arrays(layer, q, batch)
        self._attention(*arrays, layer.scale, causal, _left(layer), right, softcap, sinks, out, lse)
        return out


def _arrays(layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
    k, v = batch.kv_pool.k[layer.layer_id], batch.kv_pool.v[layer.layer_id]
    return q, k, v, batch.page_table, batch.kv_lens, batch.cu_seqlens_q


def _left(layer: AttentionSpec) -> int:
    """Tokens that a token sees before itself; -1 for all."""
    return -1 if layer.window is None else layer.window - 1
