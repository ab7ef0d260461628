"""The attention layer: q/k norm, RoPE, KV store, then the backend."""

import torch
from torch import nn

from .. import ops
from ..attention.base import AttentionSpec
from ..batch import ForwardBatch
from ..errors import ConfigError
from ..model_config import ModelConfig, RopeConfig
from .base import BuildContext
from .linear import QKVLinear, RowParallelLinear
from .norm import RMSNorm


def rotary_table(ctx: BuildContext, rope: RopeConfig) -> torch.Tensor:
    """float32 [max_positions, rotary_dim], shared by all layers of a model."""
    try:
        table = ops.rope_cos_sin_cache(
            rope.rotary_dim, ctx.max_positions, rope.theta, scaling=rope.scaling
        )
    except ValueError as error:
        raise ConfigError(f"config.json: {error}") from None
    return table.to(ctx.device)


class Attention(nn.Module):
    def __init__(
        self, ctx: BuildContext, config: ModelConfig, layer_id: int, rotary: torch.Tensor
    ) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = self.qkv_proj = QKVLinear(
            ctx, config.hidden_size, dim, heads, kv_heads, bias=config.qkv_bias
        )
        self.o_proj = RowParallelLinear(ctx, heads * dim, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(ctx, dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(ctx, dim, config.rms_norm_eps) if config.qk_norm else None
        self._rotary, self._backend, self._eps = rotary, ctx.backend, config.rms_norm_eps
        window = config.layer_windows[layer_id]
        self._spec = AttentionSpec(
            layer_id, qkv.num_heads, qkv.num_kv_heads, dim, dim**-0.5, window
        )

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """residual + attention of hidden, both [T, hidden_size]; stores the tokens' keys and
        values."""
        spec, pool = self._spec, batch.kv_pool
        parts = self.qkv_proj(hidden).split(self.qkv_proj.sizes, dim=-1)
        # Themselves unless the cache has another type.
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)).to(pool.dtype) for part in parts)
        q_weight, k_weight = (
            norm and norm.weight.to(pool.dtype) for norm in (self.q_norm, self.k_norm)
        )
        caches = pool.k[spec.layer_id], pool.v[spec.layer_id]
        places = self._rotary, batch.positions, *caches, batch.slot_mapping
        ops.fused_qk_norm_rope_store(q, k, v, q_weight, k_weight, *places, eps=self._eps)
        out = self._backend.forward(spec, q, batch, torch.empty_like(q))
        return self.o_proj(out.flatten(1).to(hidden.dtype), residual)
