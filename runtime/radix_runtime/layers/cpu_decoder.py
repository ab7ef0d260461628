"""CpuDecoder: the layers of a decoder as one call of the kernel wheel."""

from collections.abc import Iterable

import torch
from torch import nn

from .. import ops
from ..batch import ForwardBatch
from ..memory.kv_pool import KVPool
from .base import BuildContext
from .cpu_program import lower


class CpuDecoder:
    """Runs the layers and the last norm of a decoder in one call, on one CPU rank, where this gives
    the bits of the modules' own `forward`, but for prompts on AMX (cpu_program.py): Python between
    small kernels takes a fifth of a step.

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
        self._pool: KVPool | None = None
        self._decoder: ops.Decoder | None = None

    def applies_to(self, pool: KVPool) -> bool:
        """Whether steps over `pool` may be calls of this object instead of the modules."""
        if self._is_possible and pool is not self._pool:
            self._pool = pool
            self._decoder = None
            try:
                self._decoder = lower(list(self._layers), self._norm, pool, self._dtype)
            except NotImplementedError:
                pass
        return self._decoder is not None

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """hidden [T, hidden_size], the embeddings, becomes the normed output and is returned;
        stores the tokens' keys and values. Only where it `applies_to` the batch's pool."""
        assert self._decoder is not None
        return self._decoder(
            hidden,
            batch.positions,
            batch.slot_mapping,
            batch.page_table,
            batch.kv_lens,
            batch.cu_seqlens_q,
            max_seqlen_q=batch.max_query_len,
            num_expanded=batch.batch_size - batch.num_decode,
        )
