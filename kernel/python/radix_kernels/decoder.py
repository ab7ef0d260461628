"""All layers of a decoder in one native call: Python between small kernels takes a fifth of a step
on a CPU.

A `Decoder` is a list of op records over numbered buffers. Each record names an op of this package
and the columns of buffers that it reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _arrays, _checks, _loader
from ._arrays import Array
from .gating import Activation, read_gating
from .packed_experts import PackedExperts
from .packed_heads import PackedHeads
from .packed_weight import PackedWeight

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_GATES = {None: 0, "silu": 1}
_ROUTERS = {"softmax": 0, "sigmoid": 1, "grouped": 2}
_NONE = (0, 0, 0)  # no columns


@dataclass(frozen=True)
class Columns:
    """Columns [first, first + count) of a buffer, of all tokens. Those that an op writes must not
    overlap those that it reads, unless the op that its record names takes the same ones for both or
    the record says that it works in place."""

    buffer: int
    first: int
    count: int

    @property
    def place(self) -> tuple[int, int, int]:
        """As the library takes it."""
        return self.buffer, self.first, self.count


@dataclass(frozen=True, kw_only=True)
class LayerCache:
    """Keys and values of a layer, [pages, page_size, heads, D]; scales of INT8 caches, float32
    [pages, page_size, heads]."""

    k: Array
    v: Array
    k_scale: Array | None = None
    v_scale: Array | None = None


@dataclass(frozen=True, kw_only=True)
class NormOp:
    """out = `rmsnorm(x, weight, eps)`."""

    x: Columns
    out: Columns
    weight: Array
    eps: float

    def add_to(self, native: Any) -> None:
        """Appends the record."""
        native.add_rmsnorm(self.x.place, self.out.place, self.weight, self.eps)


@dataclass(frozen=True, kw_only=True)
class LinearOp:
    """out = `linear(x, weight, bias, residual=residual)`; with gate "silu"
    `linear_silu_and_mul(x, weight)`. With keep_x for the last `num_expanded` entries of a call."""

    x: Columns
    out: Columns
    weight: PackedWeight
    bias: Array | None = None
    residual: Columns | None = None
    gate: str | None = None

    def add_to(self, native: Any) -> None:
        """Appends the record."""
        residual = _NONE if self.residual is None else self.residual.place
        weight = (*_native_weight(self.weight), self.bias)
        native.add_linear(self.x.place, self.out.place, residual, weight, _GATES[self.gate])


@dataclass(frozen=True, kw_only=True)
class RopeStoreOp:
    """`fused_qk_norm_rope_store` of the heads in q, k and v, in place."""

    q: Columns
    k: Columns
    v: Columns
    cache: LayerCache
    q_norm: Array | None = None
    k_norm: Array | None = None
    eps: float = 0.0
    cos_sin_cache: Array
    is_neox: bool = True

    def add_to(self, native: Any) -> None:
        """Appends the record."""
        native.add_rope_store(
            (self.q.place, self.k.place, self.v.place),
            _parts(self.cache),
            (self.q_norm, self.k_norm, self.cos_sin_cache),
            self.eps,
            self.is_neox,
        )


@dataclass(frozen=True, kw_only=True)
class AttentionOp:
    """out = causal `flash_attn_with_kvcache` of the heads in q; window_left: earlier tokens that a
    token sees, -1 all."""

    q: Columns
    out: Columns
    cache: LayerCache
    softmax_scale: float
    softcap: float = 0.0
    sinks: Array | None = None
    window_left: int = -1

    def add_to(self, native: Any) -> None:
        """Appends the record."""
        native.add_attention(
            self.q.place,
            self.out.place,
            _parts(self.cache),
            self.sinks,
            self.softmax_scale,
            self.softcap,
            self.window_left,
        )


@dataclass(frozen=True, kw_only=True)
class GatedActivationOp:
    """out = `silu_and_mul(x)`, `gelu_and_mul(x)` or `gelu_tanh_and_mul(x)`."""

    x: Columns
    out: Columns
    activation: str = "silu"

    def add_to(self, native: Any) -> None:
        """Appends the record."""
        if self.activation not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ValueError(f"Decoder: activation is {self.activation!r}, expected one of {known}")
        native.add_gated_activation(self.x.place, self.out.place, _ACTIVATIONS[self.activation])


@dataclass(frozen=True)
class AddOp:
    """Buffer `to` += buffer `x` * `factor`, or `x` * `scale`, in float32, rounded once. scale: one
    float32 column, beside which the factor is 1."""

    to: int
    x: int
    scale: Columns | None = None
    factor: float = 1.0

    def add_to(self, native: Any) -> None:
        """Appends the record."""
        scale = _NONE if self.scale is None else self.scale.place
        native.add_add(self.to, self.x, scale, self.factor)


@dataclass(frozen=True, kw_only=True)
class ScaleOp:
    """x *= `factors[positions]`, in float32, rounded once, in place. factors: float32
    [positions]."""

    x: Columns
    factors: Array

    def add_to(self, native: Any) -> None:
        """Appends the record."""
        native.add_scale(self.x.place, self.factors)


@dataclass(frozen=True, kw_only=True)
class RouteOp:
    """weights, ids = `topk_softmax`, `topk_sigmoid` or `moe_fused_gate` (router "softmax",
    "sigmoid" or "grouped") of logits. bias: the correction of the choice, for the last two. groups,
    top_groups: of "softmax" and "grouped", whose weights are multiplied by scaling."""

    logits: Columns
    weights: Columns
    ids: Columns
    router: str
    renormalize: bool = True
    bias: Array | None = None
    groups: int = 1
    top_groups: int = 1
    scaling: float = 1.0

    def add_to(self, native: Any) -> None:
        """Appends the record."""
        native.add_route(
            (self.logits.place, self.weights.place, self.ids.place),
            self.bias,
            _ROUTERS[self.router],
            self.renormalize,
            (self.groups, self.top_groups),
            self.scaling,
        )


@dataclass(frozen=True, kw_only=True)
class ExpertsOp:
    """out = `fused_experts_packed(x, experts, weights, ids, bias1=bias1, bias2=bias2,
    activation=activation)`."""

    x: Columns
    weights: Columns
    ids: Columns
    out: Columns
    experts: PackedExperts
    bias1: Array | None = None
    bias2: Array | None = None
    activation: Activation = "silu"

    def add_to(self, native: Any) -> None:
        """Appends the record."""
        if self.experts.native is None:
            raise NotImplementedError("Decoder needs experts that the CPU library has packed")
        places = (self.x.place, self.weights.place, self.ids.place, self.out.place)
        gating = tuple(read_gating("Decoder", self.activation))
        native.add_experts(places, self.experts.native, (self.bias1, self.bias2), gating)


@dataclass(frozen=True, kw_only=True)
class LatentStoreOp:
    """`apply_rope_inplace` of the last columns of each head of q, as many as rope has, and of rope;
    then `store_mla_kv(latent, rope)`. cache: [pages, page_size, L + R]."""

    q: Columns
    latent: Columns
    rope: Columns
    heads: int
    cache: Array
    cos_sin_cache: Array
    is_neox: bool = True

    def add_to(self, native: Any) -> None:
        """Appends the record."""
        native.add_latent_store(
            (self.q.place, self.latent.place, self.rope.place),
            self.heads,
            (self.cache, self.cos_sin_cache),
            self.is_neox,
        )


@dataclass(frozen=True, kw_only=True)
class LatentAttentionOp:
    """Absorbed attention of the entries before the last `num_expanded` of a call. q: heads of N + R
    columns, R as many as the cache has rotary values; out: heads of V. out = `linear_heads` by
    `values` of causal `mla_decode` of `linear_heads` by `absorb` of the N, and of the R. absorb,
    values: weights [L, N] and [V, L] of each head."""

    q: Columns
    out: Columns
    cache: Array
    softmax_scale: float
    absorb: PackedHeads
    values: PackedHeads

    def add_to(self, native: Any) -> None:
        """Appends the record."""
        if self.absorb.native is None or self.values.native is None:
            raise NotImplementedError("Decoder needs weights that the CPU library has packed")
        native.add_latent_attention(
            (self.q.place, self.out.place),
            (self.absorb.native, self.values.native),
            self.cache,
            self.softmax_scale,
        )


@dataclass(frozen=True, kw_only=True)
class LatentPrefillOp:
    """Un-absorbed attention of the last `num_expanded` entries of a call; q and out as in
    `LatentAttentionOp`. `gather_mla_kv` of their tokens, `linear` of the latent values by `expand`
    [heads * (N + V), L], keys before values in each head, `concat_mla_k` with the rotary values,
    and causal `flash_attn_varlen`. What is expanded at once takes 64 MiB, or is one entry's.
    ValueError for an entry with fewer tokens in the cache, kv_lens, than queries."""

    q: Columns
    out: Columns
    heads: int
    cache: Array
    softmax_scale: float
    expand: PackedWeight

    def add_to(self, native: Any) -> None:
        """Appends the record."""
        native.add_latent_prefill(
            (self.q.place, self.out.place),
            self.heads,
            _native_weight(self.expand),
            self.cache,
            self.softmax_scale,
        )


DecoderOp = (
    NormOp
    | LinearOp
    | RopeStoreOp
    | AttentionOp
    | GatedActivationOp
    | AddOp
    | ScaleOp
    | RouteOp
    | ExpertsOp
    | LatentStoreOp
    | LatentAttentionOp
    | LatentPrefillOp
)


class Decoder:
    """Ops over the tokens of a step, one after the other, on the CPU: the same kernels with the
    same bits as the ops that the records name, without Python between them.

    buffers: (columns, dtype) of each, dtypes by name; the first is `hidden` of the call, the others
    lie in memory of the decoder's own. Keeps all arrays; one call at a time. Errors:
    NotImplementedError without the CPU library, or with a weight that it has not packed; ValueError
    for an unknown activation.
    """

    def __init__(self, buffers: Sequence[tuple[int, str]], ops: Sequence[DecoderOp]) -> None:
        native = getattr(_loader.bind, "Decoder", None)
        if native is None:
            raise NotImplementedError("Decoder needs the native CPU library")
        self._native = native(list(buffers))
        for op in ops:
            op.add_to(self._native)
        self._workspace: Any = None

    def __call__(
        self,
        hidden: Array,
        positions: Array,
        slot_mapping: Array,
        page_table: Array,
        kv_lens: Array,
        cu_seqlens_q: Array,
        *,
        max_seqlen_q: int | None = None,
        num_expanded: int = 0,
    ) -> Array:
        """hidden [T, H], the first buffer, becomes what the ops make of it and is returned; stores
        the tokens' keys and values.

        num_expanded: how many entries, the last ones, are of prompts: `LatentPrefillOp` takes
        them, and their products keep x. The rest as in `fused_qk_norm_rope_store`,
        `flash_attn_with_kvcache` and `mla_decode`.
        Errors: those of the ops; after one some of them may have stored keys and values.
        """
        longest = 0 if max_seqlen_q is None else max_seqlen_q
        _checks.require("Decoder", longest >= 0, f"max_seqlen_q is {longest}, expected 0 or more")
        size = self._native.workspace_size(
            hidden, page_table, kv_lens, cu_seqlens_q, longest, num_expanded
        )
        if self._workspace is None or self._workspace.shape[0] < size:
            self._workspace = _arrays.empty(hidden, (size,), "uint8")
        self._native.run(
            hidden,
            positions,
            slot_mapping,
            page_table,
            kv_lens,
            cu_seqlens_q,
            longest,
            num_expanded,
            self._workspace,
        )
        return hidden


def _parts(cache: LayerCache) -> tuple[Array, Array, Array | None, Array | None]:
    return cache.k, cache.v, cache.k_scale, cache.v_scale


def _native_weight(weight: PackedWeight) -> tuple[Any, Array]:
    if not isinstance(weight, PackedWeight) or not weight.is_native:
        raise NotImplementedError("Decoder needs weights that the CPU library has packed")
    return weight.descriptor, weight.data
