"""dots.llm1."""

from collections.abc import Sequence

from ..specs import HeadNorm, Layer, ModelSpec
from .checks import require
from .family import Family
from .keys import Size, windows_of_types
from .names import Rule
from .routed import SHARED_NAMES, RoutedKeys


class Dots1Keys(RoutedKeys, kw_only=True, frozen=True):
    """config.json of dots.llm1. Layers from `max_window_layers` on have the window, or those that
    `layer_types` names. Experts are chosen by their corrected sigmoids, `noaux_tc`, which some
    files call the scoring and others the method."""

    attention_bias: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: int = 62
    layer_types: list[str] | None = None
    n_shared_experts: Size
    moe_intermediate_size: Size = 1408
    moe_layer_freq: int = 1
    norm_topk_prob: bool = False
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


def read(keys: Dots1Keys) -> ModelSpec:
    """Queries and keys are normed; the first layers are dense, the others have experts."""
    _check_routing(keys)
    bias = keys.attention_bias
    rope = keys.rope()
    qk_norm = HeadNorm(norm=keys.norm)
    moe = keys.moe(keys.grouped_sigmoids(is_normed=keys.norm_topk_prob))
    return keys.model(
        Layer(
            mixer=keys.gqa(rope=rope, window=window, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm),
            feed_forward=feed_forward,
            pre_norm=keys.norm,
        )
        for window, feed_forward in zip(keys.windows, keys.feed_forwards(moe), strict=True)
    )


def _check_routing(keys: Dots1Keys) -> None:
    scorings = ("noaux_tc", "sigmoid")
    require(keys.scoring_func in scorings, f"scoring_func {keys.scoring_func!r} is not supported")
    require(keys.topk_method == "noaux_tc", f"topk_method {keys.topk_method!r} is not supported")
    require(keys.moe_layer_freq == 1, f"moe_layer_freq {keys.moe_layer_freq} is not supported")


def names(keys: Dots1Keys) -> Sequence[Rule]:
    """The shared experts are one."""
    return (SHARED_NAMES,)


DOTS1 = Family(keys=Dots1Keys, read=read, names=names, ignored=frozenset({"use_sliding_window"}))
