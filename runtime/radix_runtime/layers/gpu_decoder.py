"""GpuDecoder: the layers of a decoder as one kernel, for decode steps of few rows on a GPU."""

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
from .moe import Experts, SparseMoe
from .norm import RMSNorm
from .router import SoftmaxGate

# More rows, or larger layers, are not a tenth faster than layer by layer: products read their
# weights once either way, and the exchange of activations grows. A mixture of experts has twice the
# launches a layer, and reads the experts of each row.
_MOST_ROWS = 4
_MOST_MIXTURE_ROWS = 1
_MOST_FP8_MIXTURE_ROWS = 2
_MOST_LAYER_BYTES = 64 << 20
_MOST_MIXTURE_BYTES = 128 << 20


class GpuDecoder:
    """Runs the layers and the last norm of a decoder in one launch (`ops.PersistentDecoder`), for
    decode steps of at most `_MOST_ROWS` rows on one GPU, where a row reads at most
    `_MOST_LAYER_BYTES` of a layer's weights; with experts of `_MOST_MIXTURE_ROWS` (in FP8
    `_MOST_FP8_MIXTURE_ROWS`) rows and `_MOST_MIXTURE_BYTES`. Whether it runs a step follows from
    the step's shape, so that bits do.

    `layers`: those that it can run have the modules of models/decoder.py's. They are read when a KV
    pool is first used, which is after loading."""

    def __init__(self, ctx: BuildContext, layers: Iterable[nn.Module], norm: nn.Module) -> None:
        self._layers = layers
        self._norm = norm
        self._is_possible = (
            ctx.persistent_decoder
            and ctx.device.type == "cuda"
            and ctx.dtype == torch.bfloat16
            and ctx.communicator.world_size == 1
            and ctx.backend.supports_fused_decoder
        )
        self._pool: KVPool | None = None
        self._decoder: ops.PersistentDecoder | None = None
        self._most_rows = 0

    def applies_to(self, batch: ForwardBatch) -> bool:
        """Whether this step may be a call of this object instead of the modules."""
        shape = batch.shape
        if not self._is_possible or shape is None or shape.has_chunks:
            return False
        if self._pool is not batch.kv_pool:
            self._pool = batch.kv_pool
            self._decoder = None
            self._lower()
        decoder = self._decoder
        return decoder is not None and shape.tokens <= min(decoder.max_tokens, self._most_rows)

    def _lower(self) -> None:
        """Makes the decoder for the pool, if there can be one."""
        assert self._pool is not None
        layers: list[Any] = list(self._layers)
        try:
            self._decoder = lower(layers, self._norm, self._pool)
        except NotImplementedError:
            return
        self._most_rows = _most_rows(layers[0].mlp)

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """hidden [T, hidden_size], the embeddings, becomes the normed output and is returned;
        stores the tokens' keys and values. Only where `applies_to(batch)`."""
        assert self._decoder is not None
        return self._decoder(
            hidden, batch.positions, batch.slot_mapping, batch.page_table, batch.kv_lens
        )


def lower(layers: list[Any], norm: Any, pool: KVPool) -> ops.PersistentDecoder:
    """The layers and the last norm of a model. Raises NotImplementedError where the kernel does not
    do what the modules do: other modules, weights, sizes or another cache, another GPU. Of FP8
    weights it multiplies the values by x as it is, which the modules round to FP8 too."""
    first = layers[0].self_attn
    _require(isinstance(first, Attention), "attention is another module")
    _require(not first.interleaved, "pairs of RoPE are neighbours")
    _require(first.rotary.shape[1] == first.spec.head_dim, "a part of each head is not rotated")
    settings = _settings(layers[0])
    for layer in layers:
        _require(_settings(layer) == settings, "layers differ")
        _require(layer.self_attn.rotary is first.rotary, "layers differ in their RoPE")
    _require_norm(norm)
    _require(norm.eps == layers[0].input_layernorm.eps, "the last norm has another eps")
    lowered = [_layer(layer, pool) for layer in layers]
    top_k = 0
    renormalize = False
    if lowered[0].router is not None:
        router = layers[0].mlp.gate.router
        top_k = router.top_k
        renormalize = router.renormalize
    most = _MOST_MIXTURE_BYTES if top_k > 0 else _MOST_LAYER_BYTES
    _require(_bytes_of_row(lowered[0], top_k) <= most, "the layers are too large to gain by it")
    return ops.PersistentDecoder(
        layers=lowered,
        final_norm=norm.weight,
        cos_sin_cache=first.rotary,
        num_heads=first.spec.num_heads,
        num_kv_heads=first.spec.num_kv_heads,
        eps=norm.eps,
        qk_eps=first.eps,
        softmax_scale=first.spec.scale,
        top_k=top_k,
        renormalize=renormalize,
    )


def _most_rows(mlp: GatedMLP | SparseMoe) -> int:
    """Up to which one kernel is a tenth faster, of layers with such a feed-forward."""
    if isinstance(mlp, GatedMLP):
        return _MOST_ROWS
    is_fp8 = mlp.experts.method.scales_blocks
    return _MOST_FP8_MIXTURE_ROWS if is_fp8 else _MOST_MIXTURE_ROWS


