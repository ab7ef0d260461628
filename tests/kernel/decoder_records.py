"""Dense layers as records of `Decoder`, for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import radix_kernels as rk
from radix_kernels import decoder as records

Product = tuple[rk.PackedWeight, Any]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The weights of a layer, its cache, and how it attends. Norms are of the inputs of the two
    blocks, and of what they add to the residual; products have a weight and a bias or None."""

    attention_norm: Any
    mlp_norm: Any
    attention_out_norm: Any = None
    mlp_out_norm: Any = None
    q_norm: Any = None
    k_norm: Any = None
    qkv: Product
    o: Product
    gate_up: Product
    down: Product
    k_cache: Any
    v_cache: Any
    k_scale: Any = None
    v_scale: Any = None
    cos_sin_cache: Any
    is_neox: bool = True
    softmax_scale: float
    softcap: float = 0.0
    sinks: Any = None
    window_left: int = -1


def dense_decoder(
    layers: Sequence[Layer], norm: Any, *, eps: float, activation: str = "silu"
) -> rk.Decoder:
    """The layers, then the last norm."""
    hidden = norm.shape[0]
    dtype = str(norm.dtype).removeprefix("torch.")
    dim = layers[0].k_cache.shape[3] if layers else 1
    products = (layers[0].qkv, layers[0].o, layers[0].down) if layers else ()
    qkv, queries, inner = [each[0].shape for each in products] or [(1, 1)] * 3
    sizes = (hidden, hidden, qkv[0], queries[1], 2 * inner[1], inner[1], hidden)
    residual, normed, heads, attended, both, gated, out = (
        records.Columns(number, 0, size) for number, size in enumerate(sizes)
    )
    ops: list[Any] = []

    def normed_input(weight: Any) -> records.Columns:
        if weight is None:
            return residual
        ops.append(records.NormOp(x=residual, out=normed, weight=weight, eps=eps))
        return normed

    def product(x: records.Columns, weight: Product, to: records.Columns, **options: Any) -> None:
        ops.append(records.LinearOp(x=x, out=to, weight=weight[0], bias=weight[1], **options))

    def add(x: records.Columns, weight: Product, out_norm: Any) -> None:
        if out_norm is None:
            return product(x, weight, residual, residual=residual)
        product(x, weight, out)
        ops.append(records.NormOp(x=out, out=out, weight=out_norm, eps=eps))
        ops.append(records.AddOp(residual.buffer, out.buffer))

    for layer in layers:
        product(normed_input(layer.attention_norm), layer.qkv, heads)
        ops += _attention(layer, heads, attended, eps=eps, dim=dim)
        add(attended, layer.o, layer.attention_out_norm)
        x = normed_input(layer.mlp_norm)
        if activation == "silu" and layer.gate_up[1] is None:
            product(x, layer.gate_up, gated, gate="silu")
        else:
            product(x, layer.gate_up, both)
            ops.append(records.GatedActivationOp(x=both, out=gated, activation=activation))
        add(gated, layer.down, layer.mlp_out_norm)
    if layers:
        ops.append(records.NormOp(x=residual, out=residual, weight=norm, eps=eps))
    return rk.Decoder([(size, dtype) for size in sizes], ops)


def _attention(
    layer: Layer, heads: records.Columns, out: records.Columns, *, eps: float, dim: int
) -> list[Any]:
    cache = records.LayerCache(
        k=layer.k_cache, v=layer.v_cache, k_scale=layer.k_scale, v_scale=layer.v_scale
    )
    keys = layer.k_cache.shape[2] * dim
    q = records.Columns(heads.buffer, 0, out.count)
    store = records.RopeStoreOp(
        q=q,
        k=records.Columns(heads.buffer, out.count, keys),
        v=records.Columns(heads.buffer, out.count + keys, keys),
        cache=cache,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        eps=eps,
        cos_sin_cache=layer.cos_sin_cache,
        is_neox=layer.is_neox,
    )
    attend = records.AttentionOp(
        q=q,
        out=out,
        cache=cache,
        softmax_scale=layer.softmax_scale,
        softcap=layer.softcap,
        sinks=layer.sinks,
        window_left=layer.window_left,
    )
    return [store, attend]
