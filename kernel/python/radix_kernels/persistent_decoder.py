"""A decode step of a few rows through all layers of a model, in one kernel of a GPU.

Between the small kernels of such a step the memory waits for launches, and for the slowest block of
each. Here one block a multiprocessor stays: some warps stream the weights of all layers through
shared memory and never wait for the others, and blocks hand each other activations by words that
carry their own flag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from . import _arrays, _checks, _loader
from ._arrays import Array


@dataclass(frozen=True, kw_only=True)
class PersistentLayer:
    """A layer with grouped-query attention and a gated MLP (SiLU), or, with a router, a mixture of
    E such experts: bfloat16, but q_norm and k_norm float32. H: the hidden size; D: a head's, 128;
    W: the width of the MLP or of an expert.

    qkv: [(heads + 2 kv_heads) D, H]; o: [H, heads D]; gate_up: [2 W, H], the gate first; down:
    [H, W]; qkv_bias: [(heads + 2 kv_heads) D]; input_norm, post_norm: [H], of the RMSNorms before
    attention and before the MLP; q_norm, k_norm: [D], of each head; k_cache, v_cache: [pages,
    page_size, kv_heads, D], of one shape and strides in all layers; router: [E, H], in all layers
    or in none, and then gate_up: [E, 2 W, H], down: [E, H, W]. The scales: float32, all or none, in
    all layers; qkv, o, gate_up and down are float8_e4m3fn then, and each 128 x 128 elements have
    one: qkv_scale [(heads + 2 kv_heads) D / 128, H / 128], gate_up_scale [E, 2 W / 128, H / 128].
    """

    qkv: Array
    o: Array
    gate_up: Array
    down: Array
    qkv_bias: Array | None = None
    input_norm: Array
    post_norm: Array
    q_norm: Array | None = None
    k_norm: Array | None = None
    k_cache: Array
    v_cache: Array
    router: Array | None = None
    qkv_scale: Array | None = None
    o_scale: Array | None = None
    gate_up_scale: Array | None = None
    down_scale: Array | None = None


class PersistentDecoder:
    """Layers, and the last norm, over one new token of each of a few rows.

    final_norm: [H]; cos_sin_cache: float32 [positions, D], rotated in halves; eps: of the norms
    over H; qk_eps: of q_norm and k_norm; top_k: how many experts a token passes, those with the
    largest logits of the router (equal ones: with the lower numbers), each with the weight that
    `topk_softmax` gives with `renormalize`; 0 without routers. `max_tokens` is the most tokens of a
    call: up to 8, fewer where a multiprocessor's shared memory has no room for their activations.

    Results are those of the single ops (`rmsnorm`, `linear`, `fused_qk_norm_rope_store`,
    `flash_attn_with_kvcache`, `linear_silu_and_mul`, `fused_experts`) up to rounding: sums have
    another order, and logits are not rounded, so that experts whose logits are next to equal may be
    others. They depend on the number of tokens of the call, not on the other rows. Weights of
    experts that no row has chosen are not read.

    Keeps all arrays, and memory of its own: calls follow each other on one stream; a CUDA graph may
    hold them. Errors: NotImplementedError without a kernel for the GPU (Hopper has one), the types
    or the sizes: H a multiple of 256 up to 8192, all inner sizes (of experts: top_k W) from 1024 on
    and multiples of 64 (of experts: W), up to 8 query heads a KV head, heads of HEAD_DIM, a page
    size that is a power of two, up to 256 experts, their number a multiple of 8, top_k up to 8;
    with scales inner sizes from 2048 on and multiples of 128; ValueError, TypeError.
    """

    HEAD_DIM = 128

    def __init__(
        self,
        layers: Sequence[PersistentLayer],
        final_norm: Array,
        cos_sin_cache: Array,
        *,
        num_heads: int,
        num_kv_heads: int,
        eps: float,
        qk_eps: float = 0.0,
        softmax_scale: float,
        top_k: int = 0,
        renormalize: bool = False,
    ) -> None:
        native = getattr(_loader.bind, "PersistentDecoder", None)
        if native is None:
            raise NotImplementedError("PersistentDecoder needs the native CUDA library")
        _checks.require("PersistentDecoder", len(layers) > 0, "there are no layers")
        parts = [tuple(getattr(layer, f.name) for f in fields(layer)) for layer in layers]
        self._native: Any = native(
            parts,
            final_norm,
            cos_sin_cache,
            num_heads,
            num_kv_heads,
            eps,
            qk_eps,
            softmax_scale,
            top_k,
            renormalize,
        )
        self.max_tokens: int = self._native.max_tokens()
        self._workspace = _arrays.empty(final_norm, (self._native.workspace_size(),), "uint8")
        self._workspace[:] = 0
        self._native.prepare(self._workspace)

    def __call__(
        self,
        hidden: Array,
        positions: Array,
        slot_mapping: Array,
        page_table: Array,
        kv_lens: Array,
    ) -> Array:
        """hidden [T, H], contiguous, the embeddings, becomes the normed output and is returned;
        stores the tokens' keys and values.

        positions: int32 [T]. slot_mapping: int64 [T]; -1: not stored. page_table: int32 [T, pages].
        kv_lens: int32 [T], with the new token, whose place in the pages nothing else of the step
        may read.
        """
        self._native.run(hidden, positions, slot_mapping, page_table, kv_lens)
        return hidden