def _bytes_of_row(layer: ops.PersistentLayer, top_k: int) -> int:
    """What a token reads of the layer's weights, of experts only its own."""
    mlp: int = layer.gate_up.nbytes + layer.down.nbytes
    size: int = layer.qkv.nbytes + layer.o.nbytes
    if layer.router is None:
        return size + mlp
    return size + layer.router.nbytes + mlp * top_k // len(layer.router)


def _settings(layer: Any) -> tuple[Any, ...]:
    """What must be the same in all layers, of a layer that the kernel can run."""
    attention = layer.self_attn
    mlp = layer.mlp
    kinds = ((layer, Fusible), (attention, Attention), (mlp, (GatedMLP, SparseMoe)))
    for module, kind in kinds:
        _require(isinstance(module, kind) and module.fusible, "a module has a forward of its own")
    _require_norm(layer.input_layernorm)
    _require_norm(layer.post_attention_layernorm)
    _require(layer.post_self_attn_layernorm is None, "attention's result is normed")
    _require(layer.post_mlp_layernorm is None, "the MLP's result is normed")
    _require(not attention.norms_all_heads, "all heads are normed together")
    _require(attention.query_scales is None, "scores are scaled by position")
    _require(layer.residual_multiplier == 1, "what is added to the residual is multiplied")
    spec = attention.spec
    extras = (spec.window, spec.softcap, spec.sinks)
    _require(extras == (None, None, None), "attention has a window, a soft cap or sinks")
    _require(spec.head_dim == ops.PersistentDecoder.HEAD_DIM, "heads have another size")
    eps = layer.input_layernorm.eps
    _require(layer.post_attention_layernorm.eps == eps, "norms differ in eps")
    heads = (spec.num_heads, spec.num_kv_heads, spec.scale)
    return (*heads, attention.eps, eps, *_mlp_settings(mlp))


def _mlp_settings(mlp: GatedMLP | SparseMoe) -> tuple[Any, ...]:
    if isinstance(mlp, GatedMLP):
        _require(mlp.activation == "silu", f"the activation is {mlp.activation}")
        return (mlp.down_proj.shape.in_features,)
    gate = mlp.gate
    _require(type(gate) is SoftmaxGate, "experts are chosen in another way")
    _require(type(mlp.experts) is Experts, "the experts have a forward of their own")
    has_shared = mlp.shared_expert is not None or gate.num_shared > 0
    _require(not has_shared, "all tokens share an expert")
    return (gate.shape.out_features, gate.router)


def _layer(layer: Any, pool: KVPool) -> ops.PersistentLayer:
    attention = layer.self_attn
    index = attention.spec.layer_id
    k_cache = pool.k[index]
    _require(k_cache.dtype == torch.bfloat16, "the cache is of another type")
    q_norm = attention.q_norm
    k_norm = attention.k_norm
    return ops.PersistentLayer(
        **_named("qkv", _weight(attention.qkv_proj)),
        **_named("o", _weight(attention.o_proj, has_bias=False)),
        **_mlp(layer.mlp),
        qkv_bias=attention.qkv_proj.bias,
        input_norm=layer.input_layernorm.weight,
        post_norm=layer.post_attention_layernorm.weight,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        k_cache=k_cache,
        v_cache=pool.v[index],
    )


def _mlp(mlp: GatedMLP | SparseMoe) -> dict[str, torch.Tensor]:
    """The weights behind the second norm."""
    if isinstance(mlp, GatedMLP):
        gate_up = _weight(mlp.gate_up_proj, has_bias=False)
        down = _weight(mlp.down_proj, has_bias=False)
        return _named("gate_up", gate_up) | _named("down", down)
    router, scales = _weight(mlp.gate, has_bias=False)
    _require(scales is None, "the router is quantized")
    stacks = mlp.experts.stacked()
    method = mlp.experts.method
    if stacks is None:
        raise NotImplementedError("the experts are packed, biased or not all on this rank")
    is_plain = method.is_divisible and set(stacks[0]) == {"weight"}
    _require(is_plain or method.scales_blocks, "the experts are quantized in another way")
    gate_up, down = ((each["weight"], each.get("weight_scale")) for each in stacks)
    return {"router": router} | _named("gate_up", gate_up) | _named("down", down)


# A weight in the compute type without scales, or in FP8 with a scale for each 128 x 128 elements.
_Weight = tuple[torch.Tensor, torch.Tensor | None]


def _named(name: str, weight: _Weight) -> dict[str, torch.Tensor]:
    values, scales = weight
    return {name: values} if scales is None else {name: values, f"{name}_scale": scales}


def _weight(linear: Any, *, has_bias: bool = True) -> _Weight:
    _require(isinstance(linear, Fusible) and linear.fusible, "a linear layer is another module")
    _require(has_bias or linear.bias is None, "a linear layer has a bias")
    weight: torch.Tensor | None = linear.method.plain_weight(linear)
    if weight is not None:
        return weight, None
    scaled: tuple[torch.Tensor, torch.Tensor] | None = linear.method.block_weight(linear)
    if scaled is None:
        raise NotImplementedError("the weight of a linear layer is quantized in another way")
    return scaled


def _require_norm(norm: Any) -> None:
    _require(isinstance(norm, RMSNorm) and norm.fusible, "a norm is another module")
    _require(norm.weight.dtype == torch.bfloat16, "the weight of a norm is of another type")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise NotImplementedError(problem)
