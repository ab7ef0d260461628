"""The default backend: the kernel wheel's attention over the paged KV cache."""

import torch

from .. import ops
from ..batch import ForwardBatch
from ..device import Device
from ..model_config import ModelConfig
from .base import AttentionBackend, AttentionSpec


class PagedAttention(AttentionBackend):
    """One call of the wheel serves any batch. On a GPU, where decode and prefill are different
    kernels, a mixed batch is two calls: its decode rows then cost, and are bit for bit, what they
    are in a batch of their own."""

    supports_fused_decoder = True

    def __init__(self, config: ModelConfig, device: Device) -> None:
        super().__init__(config, device)
        # cu_seqlens_q of a mixed batch's prefill rows, int32 [max_batch + 1].
        self._prefill_cu_seqlens: torch.Tensor | None = None

    @classmethod
    def supports(
        cls, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int
    ) -> bool:
        dtype = str(kv_dtype).removeprefix("torch.")
        # On the CPU a source tree without the library runs the wheel's reference.
        return device.is_cpu or ops.has_native("flash_attn_with_kvcache", dtype, device.kind)

    def plan(self, batch: ForwardBatch) -> None:
        if self.device.is_cpu:
            return
        if self._prefill_cu_seqlens is None:
            self._prefill_cu_seqlens = batch.cu_seqlens_q.new_empty(batch.max_batch + 1)
        if not 0 < batch.num_decode < batch.batch_size:
            return
        prefill = batch.cu_seqlens_q[batch.num_decode :]
        buffer = self._prefill_cu_seqlens[: len(prefill)]
        batch.metadata = torch.sub(prefill, batch.num_decode, out=buffer)

    def forward(
        self, layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor
    ) -> torch.Tensor:
        if batch.metadata is None:
            return attend(layer, q, batch, out)
        n = batch.num_decode
        attend(
            layer,
            q[:n],
            batch,
            out[:n],
            rows=slice(0, n),
            cu_seqlens_q=batch.cu_seqlens_q[: n + 1],
            max_seqlen_q=1,
        )
        attend(
            layer,
            q[n:],
            batch,
            out[n:],
            rows=slice(n, None),
            cu_seqlens_q=batch.metadata,
        )
        return out


def attend(
    layer: AttentionSpec,
    q: torch.Tensor,
    batch: ForwardBatch,
    out: torch.Tensor,
    *,
    rows: slice = slice(None),
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """The wheel's attention of `rows` of the batch, into `out`, which is returned. q and out: those
    rows' tokens. cu_seqlens_q and max_seqlen_q are the whole batch's by default; implementation as
    in `ops.flash_attn_with_kvcache`."""
    ops.flash_attn_with_kvcache(
        q,
        batch.kv_pool.k[layer.layer_id],
        batch.kv_pool.v[layer.layer_id],
        batch.page_table[rows],
        batch.kv_lens[rows],
        batch.cu_seqlens_q if cu_seqlens_q is None else cu_seqlens_q,
        softmax_scale=layer.scale,
        window_size=(-1 if layer.window is None else layer.window - 1, -1),
        softcap=layer.softcap or 0.0,
        sinks=layer.sinks,
        max_seqlen_q=batch.max_query_len if max_seqlen_q is None else max_seqlen_q,
        out=out,
        implementation=implementation,
    )
    return out
