"""CpuDecoder: the layers of a decoder as one call of the kernel wheel."""

from collections.abc import Iterable

import torch
from torch import nn

from .. import ops
from ..batch import ForwardBatch
from ..memory.kv_pool import KVPool
from .base import BuildContext
from .cpu_program import lower
from .mla import LatentAttention


class CpuDecoder:
    """Runs the layers and the last norm of a decoder in one call, on one CPU rank, where this gives
    the bits of the modules' own `forward`: Python between small kernels takes a fifth of a step.

    `layers`: those that it can run have the modules of models/decoder.py's. They are read when a KV
    pool is first used, which is after loading."""

    def __init__(self, ctx: BuildContext, layers: Iterable[nn.Module], norm: nn.Module) -> None:
        self._layers = layers
        self._norm = norm
        self._dtype = ctx.dtype
        self._is_possible = (
            ctx.device.type == "cpu"
            and ctx.communicator.world_size == 1
            and ctx.backend.supports_fused_decoder
        )
        self._attends_latents = False
        self._pool: KVPool | None = None
        self._decoder: ops.Decoder | None = None

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether the step may be a call of this object instead of the modules. Of latent attention
        a call has decode entries alone: chunks expand their keys and values."""
        if not self.applies_to(batch.kv_pool):
            return False
        return not self._attends_latents or batch.num_decode_tokens == batch.num_tokens

    def applies_to(self, pool: KVPool) -> bool:
        """Whether steps over `pool`, or their decode steps, may be calls of this object."""
        if self._is_possible and pool is not self._pool:
            self._pool = pool
            self._decoder = None
            layers = list(self._layers)
            self._attends_latents = any(
                isinstance(getattr(layer, "self_attn", None), LatentAttention) for layer in layers
            )
            try:
                self._decoder = lower(layers, self._norm, pool, self._dtype)
            except NotImplementedError:
                pass
        return self._decoder is not None

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """hidden [T, hidden_size], the embeddings, becomes the normed output and is returned;
        stores the tokens' keys and values. Only where `takes(batch)`."""
        assert self._decoder is not None
        is_expanded = self._attends_latents and batch.limits.expands_decode
        return self._decoder(
            hidden,
            batch.positions,
            batch.slot_mapping,
            batch.page_table,
            batch.kv_lens,
            batch.cu_seqlens_q,
            max_seqlen_q=1 if is_expanded else batch.max_query_len,
        )
