"""CpuDecoder: the layers of a dense decoder as one call of the kernel wheel."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .. import ops
from ..batch import ForwardBatch
from ..memory.kv_pool import KVPool
from .attention import Attention
from .base import BuildContext, Fusible
from .mlp import GatedMLP
from .norm import RMSNorm


class CpuDecoder:
    """Runs the layers and the last norm of a decoder in one call, on one CPU rank, where this gives
    the bits of the modules' own `forward`: Python between small kernels takes a fifth of a step.

    `layers`: those that it can run have the modules of models/decoder.py's. They are read when a KV
    pool is first used, which is after loading."""

    def __init__(self, ctx: BuildContext, layers: Iterable[nn.Module], norm: nn.Module) -> None:
        self._layers = layers
        self._norm = norm
        self._is_possible = (
            ctx.device.type == "cpu"
            and ctx.communicator.world_size == 1
            and ctx.backend.supports_fused_decoder
        )
        self._pool: KVPool | None = None
        self._decoder: ops.DenseDecoder | None = None

    def applies_to(self, pool: KVPool) -> bool:
        """Whether a step over `pool` may be a call of this object instead of the modules."""
        if self._is_possible and pool is not self._pool:
            self._pool = pool
            self._decoder = None
            try:
                self._decoder = _fuse(list(self._layers), self._norm, pool)
            except NotImplementedError:
                pass
        return self._decoder is not None

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """hidden [T, hidden_size], the embeddings, becomes the normed output and is returned;
        stores the tokens' keys and values. Only where `applies_to(batch.kv_pool)`."""
        assert self._decoder is not None
        return self._decoder(
            hidden,
            batch.positions,
            batch.slot_mapping,
            batch.page_table,
            batch.kv_lens,
            batch.cu_seqlens_q,
            max_seqlen_q=batch.max_query_len,
        )


def _fuse(layers: list[Any], norm: Any, pool: KVPool) -> ops.DenseDecoder:
    """Raises NotImplementedError where the wheel's decoder would not give what the modules give:
    other modules, settings that it has once for all layers, weights or a cache that it does not
    take, no CPU library."""
    _require_fusible(norm, RMSNorm)
    described = [_describe(layer, norm.eps, pool) for layer in layers]
    activation = layers[0].mlp.activation
    if any(layer.mlp.activation != activation for layer in layers):
        raise NotImplementedError("the layers have several activations")
    return ops.DenseDecoder(described, norm=norm.weight, eps=norm.eps, activation=activation)


def _describe(layer: Any, eps: float, pool: KVPool) -> ops.DecoderLayer:
    _require_fusible(layer, Fusible)
    attention = layer.self_attn
    mlp = layer.mlp
    _require_fusible(attention, Attention)
    _require_fusible(mlp, GatedMLP)
    spec = attention.spec
    if attention.norms_all_heads or attention.scales_queries:
        raise NotImplementedError("the attention has steps that the decoder has not")
    if attention.q_norm is not None and attention.eps != eps:
        raise NotImplementedError("norms of several eps")
    return ops.DecoderLayer(
        attention_norm=_norm(layer.input_layernorm, eps),
        attention_out_norm=_norm(layer.post_self_attn_layernorm, eps),
        mlp_norm=_norm(layer.post_attention_layernorm, eps),
        mlp_out_norm=_norm(layer.post_mlp_layernorm, eps),
        q_norm=None if attention.q_norm is None else attention.q_norm.weight,
        k_norm=None if attention.k_norm is None else attention.k_norm.weight,
        qkv=_product(attention.qkv_proj),
        o=_product(attention.o_proj),
        gate_up=_product(mlp.gate_up_proj),
        down=_product(mlp.down_proj),
        k_cache=pool.k[spec.layer_id],
        v_cache=pool.v[spec.layer_id],
        k_scale=pool.k_scale.get(spec.layer_id),
        v_scale=pool.v_scale.get(spec.layer_id),
        cos_sin_cache=attention.rotary,
        is_neox=not attention.interleaved,
        softmax_scale=spec.scale,
        softcap=spec.softcap or 0.0,
        sinks=spec.sinks,
        window_left=-1 if spec.window is None else spec.window - 1,
    )


def _norm(norm: Any, eps: float) -> torch.Tensor | None:
    """The weight of a norm that may be left out."""
    if norm is None:
        return None
    _require_fusible(norm, RMSNorm)
    if norm.eps != eps:
        raise NotImplementedError("norms of several eps")
    weight: torch.Tensor = norm.weight
    return weight


def _product(linear: Any) -> tuple[ops.PackedWeight, torch.Tensor | None]:
    """Weight and bias of a linear layer."""
    _require_fusible(linear, Fusible)
    weight = linear.method.packed_weight(linear)
    if weight is None:
        raise NotImplementedError("the method of a linear layer is more than a packed weight")
    return weight, linear.bias


def _require_fusible(module: nn.Module, kind: type[Fusible]) -> None:
    if not isinstance(module, kind) or not module.fusible:
        raise NotImplementedError(f"{type(module).__name__} has a forward of its own")
