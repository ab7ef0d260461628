"""The backends `radix` and `triton`: the kernel wheel's paged attention, native and portable (CUDA
and ROCm)."""

import torch

from .. import ops
from ..batch import ForwardBatch
from ..device import Device
from ..errors import ConfigError
from ..model_config import ModelConfig
from .base import AttentionBackend, AttentionSpec


class RadixAttention(AttentionBackend):
    """One call serves any batch. On a GPU, where decode and prefill are different kernels, a mixed
    batch is two calls: its decode rows then cost, and are bit for bit, what they are in a batch of
    their own."""

    supports_fused_decoder = True

    @classmethod
    def supports(
        cls, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int
    ) -> bool:
        dtype = str(kv_dtype).removeprefix("torch.")
        # On the CPU a source tree without the library runs the wheel's reference.
        return device.is_cpu or ops.has_native("flash_attn_with_kvcache", dtype, device.kind)

    def plan(self, batch: ForwardBatch) -> None:
        if not self.device.is_cpu and 0 < batch.num_decode < batch.batch_size:
            batch.metadata = batch.cu_seqlens_q[batch.num_decode :] - batch.num_decode

    def forward(
        self, layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor
    ) -> torch.Tensor:
        def call(rows: slice, tokens: slice, cu_seqlens_q: torch.Tensor, longest: int) -> None:
            ops.flash_attn_with_kvcache(
                q[tokens], *_caches(layer, batch), batch.page_table[rows], batch.kv_lens[rows], cu_seqlens_q,
                softmax_scale=layer.scale, window_size=(_left(layer), -1), max_seqlen_q=longest, out=out[tokens],
            )  # fmt: skip

        if batch.metadata is None:
            call(slice(None), slice(None), batch.cu_seqlens_q, batch.max_query_len)
        else:
            n = batch.num_decode
            call(slice(n), slice(n), batch.cu_seqlens_q[: n + 1], 1)
            call(slice(n, None), slice(n, None), batch.metadata, batch.max_query_len)
        return out


class TritonAttention(AttentionBackend):
    def __init__(self, config: ModelConfig, device: Device) -> None:
        super().__init__(config, device)
        kernels = ops.triton_kernels()
        if kernels is None:
            raise ConfigError("attention backend triton: Triton is not installed")
        self._attention = kernels.flash_attn_with_kvcache

    @classmethod
    def supports(
        cls, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int
    ) -> bool:
        return not device.is_cpu and ops.triton_kernels() is not None

    def forward(
        self, layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor
    ) -> torch.Tensor:
        causal, right, softcap, sinks, lse = True, -1, 0.0, None, None
        arrays = q, *_caches(layer, batch), batch.page_table, batch.kv_lens, batch.cu_seqlens_q
        self._attention(*arrays, layer.scale, causal, _left(layer), right, softcap, sinks, out, lse)
        return out


def _caches(layer: AttentionSpec, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.kv_pool.k[layer.layer_id], batch.kv_pool.v[layer.layer_id]


# Tokens that a token sees before itself; -1 for all.
def _left(layer: AttentionSpec) -> int:
    return -1 if layer.window is None else layer.window - 1
