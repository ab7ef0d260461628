"""DeepSeek V2 and V3 (also R1 and Kimi K2, which are V3's), and GLM-4.7-Flash, built alike: latent
attention and many small experts."""

import math
from collections.abc import Sequence
from dataclasses import replace

from ..specs import (
    FeedForward,
    GroupedSoftmaxRouter,
    Layer,
    Mla,
    ModelSpec,
    Moe,
    RmsNorm,
    Rope,
)
from .checks import require
from .family import Family
from .keys import Size
from .routed import RoutedKeys, drafting_names

_LATENT_EPS = 1e-6  # of the norms of latent values, whatever rms_norm_eps is
_MULTIPLE = 16  # of which the kernels take sizes of latent attention
_MOST = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


class LatentKeys(RoutedKeys, kw_only=True, frozen=True):
    """config.json of models with latent attention and experts. `rope_interleave`: the pairs that
    RoPE turns lie side by side."""

    kv_lora_rank: Size = 512
    q_lora_rank: Size | None = None
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size = 128
    attention_bias: bool = False
    rope_interleave: bool = True
    moe_layer_freq: int = 1

    @property
    def head_size(self) -> int:
        """The elements of a head that RoPE turns."""
        return self.qk_rope_head_dim

    @property
    def mla(self) -> Mla:
        """The attention. Raises ConfigError."""
        for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
            size = getattr(self, key)
            most = _MOST.get(key, 256 - self.qk_rope_head_dim if "nope" in key else 256)
            is_supported = size % _MULTIPLE == 0 and size <= most
            require(is_supported, f"{key} {size} is not a multiple of {_MULTIPLE} up to {most}")
        rope = self.rope(interleaved=self.rope_interleave)
        require(
            rope.rotary_dim == self.qk_rope_head_dim,
            "partial_rotary_factor is not supported for this architecture",
        )
        return Mla(
            num_heads=self.num_attention_heads,
            nope_dim=self.qk_nope_head_dim,
            rope_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            latent_dim=self.kv_lora_rank,
            query_latent_dim=self.q_lora_rank,
            rope=rope,
            scale=(self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * _stretched(rope),
            norm=RmsNorm(eps=_LATENT_EPS),
            bias=self.attention_bias,
        )

    def layers(self, feed_forwards: Sequence[FeedForward]) -> ModelSpec:
        """The model whose layers have these feed-forwards. Raises ConfigError."""
        layer = Layer(mixer=self.mla, feed_forward=self.mlp, pre_norm=self.norm)
        return self.model(replace(layer, feed_forward=each) for each in feed_forwards)

    def after_dense_layers(self, moe: Moe) -> ModelSpec:
        """The model whose first layers are dense. Raises ConfigError."""
        require(self.moe_layer_freq == 1, f"moe_layer_freq {self.moe_layer_freq} is not supported")
        return self.layers(self.feed_forwards(moe))


def _stretched(rope: Rope) -> float:
    """What scores are multiplied by where yarn stretches the context: it grows with the factor's
    logarithm, as `mscale_all_dim` says."""
    scaling = rope.scaling or {}
    factor = scaling.get("factor", 1.0)
    weight = scaling.get("mscale_all_dim", 0.0)
    if not weight or factor <= 1:
        return 1.0
    return (0.1 * weight * math.log(factor) + 1.0) ** 2


class DeepseekV2Keys(LatentKeys, kw_only=True, frozen=True):
    """config.json of DeepSeek V2 and V2-Lite."""

    q_lora_rank: Size | None = 1536
    n_routed_experts: Size = 64
    n_shared_experts: Size = 2
    moe_intermediate_size: Size = 1407
    topk_method: str = "greedy"
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    mlp_bias: bool = False


def read_v2(keys: DeepseekV2Keys) -> ModelSpec:
    """Experts by their softmax; in the large model within the best groups."""
    require(not keys.norm_topk_prob, "norm_topk_prob true is not supported")
    require(not keys.mlp_bias, "mlp_bias true is not supported")
    require(keys.scoring_func == "softmax", f"scoring_func {keys.scoring_func!r} is not supported")
    methods = ("greedy", "group_limited_greedy")
    require(keys.topk_method in methods, f"topk_method {keys.topk_method!r} is not supported")
    router = GroupedSoftmaxRouter(
        top_k=keys.num_experts_per_tok, scaling=keys.routed_scaling_factor
    )
    if keys.topk_method == "group_limited_greedy":
        keys.check_groups()
        router = replace(router, num_groups=keys.n_group, top_groups=keys.topk_group)
    return keys.after_dense_layers(keys.moe(router))


class DeepseekV3Keys(LatentKeys, kw_only=True, frozen=True):
    """config.json of DeepSeek V3, R1 and Kimi K2."""

    q_lora_rank: Size | None = 1536
    n_routed_experts: Size = 256
    moe_intermediate_size: Size = 2048
    num_experts_per_tok: Size = 8
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 3
    n_group: Size = 8
    topk_group: Size = 4
    norm_topk_prob: bool = True
    topk_method: str = "noaux_tc"
    scoring_func: str = "sigmoid"


def read_v3(keys: DeepseekV3Keys) -> ModelSpec:
    """Experts by their corrected sigmoids within the best groups."""
    require(keys.topk_method == "noaux_tc", f"topk_method {keys.topk_method!r} is not supported")
    require(keys.scoring_func == "sigmoid", f"scoring_func {keys.scoring_func!r} is not supported")
    return keys.after_dense_layers(keys.moe(keys.grouped_sigmoids(is_normed=keys.norm_topk_prob)))


class Glm4MoeLiteKeys(LatentKeys, kw_only=True, frozen=True):
    """config.json of GLM-4.7-Flash."""

    rms_norm_eps: float = 1e-5
    q_lora_rank: Size | None = 768
    qk_nope_head_dim: Size = 192
    v_head_dim: Size = 256
    n_routed_experts: Size = 64
    moe_intermediate_size: Size = 1536
    num_experts_per_tok: Size = 4
    routed_scaling_factor: float = 1.8
    first_k_dense_replace: int = 1
    norm_topk_prob: bool = True
    mlp_layer_types: list[str] | None = None
    topk_method: str = "noaux_tc"
    scoring_func: str = "sigmoid"


def read_glm4_moe_lite(keys: Glm4MoeLiteKeys) -> ModelSpec:
    """As DeepSeek V3, with a list that says which layers have experts."""
    moe = keys.moe(keys.grouped_sigmoids(is_normed=keys.norm_topk_prob))
    if keys.mlp_layer_types is None:
        return keys.after_dense_layers(moe)
    blocks: dict[str, FeedForward] = {"dense": keys.mlp, "sparse": moe}
    is_valid = len(keys.mlp_layer_types) == keys.num_hidden_layers and set(
        keys.mlp_layer_types
    ) <= {*blocks}
    require(is_valid, f"mlp_layer_types must be {keys.num_hidden_layers} of dense, sparse")
    return keys.layers([blocks[kind] for kind in keys.mlp_layer_types])


_IGNORED = frozenset({
    "aux_loss_alpha", "ep_size", "num_mtp_layers", "num_nextn_predict_layers", "qk_head_dim",
    "seq_aux",
})  # fmt: skip
DEEPSEEK_V2 = Family(keys=DeepseekV2Keys, read=read_v2, names=drafting_names, ignored=_IGNORED)
DEEPSEEK_V3 = Family(keys=DeepseekV3Keys, read=read_v3, names=drafting_names, ignored=_IGNORED)
GLM4_MOE_LITE = Family(
    keys=Glm4MoeLiteKeys, read=read_glm4_moe_lite, names=drafting_names, ignored=_IGNORED
)
