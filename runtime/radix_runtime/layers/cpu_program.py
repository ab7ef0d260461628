"""Lowering: the layers of a decoder as records of the wheel's ops (`ops.Decoder`), in the order and
with the bits of the modules' own `forward`, but for prompts on AMX: their products keep x where the
modules' quantize it."""

from typing import Any

import torch
from torch import nn

from .. import ops
from ..memory.kv_pool import KVPool
from .attention import Attention
from .base import Fusible
from .mla import LatentAttention
from .mlp import GatedMLP
from .moe import Experts, SparseMoe
from .norm import AllHeadsRMSNorm, RMSNorm
from .router import GroupedGate, GroupedSoftmaxGate, SigmoidGate, SoftmaxGate

_GATE_UNIT = 16  # gate and up in multiples of it are one product
_GATES = (SoftmaxGate, GroupedSoftmaxGate, SigmoidGate, GroupedGate)


def lower(layers: list[Any], norm: Any, pool: KVPool, dtype: torch.dtype) -> ops.Decoder:
    """The layers and the last norm of a model that computes in `dtype`. Raises NotImplementedError
    where the wheel's ops would not give what the modules give: other modules, weights or a cache
    that they do not take, no CPU library."""
    _require_fusible(norm, RMSNorm)
    program = _Program(norm.weight.shape[0], dtype)
    for layer in layers:
        _require_fusible(layer, Fusible)
        program.attend(layer, pool)
        program.feed_forward(layer)
    program.norm(program.residual, norm, program.residual)
    return program.decoder()


