"""The attention layer: q/k norm, RoPE, KV store, then the backend."""

import math
from dataclasses import replace

import torch
from torch import nn

from .. import ops
from ..attention.base import AttentionSpec
from ..batch import ForwardBatch
from ..families.tensor_views import TensorSource
from ..memory.kv_pool import KVPool
from ..quantization.base import Input, meta_parameter
from ..quantization.params import Part
from ..specs import AllHeadsNorm, Gqa, HeadNorm, PositionScale
from .base import BuildContext, Fusible, Layer, check_shape
from .linear import QKVLinear, RowParallelLinear
from .norm import AllHeadsRMSNorm, HeadNormWeight


class Attention(Layer, Fusible):
    """Multi-head attention with grouped KV heads over the paged cache. `rotary`: float32
    [max_positions, rotary_dim], shared by layers of the same RoPE (rotary.py). `query_scales`: what
    queries are multiplied by at each position, float32 [max_positions], or None."""

    fusible = True

    def __init__(
        self,
        ctx: BuildContext,
        hidden_size: int,
        spec: Gqa,
        *,
        layer_id: int,
        rotary: torch.Tensor,
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(
            ctx.at("qkv_proj"),
            in_features=hidden_size,
            head_dim=spec.head_dim,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            bias=spec.qkv_bias,
        )
        self.o_proj = RowParallelLinear(
            ctx.at("o_proj"),
            in_features=spec.num_heads * spec.head_dim,
            out_features=hidden_size,
            bias=spec.o_bias,
        )
        self.q_norm = self._qk_norm(ctx, spec, "q_proj")
        self.k_norm = self._qk_norm(ctx, spec, "k_proj")
        self.eps = 0.0 if spec.qk_norm is None else spec.qk_norm.norm.eps
        self.norms_all_heads = isinstance(spec.qk_norm, AllHeadsNorm)
        self.rotary = rotary
        self.interleaved = spec.rope is not None and spec.rope.interleaved
        self.spec = AttentionSpec(
            layer_id=layer_id,
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=spec.window,
            softcap=spec.softcap,
        )
        self.query_scales: torch.Tensor | None = None
        if spec.position_scale is not None:
            self.query_scales = _query_scales(ctx, spec.position_scale)
        sinks = meta_parameter(self.spec.num_heads, dtype=torch.float32)
        self.sinks = sinks if spec.sinks else None
        self.k_scale = self._kv_scale(ctx, "k_scale")
        self.v_scale = self._kv_scale(ctx, "v_scale")
        self._first_head = ctx.communicator.rank * self.spec.num_heads
        self._total_heads = spec.num_heads
        self._backend = ctx.backend

    def _qk_norm(
        self, ctx: BuildContext, spec: Gqa, part: str
    ) -> HeadNormWeight | AllHeadsRMSNorm | None:
        if isinstance(spec.qk_norm, HeadNorm):
            unit_offset = spec.qk_norm.norm.unit_offset
            return HeadNormWeight(ctx, spec.head_dim, unit_offset=unit_offset)
        if isinstance(spec.qk_norm, AllHeadsNorm):
            block = self.qkv_proj.block(part)
            return AllHeadsRMSNorm(ctx, block, eps=spec.qk_norm.norm.eps)
        return None

    def _kv_scale(self, ctx: BuildContext, name: str) -> nn.Parameter | None:
        """What an FP8 cache divides keys or values by, where the checkpoint was calibrated."""
        if f"{ctx.name}.{name}" not in ctx.tensor_names:
            return None
        return meta_parameter(1, dtype=torch.float32)

    def calibrate(self, pool: KVPool) -> None:
        """Gives the layer's cache in `pool` the scales of the checkpoint, where it has them."""
        for name, scale in (("k", self.k_scale), ("v", self.v_scale)):
            if scale is not None:
                pool.calibrate(name, self.spec.layer_id, scale.data)

    def check_source(self, name: str, source: TensorSource, part: Part) -> None:
        if name == "sinks":
            check_shape(source, (self._total_heads,))
        elif tuple(source.get_shape()) not in ((), (1,)):
            raise ValueError(f"has shape {source.get_shape()}, expected one scale")

    def weight_loader(
        self, name: str, param: torch.Tensor, source: TensorSource, part: Part
    ) -> None:
        """Of the sinks and the scales."""
        self.check_source(name, source, part)
        if name == "sinks":
            param.copy_(source[self._first_head : self._first_head + len(param)])
            return
        scale = source[:] if source.get_shape() else source[...]
        if not 0 < float(scale) < math.inf:
            raise ValueError(f"is {float(scale)}, expected a positive number")
        param.copy_(scale)

    def finalize(self, name: str) -> None:
        if name == "sinks":
            assert self.sinks is not None
            self.spec = replace(self.spec, sinks=self.sinks.data)

    def forward(
        self,
        hidden: Input,
        residual: torch.Tensor | None,
        batch: ForwardBatch,
        *,
        reduce: bool = True,
    ) -> torch.Tensor:
        """residual + attention of hidden, both [T, hidden_size]; stores the tokens' keys and
        values. residual's memory may become the result. `reduce`: False leaves the sum over the
        ranks to the caller."""
        out_product = self.o_proj if reduce else self.o_proj.part
        return out_product(self._attend(hidden, batch), residual)

    def _attend(self, hidden: Input, batch: ForwardBatch) -> torch.Tensor:
        """What this rank's heads attend to, [T, heads * head_dim], of hidden's dtype."""
        spec = self.spec
        pool = batch.kv_pool
        q, k, v = self.qkv_proj(hidden).split(self.qkv_proj.sizes, dim=-1)
        q_weight = None
        k_weight = None
        if self.q_norm is not None and self.k_norm is not None:
            if self.norms_all_heads:
                q = self.q_norm(q)
                k = self.k_norm(k)
            else:
                q_weight = self.q_norm.weight
                k_weight = self.k_norm.weight
        # The same tensors unless the cache has another type than the model.
        dtype = pool.layout.query_dtype
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)).to(dtype) for part in (q, k, v))
        ops.fused_qk_norm_rope_store(
            q,
            k,
            v,
            q_weight,
            k_weight,
            self.rotary,
            batch.positions,
            pool.k[spec.layer_id],
            pool.v[spec.layer_id],
            batch.slot_mapping,
            eps=self.eps,
            is_neox=not self.interleaved,
            k_scale=pool.k_scale.get(spec.layer_id),
            v_scale=pool.v_scale.get(spec.layer_id),
        )
        if self.query_scales is not None:
            q.mul_(self.query_scales[batch.positions, None, None])
        out = self._backend.forward(spec, q, batch, torch.empty_like(q))
        return out.flatten(1).to(hidden.dtype)


def _query_scales(ctx: BuildContext, scale: PositionScale) -> torch.Tensor:
    """The factor of queries at each position, float32 [max_positions], rounded to the type that the
    model computes in."""
    positions = torch.arange(ctx.max_positions, dtype=torch.float64, device=ctx.device)
    periods = (positions / scale.period).floor()
    return (1 + scale.beta * periods.log1p()).to(ctx.dtype).float()
