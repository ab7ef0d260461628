"""Qwen2 and Qwen3, dense and with experts, and the text of Qwen2-VL, Qwen2.5-VL
and Qwen3-VL."""

from collections.abc import Sequence
from typing import Any

from ..specs import (
    FeedForward,
    HeadNorm,
    Layer,
    Mlp,
    ModelSpec,
    Moe,
    SharedExpert,
    SoftmaxRouter,
)
from .checks import require
from .family import Family
from .keys import DecoderKeys, Size, windows_of_types
from .multimodal import OTHER_KEYS, text_rules
from .names import Rule, SplitRows, Transpose, Unstack


class QwenKeys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of Qwen. The window is on where `use_sliding_window` says so: from layer
    `max_window_layers` up, or where `layer_types` says so."""

    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer. Raises ConfigError."""
        layers = self.num_hidden_layers
        if not self.use_sliding_window or self.sliding_window is None:
            return (None,) * layers
        require(self.sliding_window > 0, f"sliding_window is {self.sliding_window}")
        if self.layer_types is not None:
            return windows_of_types(self.layer_types, self.sliding_window, layers)
        first = self.max_window_layers
        return tuple(self.sliding_window if i >= first else None for i in range(layers))


class Qwen3Keys(QwenKeys, kw_only=True, frozen=True):
    """config.json of Qwen3."""

    attention_bias: bool = False


class MoeKeys(QwenKeys, kw_only=True, frozen=True):
    """Experts, in every layer that `mlp_only_layers` and `decoder_sparse_step` leave them. The
    files of transformers 4 have `num_experts`, those of transformers 5 `num_local_experts`."""

    moe_intermediate_size: Size
    num_experts_per_tok: Size
    num_experts: Size | None = None
    num_local_experts: Size | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] | None = None

    def feed_forwards(self, shared: SharedExpert | None = None) -> list[FeedForward]:
        """The feed-forward of each layer. Raises ConfigError."""
        num_experts = self.num_experts or self.num_local_experts
        require(num_experts is not None, "num_experts is missing")
        assert num_experts is not None
        moe = Moe(
            num_experts=num_experts,
            width=self.moe_intermediate_size,
            router=SoftmaxRouter(top_k=self.num_experts_per_tok, renormalize=self.norm_topk_prob),
            activation=self.activation,
            shared=shared,
        )
        dense = self.mlp_only_layers or []
        return [
            self.mlp if i in dense or (i + 1) % self.decoder_sparse_step else moe
            for i in range(self.num_hidden_layers)
        ]


class Qwen2MoeKeys(MoeKeys, kw_only=True, frozen=True):
    """config.json of Qwen2-MoE."""

    shared_expert_intermediate_size: Size
    qkv_bias: bool = True


class Qwen3MoeKeys(MoeKeys, kw_only=True, frozen=True):
    """config.json of Qwen3-MoE."""

    attention_bias: bool = False
    use_qk_norm: bool = True


class Qwen3VLMoeKeys(Qwen3MoeKeys, kw_only=True, frozen=True):
    """The text of Qwen3-VL with experts, whose files do not say that the weights add up to 1."""

    norm_topk_prob: bool = True


def read_qwen2(keys: QwenKeys) -> ModelSpec:
    """The products to queries, keys and values have biases."""
    return _model(keys, [keys.mlp] * keys.num_hidden_layers, qkv_bias=True)


def read_qwen3(keys: Qwen3Keys) -> ModelSpec:
    """Queries and keys are normed."""
    bias = keys.attention_bias
    feed_forwards = [keys.mlp] * keys.num_hidden_layers
    qk_norm = HeadNorm(norm=keys.norm)
    return _model(keys, feed_forwards, qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)


def read_qwen2_moe(keys: Qwen2MoeKeys) -> ModelSpec:
    """Qwen2 with experts, and a shared one that has a gate."""
    width = keys.shared_expert_intermediate_size
    shared = SharedExpert(mlp=Mlp(width=width, activation=keys.activation), gated=True)
    return _model(keys, keys.feed_forwards(shared), qkv_bias=keys.qkv_bias)


def read_qwen3_moe(keys: Qwen3MoeKeys) -> ModelSpec:
    """Qwen3 with experts."""
    require(keys.use_qk_norm, "use_qk_norm false is not supported")
    bias = keys.attention_bias
    qk_norm = HeadNorm(norm=keys.norm)
    return _model(keys, keys.feed_forwards(), qkv_bias=bias, o_bias=bias, qk_norm=qk_norm)


def _model(keys: QwenKeys, feed_forwards: Sequence[FeedForward], **attention: Any) -> ModelSpec:
    rope = keys.rope()
    return keys.model(
        Layer(
            mixer=keys.gqa(rope=rope, window=window, **attention),
            feed_forward=feed_forward,
            pre_norm=keys.norm,
        )
        for window, feed_forward in zip(keys.windows, feed_forwards, strict=True)
    )


def _moe_text_rules(keys: MoeKeys) -> Sequence[Rule]:
    """Qwen3-VL holds the experts of a layer in two tensors, inputs first on the hub, outputs first
    where transformers 5 wrote them."""
    width = keys.moe_intermediate_size
    return (
        *text_rules(keys),
        Unstack(r"\.experts\.(gate_up_proj|down_proj)$", r".experts.{}.\1.weight"),
        Transpose(r"\.experts\.\d+\.gate_up_proj\.weight$", rows=2 * width),
        Transpose(r"\.experts\.\d+\.down_proj\.weight$", rows=keys.hidden_size),
        SplitRows(
            r"(\.experts\.\d+)\.gate_up_proj\.",
            ((r"\1.gate_proj.", width), (r"\1.up_proj.", width)),
        ),
    )


QWEN2 = Family(keys=QwenKeys, read=read_qwen2)
QWEN3 = Family(keys=Qwen3Keys, read=read_qwen3)
QWEN2_MOE = Family(keys=Qwen2MoeKeys, read=read_qwen2_moe)
QWEN3_MOE = Family(keys=Qwen3MoeKeys, read=read_qwen3_moe)
QWEN2_VL = Family(keys=QwenKeys, read=read_qwen2, names=text_rules, ignored=OTHER_KEYS)
QWEN3_VL = Family(keys=Qwen3Keys, read=read_qwen3, names=text_rules)
QWEN3_VL_MOE = Family(keys=Qwen3VLMoeKeys, read=read_qwen3_moe, names=_moe_text_rules)