class _Program:
    """The records so far, and the buffers that they name. `residual`: the stream that blocks add
    to, which the call's `hidden` is."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        self._dtype = str(dtype).removeprefix("torch.")
        self._size = hidden_size
        self._ops: list[ops.DecoderOp] = []
        self._buffers: dict[tuple[str, int, str], ops.Columns] = {}
        self.residual = self._buffer("residual", hidden_size)

    def decoder(self) -> ops.Decoder:
        """What runs the records."""
        buffers = [(columns, dtype) for _, columns, dtype in self._buffers]
        return ops.Decoder(buffers, self._ops)

    def attend(self, layer: Any, pool: KVPool) -> None:
        """residual += attention of the normed residual."""
        if isinstance(layer.self_attn, LatentAttention):
            self._attend_latents(layer, pool)
        else:
            self._attend_heads(layer, pool)

    def _attend_heads(self, layer: Any, pool: KVPool) -> None:
        attention = layer.self_attn
        _require_fusible(attention, Attention)
        spec = attention.spec
        cache = _cache(pool, spec.layer_id, self._dtype)
        x = self._normed(layer.input_layernorm)
        qkv = self._buffer("qkv", sum(attention.qkv_proj.sizes))
        self._linear(x, attention.qkv_proj, qkv)
        q, k, v = _split(qkv, attention.qkv_proj.sizes)
        q_norm = attention.q_norm
        k_norm = attention.k_norm
        if attention.norms_all_heads:
            q = self._over_all_heads(q, q_norm, "q")
            k = self._over_all_heads(k, k_norm, "k")
            q_norm = None
            k_norm = None
        self._ops.append(
            ops.RopeStoreOp(
                q=q,
                k=k,
                v=v,
                cache=cache,
                q_norm=None if q_norm is None else q_norm.weight,
                k_norm=None if k_norm is None else k_norm.weight,
                eps=attention.eps,
                cos_sin_cache=attention.rotary,
                is_neox=not attention.interleaved,
            )
        )
        if attention.query_scales is not None:
            self._ops.append(ops.ScaleOp(x=q, factors=attention.query_scales))
        attended = self._buffer("attended", q.count)
        self._ops.append(
            ops.AttentionOp(
                q=q,
                out=attended,
                cache=cache,
                softmax_scale=spec.scale,
                softcap=spec.softcap or 0.0,
                sinks=spec.sinks,
                window_left=-1 if spec.window is None else spec.window - 1,
            )
        )
        self._add_product(attended, attention.o_proj, layer, layer.post_self_attn_layernorm)

    def _attend_latents(self, layer: Any, pool: KVPool) -> None:
        """Absorbed for decode entries, un-absorbed for chunks."""
        attention = layer.self_attn
        _require_fusible(attention, LatentAttention)
        spec = attention.spec
        heads = attention.latent_spec.num_heads
        cache = pool.latent[attention.latent_spec.layer_id]
        if str(cache.dtype) != f"torch.{self._dtype}":
            raise NotImplementedError("the cache is of another type")
        x = self._normed(layer.input_layernorm)
        q = self._latent_queries(x, attention)
        both = self._buffer("latent and rotary", spec.latent_dim + spec.rope_dim)
        self._linear(x, attention.kv_a_proj_with_mqa, both)
        latent, rotary = _split(both, [spec.latent_dim, spec.rope_dim])
        latent = self._normed_part(latent, attention.kv_a_layernorm, "latent")
        store = ops.LatentStoreOp(
            q=q,
            latent=latent,
            rope=rotary,
            heads=heads,
            cache=cache,
            cos_sin_cache=attention.rotary,
            is_neox=not spec.rope.interleaved,
        )
        self._ops.append(store)
        attended = self._buffer("attended", heads * spec.value_dim)
        scale = attention.latent_spec.scale
        decode = ops.LatentAttentionOp(
            q=q,
            out=attended,
            cache=cache,
            softmax_scale=scale,
            absorb=attention.absorb.packed,
            values=attention.values.packed,
        )
        prefill = ops.LatentPrefillOp(
            q=q,
            out=attended,
            heads=heads,
            cache=cache,
            softmax_scale=scale,
            expand=_packed(attention.kv_b_proj),
        )
        self._ops += [decode, prefill]
        self._add_product(attended, attention.o_proj, layer, layer.post_self_attn_layernorm)

    def _latent_queries(self, x: ops.Columns, attention: Any) -> ops.Columns:
        last = attention.q_proj if attention.spec.query_latent_dim is None else attention.q_b_proj
        q = self._buffer("q", sum(last.sizes))
        if attention.spec.query_latent_dim is not None:
            wide = self._buffer("q_a", attention.spec.query_latent_dim)
            self._linear(x, attention.q_a_proj, wide)
            x = self._normed_part(wide, attention.q_a_layernorm, "q_a normed")
        self._linear(x, last, q)
        return q

    def feed_forward(self, layer: Any) -> None:
        """residual += feed-forward of the normed residual."""
        block = layer.mlp
        x = self._normed(layer.post_attention_layernorm)
        if isinstance(block, SparseMoe):
            self._add(self._mixture(x, block), layer, layer.post_mlp_layernorm)
            return
        gated = self._gated(x, block)
        self._add_product(gated, block.down_proj, layer, layer.post_mlp_layernorm)

    def norm(self, x: ops.Columns, module: Any, out: ops.Columns) -> None:
        """out = the norm of x."""
        self._ops.append(ops.NormOp(x=x, out=out, weight=module.weight, eps=module.eps))

    def _buffer(self, name: str, columns: int, dtype: str | None = None) -> ops.Columns:
        """All columns of a buffer; one of each name, size and type."""
        key = (name, columns, dtype or self._dtype)
        if key not in self._buffers:
            number = len(self._buffers)
            self._buffers[key] = ops.Columns(buffer=number, first=0, count=columns)
        return self._buffers[key]

    def _normed(self, norm: Any) -> ops.Columns:
        """The input of a block: the residual, normed where there is a norm."""
        if norm is None:
            return self.residual
        _require_fusible(norm, RMSNorm)
        normed = self._buffer("normed", self._size)
        self.norm(self.residual, norm, normed)
        return normed

    def _normed_part(self, x: ops.Columns, norm: Any, name: str) -> ops.Columns:
        _require_fusible(norm, RMSNorm)
        out = self._buffer(name, x.count)
        self.norm(x, norm, out)
        return out

    def _over_all_heads(self, x: ops.Columns, norm: Any, name: str) -> ops.Columns:
        if type(norm) is not AllHeadsRMSNorm:
            raise NotImplementedError("the norm of all heads is another module")
        out = self._buffer(name, x.count)
        self.norm(x, norm, out)
        return out

    def _linear(self, x: ops.Columns, linear: Any, out: ops.Columns, **options: Any) -> None:
        weight = _packed(linear)
        record = ops.LinearOp(x=x, out=out, weight=weight, bias=linear.bias, **options)
        self._ops.append(record)

    def _gated(self, x: ops.Columns, mlp: Any) -> ops.Columns:
        """act(gate(x)) * up(x)."""
        _require_fusible(mlp, GatedMLP)
        projection = mlp.gate_up_proj
        width = sum(projection.sizes) // 2
        gated = self._buffer("gated", width)
        if mlp.activation == "silu" and projection.bias is None and width % _GATE_UNIT == 0:
            self._linear(x, projection, gated, gate="silu")
            return gated
        both = self._buffer("gate_up", 2 * width)
        self._linear(x, projection, both)
        self._ops.append(ops.GatedActivationOp(x=both, out=gated, activation=mlp.activation))
        return gated

    def _mixture(self, x: ops.Columns, moe: Any) -> ops.Columns:
        """The experts' sum, and the shared expert's."""
        _require_fusible(moe, SparseMoe)
        weights, ids = self._route(x, moe.gate)
        out = self._buffer("out", self._size)
        packed = _experts(moe.experts)
        terms = moe.experts.terms()
        record = ops.ExpertsOp(
            x=x,
            weights=weights,
            ids=ids,
            out=out,
            experts=packed,
            bias1=terms.bias1,
            bias2=terms.bias2,
            activation=terms.activation,
        )
        self._ops.append(record)
        if moe.shared_expert is not None:
            shared = self._buffer("shared", self._size)
            gated = self._gated(x, moe.shared_expert)
            self._linear(gated, moe.shared_expert.down_proj, shared)
            scale = self._shared_weight(x, moe.shared_expert_gate)
            self._ops.append(ops.AddOp(to=out.buffer, x=shared.buffer, scale=scale))
        return out

    def _shared_weight(self, x: ops.Columns, gate: Any) -> ops.Columns | None:
        """What the shared expert counts: the sigmoid of its gate; None without one."""
        if gate is None:
            return None
        logits = self._buffer("shared logits", 1)
        weights = self._buffer("shared weights", 1, "float32")
        ids = self._buffer("shared ids", 1, "int32")
        self._linear(x, gate, logits)
        record = ops.RouteOp(
            logits=logits, weights=weights, ids=ids, router="sigmoid", renormalize=False
        )
        self._ops.append(record)
        return weights

    def _route(self, x: ops.Columns, gate: Any) -> tuple[ops.Columns, ops.Columns]:
        settings = _router(gate)
        is_wide = not isinstance(gate, SoftmaxGate)
        experts = sum(gate.sizes)
        logits = self._buffer("logits", experts, "float32" if is_wide else None)
        weights = self._buffer("weights", gate.top_k, "float32")
        ids = self._buffer("ids", gate.top_k, "int32")
        self._linear(x, gate, logits)
        self._ops.append(ops.RouteOp(logits=logits, weights=weights, ids=ids, **settings))
        return weights, ids

    def _add_product(self, x: ops.Columns, linear: Any, layer: Any, out_norm: Any) -> None:
        """residual += the product of x, normed where there is a norm, times the layer's
        multiplier."""
        if out_norm is None and layer.residual_multiplier == 1:
            self._linear(x, linear, self.residual, residual=self.residual)
            return
        out = self._buffer("out", self._size)
        self._linear(x, linear, out)
        self._add(out, layer, out_norm)

    def _add(self, out: ops.Columns, layer: Any, out_norm: Any) -> None:
        """residual += out, normed where there is a norm, times the layer's multiplier."""
        if out_norm is not None:
            _require_fusible(out_norm, RMSNorm)
            self.norm(out, out_norm, out)
        factor = layer.residual_multiplier
        self._ops.append(ops.AddOp(to=self.residual.buffer, x=out.buffer, factor=factor))


