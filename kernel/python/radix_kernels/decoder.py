"""All layers of a dense decoder in one native call: Python between small kernels takes a fifth of a
step on a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import _arrays, _checks, _loader
from ._arrays import Array
from .packed_weight import REFERENCE_LAYOUT, PackedWeight

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@dataclass(frozen=True, kw_only=True)
class DecoderLayer:
    """The weights of a layer of hidden size H with Hq query and Hkv key heads of size D, its cache,
    and how it attends.

    attention_norm and mlp_norm: [H], of the inputs of the two blocks; attention_out_norm and
    mlp_out_norm: of what they add to the residual; q_norm and k_norm: [D], both or neither. Each is
    left out where it is None. Products: (weight, bias or None); qkv [(Hq + 2 Hkv) D, H] gives
    query, key, value heads, o [H, Hq D], gate_up [2 I, H] gives gate and up, down [H, I]. k_cache,
    v_cache: [pages, page_size, Hkv, D]; k_scale, v_scale: those of INT8 caches, float32 [pages,
    page_size, Hkv]. cos_sin_cache and is_neox as in `fused_qk_norm_rope_store`; softmax_scale,
    softcap and sinks as in `flash_attn_with_kvcache`; window_left: earlier tokens that a token
    sees, -1 all.
    """

    attention_norm: Array | None
    mlp_norm: Array | None
    attention_out_norm: Array | None = None
    mlp_out_norm: Array | None = None
    q_norm: Array | None = None
    k_norm: Array | None = None
    qkv: tuple[PackedWeight, Array | None]
    o: tuple[PackedWeight, Array | None]
    gate_up: tuple[PackedWeight, Array | None]
    down: tuple[PackedWeight, Array | None]
    k_cache: Array
    v_cache: Array
    k_scale: Array | None = None
    v_scale: Array | None = None
    cos_sin_cache: Array
    is_neox: bool = True
    softmax_scale: float
    softcap: float = 0.0
    sinks: Array | None = None
    window_left: int = -1


class DenseDecoder:
    """The layers and the last norm of a dense model on the CPU.

    A call is, for every layer, `rmsnorm`, `linear`, `fused_qk_norm_rope_store`,
    `flash_attn_with_kvcache`, `linear` with the residual, `rmsnorm`, `linear` with the gated
    activation (`silu`, `gelu`, `gelu_tanh`; `linear_silu_and_mul` where there is no bias) and
    `linear` with the residual, then the norm: the same kernels with the same bits, without Python
    between them. Where a norm follows a block, its product stands alone, is normed, and is added to
    the residual in a rounding of its own. Keeps all arrays; one call at a time. Errors:
    NotImplementedError without the CPU library, with a weight that it has not packed or another
    type of cache.
    """

    def __init__(
        self, layers: Iterable[DecoderLayer], norm: Array, *, eps: float, activation: str = "silu"
    ) -> None:
        if activation not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ValueError(f"DenseDecoder: activation is {activation!r}, expected one of {known}")
        native = getattr(_loader.bind, "Decoder", None)
        if native is None:
            raise NotImplementedError("DenseDecoder needs the native CPU library")
        self._native = native(norm, eps, _ACTIVATIONS[activation])
        for layer in layers:
            self._add(layer)
        self._workspace: Any = None

    def _add(self, layer: DecoderLayer) -> None:
        products = [_product(x) for x in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        if _arrays.dtype_name(layer.k_cache) not in (layer.qkv[0].dtype, "int8"):
            raise NotImplementedError("DenseDecoder needs a cache of the weights' type or INT8")
        norms = (
            layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm,
            layer.q_norm, layer.k_norm,
        )  # fmt: skip
        self._native.add_layer(
            norms,
            tuple(products),
            (layer.k_cache, layer.v_cache, layer.k_scale, layer.v_scale),
            layer.cos_sin_cache,
            layer.sinks,
            layer.softmax_scale,
            layer.softcap,
            layer.window_left,
            layer.is_neox,
        )

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
    ) -> Array:
        """hidden [T, H], the embeddings, becomes the normed output and is returned; stores the
        tokens' keys and values.

        The rest as in `fused_qk_norm_rope_store` and `flash_attn_with_kvcache`.
        Errors: theirs; after one some layers may have stored their keys and values.
        """
        longest = 0 if max_seqlen_q is None else max_seqlen_q
        _checks.require(
            "DenseDecoder", longest >= 0, f"max_seqlen_q is {longest}, expected 0 or more"
        )
        size = self._native.workspace_size(hidden, page_table, longest)
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
            self._workspace,
        )
        return hidden


def _product(linear: tuple[PackedWeight, Array | None]) -> tuple[Any, Array, Array | None]:
    weight, bias = linear
    if not isinstance(weight, PackedWeight) or weight.layout == REFERENCE_LAYOUT:
        raise NotImplementedError("DenseDecoder needs weights that the CPU library has packed")
    return weight.descriptor, weight.data, bias
