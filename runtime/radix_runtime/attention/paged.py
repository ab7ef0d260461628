"""The default backend: the kernel wheel's attention over the paged KV cache."""

import torch

from .. import ops
from ..batch import ForwardBatch
from ..device import Device
from ..memory.kv_layout import FP8_TYPES
from ..model_config import ModelConfig
from . import latent
from .base import AttentionBackend, AttentionSpec, Expand, LatentSpec


class PagedAttention(AttentionBackend):
    """One call of the wheel serves any batch. On a GPU, where decode and prefill are different
    kernels, a mixed batch is two calls: its decode rows then cost, and are bit for bit, what they
    are in a batch of their own."""

    supports_fused_decoder = True
    supports_latents = True

    @classmethod
    def supports(
        cls, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int
    ) -> bool:
        dtype = str(kv_dtype).removeprefix("torch.")
        if device.is_cpu:  # a source tree without the library runs the wheel's reference
            return kv_dtype not in FP8_TYPES
        if config.spec.keeps_latents:  # Triton's kernels serve them too
            is_known = kv_dtype in (torch.bfloat16, torch.float16, *FP8_TYPES)
            has_kernel = ops.has_native("mla_decode", "bfloat16", device.kind)
            return is_known and (has_kernel or ops.has_triton())
        return ops.has_native("flash_attn_with_kvcache", dtype, device.kind)

    def forward(
        self, layer: AttentionSpec, q: torch.Tensor, batch: ForwardBatch, out: torch.Tensor
    ) -> torch.Tensor:
        if self.device.is_cpu:
            return attend(layer, q, batch, out)
        return attend_by_kind(layer, q, batch, out)

    def decode_latents(
        self,
        layer: LatentSpec,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> torch.Tensor:
        return latent.decode(layer, q_latent, q_rope, batch, out)

    def prefill_latents(
        self,
        layer: LatentSpec,
        q: torch.Tensor,
        expand: Expand,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> torch.Tensor:
        return latent.prefill(layer, q, expand, batch, out)


def attend_by_kind(
    layer: AttentionSpec,
    q: torch.Tensor,
    batch: ForwardBatch,
    out: torch.Tensor,
    *,
    implementation: str = "auto",
) -> torch.Tensor:
    """As `attend`, but a mixed batch is two calls: one for its decode entries, whose kernel splits
    long contexts, and one for its chunks."""
    padded = batch.shape is not None
    if not batch.has_chunks or (not padded and batch.num_decode == 0):
        return attend(layer, q, batch, out, implementation=implementation)
    # To each of the two calls the entries of the other kind have no tokens.
    attend(
        layer,
        q,
        batch,
        out,
        cu_seqlens_q=batch.decode_cu_seqlens,
        max_seqlen_q=1,
        implementation=implementation,
    )
    chunks = batch.chunk_cu_seqlens
    return attend(layer, q, batch, out, cu_seqlens_q=chunks, implementation=implementation)


def attend(
    layer: AttentionSpec,
    q: torch.Tensor,
    batch: ForwardBatch,
    out: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """The wheel's attention of the batch, into `out`, which is returned. cu_seqlens_q and
    max_seqlen_q are the batch's by default; implementation as in `ops.flash_attn_with_kvcache`."""
    pool = batch.kv_pool
    ops.flash_attn_with_kvcache(
        q,
        pool.k[layer.layer_id],
        pool.v[layer.layer_id],
        batch.page_table,
        batch.kv_lens,
        batch.cu_seqlens_q if cu_seqlens_q is None else cu_seqlens_q,
        softmax_scale=layer.scale,
        window_size=(-1 if layer.window is None else layer.window - 1, -1),
        softcap=layer.softcap or 0.0,
        sinks=layer.sinks,
        k_scale=pool.k_scale.get(layer.layer_id),
        v_scale=pool.v_scale.get(layer.layer_id),
        max_seqlen_q=batch.max_query_len if max_seqlen_q is None else max_seqlen_q,
        out=out,
        implementation=implementation,
    )
    return out