def _router(gate: Any) -> dict[str, Any]:
    """The settings of the op that chooses experts."""
    router = gate.router
    if type(gate) is SoftmaxGate:
        return {"router": "softmax", "renormalize": router.renormalize}
    if type(gate) is GroupedSoftmaxGate:
        return {
            "router": "softmax",
            "renormalize": False,
            "groups": router.num_groups,
            "top_groups": router.top_groups,
            "scaling": router.scaling,
        }
    if type(gate) is SigmoidGate:
        return {"router": "sigmoid", "bias": gate.e_score_correction_bias}
    if type(gate) is GroupedGate:
        return {
            "router": "grouped",
            "bias": gate.e_score_correction_bias,
            "groups": router.num_groups,
            "top_groups": router.top_groups,
            "scaling": router.scaling,
        }
    raise NotImplementedError(f"{type(gate).__name__} is no op of the wheel")


def _experts(experts: Any) -> ops.PackedExperts:
    packed = experts.packed() if type(experts) is Experts and experts.is_whole else None
    if packed is None:
        raise NotImplementedError("the experts are not packed together")
    return packed


def _cache(pool: KVPool, layer_id: int, dtype: str) -> ops.LayerCache:
    k = pool.k[layer_id]
    if str(k.dtype) not in (f"torch.{dtype}", "torch.int8"):
        raise NotImplementedError("the cache is of another type")
    return ops.LayerCache(
        k=k,
        v=pool.v[layer_id],
        k_scale=pool.k_scale.get(layer_id),
        v_scale=pool.v_scale.get(layer_id),
    )


def _split(columns: ops.Columns, sizes: list[int]) -> list[ops.Columns]:
    """Neighbouring columns of these sizes."""
    found = []
    first = columns.first
    for size in sizes:
        found.append(ops.Columns(buffer=columns.buffer, first=first, count=size))
        first += size
    return found


def _packed(linear: Any) -> ops.PackedWeight:
    """The weight of a linear layer."""
    if not isinstance(linear, _GATES):  # _router knows these
        _require_fusible(linear, Fusible)
    weight: ops.PackedWeight | None = linear.method.packed_weight(linear)
    if weight is None:
        raise NotImplementedError("the method of a linear layer is more than a packed weight")
    return weight


def _require_fusible(module: nn.Module, kind: type[Fusible]) -> None:
    if not isinstance(module, kind) or not module.fusible:
        raise NotImplementedError(f"{type(module).__name__} has a forward of its own")
