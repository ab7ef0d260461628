"""dots.llm1."""

from collections.abc import Sequence

from ..specs import GroupedRouter, HeadNorm, Layer, Mlp, ModelSpec, Moe, SharedExpert
from .checks import require
from .family import Family
from .keys import DecoderKeys, Size, windows_of_types
from .names import Rename, Rule


class Dots1Keys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of dots.llm1. Layers from `max_window_layers` on have the window, or those that
    `layer_types` names. Experts are chosen by their corrected sigmoids, `noaux_tc`, which some
    files call the scoring and others the method."""

    attention_bias: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: int = 62
    layer_types: list[str] | None = None
    n_routed_experts: Size
    n_shared_experts: Size
    moe_intermediate_size: Size = 1408
    num_experts_per_tok: Size
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    n_group: Size = 1
    topk_group: Size = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer. Raises ConfigError."""
        count = self.num_hidden_layers
        types = self.layer_types or [
            "full_attention" if i < self.max_window_layers else "sliding_attention"
            for i in range(count)
        ]
        return windows_of_types(types, self.sliding_window, count)

    @property
    def moe(self) -> Moe:
        """The experts, with those that all tokens share as one. Raises ConfigError."""
        require(
            self.scoring_func in ("noaux_tc", "sigmoid"),
            f"scoring_func {self.scoring_func!r} is not supported",
        )
        require(
            self.topk_method == "noaux_tc", f"topk_method {self.topk_method!r} is not supported"
        )
        require(self.norm_topk_prob, "norm_topk_prob false is not supported")
        require(self.moe_layer_freq == 1, f"moe_layer_freq {self.moe_layer_freq} is not supported")
        width = self.moe_intermediate_size
        shared = Mlp(width=width * self.n_shared_experts, activation=self.activation)
        return Moe(
            num_experts=self.n_routed_experts,
            width=width,
            router=GroupedRouter(
                top_k=self.num_experts_per_tok,
                num_groups=self.n_group,
                top_groups=self.topk_group,
                scaling=self.routed_scaling_factor,
            ),
            activation=self.activation,
            shared=SharedExpert(mlp=shared),
        )


def read(keys: Dots1Keys) -> ModelSpec:
    """Queries and keys are normed; the first layers are dense, the others have experts."""
    bias = keys.attention_bias
    rope = keys.rope()
    qk_norm = HeadNorm(norm=keys.norm)
    moe = keys.moe
    return keys.model(
        Layer(
            mixer=keys.gqa(rope=rope, window=window, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm),
            feed_forward=keys.mlp if i < keys.first_k_dense_replace else moe,
            pre_norm=keys.norm,
        )
        for i, window in enumerate(keys.windows)
    )


def names(keys: Dots1Keys) -> Sequence[Rule]:
    """The shared experts are one."""
    return (Rename(r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),)


DOTS1 = Family(keys=Dots1Keys, read=read, names=names, ignored=frozenset({"use_sliding_window"}))
