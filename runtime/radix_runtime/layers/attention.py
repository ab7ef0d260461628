"""The attention layer: q/k norm, RoPE, KV store, then the backend."""

import torch

from .. import ops
from ..attention.base import AttentionSpec
from ..batch import ForwardBatch
from ..model_config import ModelConfig
from .base import BuildContext, Fusible
from .linear import QKVLinear, RowParallelLinear
from .norm import HeadNormWeight


class Attention(Fusible):
    """Multi-head attention with grouped KV heads over the paged cache. `rotary`: float32
    [max_positions, rotary_dim], shared by all layers (rotary.py)."""

    fusible = True

    def __init__(
        self, ctx: BuildContext, config: ModelConfig, *, layer_id: int, rotary: torch.Tensor
    ) -> None:
        super().__init__()
        head_dim = config.head_dim
        self.qkv_proj = QKVLinear(
            ctx,
            in_features=config.hidden_size,
            head_dim=head_dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            bias=config.qkv_bias,
        )
        self.o_proj = RowParallelLinear(
            ctx,
            in_features=config.num_heads * head_dim,
            out_features=config.hidden_size,
            bias=config.o_bias,
        )
        self.q_norm = HeadNormWeight(ctx, head_dim) if config.qk_norm else None
        self.k_norm = HeadNormWeight(ctx, head_dim) if config.qk_norm else None
        self.eps = config.rms_norm_eps
        self.rotary = rotary
        self.spec = AttentionSpec(
            layer_id=layer_id,
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            window=config.layer_windows[layer_id],
        )
        self._backend = ctx.backend

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """residual + attention of hidden, both [T, hidden_size]; stores the tokens' keys and
        values. residual's memory may become the result."""
        spec = self.spec
        pool = batch.kv_pool
        parts = self.qkv_proj(hidden).split(self.qkv_proj.sizes, dim=-1)
        # Of the cache's dtype: the same tensors unless it has another than the model.
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)).to(pool.dtype) for part in parts)
        ops.fused_qk_norm_rope_store(
            q,
            k,
            v,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.rotary,
            batch.positions,
            pool.k[spec.layer_id],
            pool.v[spec.layer_id],
            batch.slot_mapping,
            eps=self.eps,
        )
        out = self._backend.forward(spec, q, batch, torch.empty_like(q))
        return self.o_proj(out.flatten(1).to(hidden.dtype), residual)
