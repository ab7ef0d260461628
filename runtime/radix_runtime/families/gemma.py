"""Gemma 2, Gemma 3 and the text of multimodal Gemma 3."""

from collections.abc import Sequence
from typing import Any

from ..specs import HeadNorm, Layer, Mlp, ModelSpec, RmsNorm
from .checks import require
from .family import Family
from .keys import DecoderKeys, Size, activation_named, windows_of_types
from .multimodal import text_rules
from .names import Rename, Rule


class GemmaKeys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of Gemma 2 and 3: norms before and after both blocks, all of them stored less
    one; the embedding is multiplied by the root of its size."""

    head_dim: Size | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256
    sliding_window: Size | None = 4096
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool | None = None

    @property
    def norm(self) -> RmsNorm:
        """Stored less one."""
        return RmsNorm(eps=self.rms_norm_eps, unit_offset=True)

    def layer(self, window: int | None, **attention: Any) -> Layer:
        """A layer; `attention` are fields of its attention."""
        return Layer(
            mixer=self.gqa(
                scale=self.query_pre_attn_scalar**-0.5,
                qkv_bias=self.attention_bias,
                o_bias=self.attention_bias,
                softcap=self.attn_logit_softcapping,
                window=window,
                **attention,
            ),
            feed_forward=Mlp(
                width=self.intermediate_size, activation=activation_named(self.hidden_activation)
            ),
            pre_norm=self.norm,
            post_norm=self.norm,
        )

    def gemma(self, layers: Sequence[Layer]) -> ModelSpec:
        """The model of these layers. Raises ConfigError."""
        require(not self.use_bidirectional_attention, "use_bidirectional_attention: not supported")
        return self.model(
            layers,
            embedding_multiplier=self.hidden_size**0.5,
            logit_softcap=self.final_logit_softcapping,
        )


class Gemma2Keys(GemmaKeys, kw_only=True, frozen=True):
    """config.json of Gemma 2."""

    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0


class Gemma3Keys(GemmaKeys, kw_only=True, frozen=True):
    """config.json of Gemma 3. RoPE differs by the type of the layer: `rope_parameters` holds both,
    or else `rope_theta` and the scaling are those of full attention and `rope_local_base_freq` that
    of the layers with a window."""

    # Hub files of the 4B and larger models leave these out.
    vocab_size: Size = 262208
    max_position_embeddings: Size = 131072
    num_attention_heads: Size = 8
    num_key_value_heads: Size | None = 4
    rope_theta: float = 1e6
    rope_local_base_freq: float = 1e4
    sliding_window_pattern: Size = 6


def read_gemma2(keys: Gemma2Keys) -> ModelSpec:
    """Every second layer has a window."""
    count = keys.num_hidden_layers
    types = keys.layer_types or _pattern(count, full_every=2)
    rope = keys.rope()
    windows = windows_of_types(types, keys.sliding_window, count)
    return keys.gemma([keys.layer(window, rope=rope) for window in windows])


def read_gemma3(keys: Gemma3Keys) -> ModelSpec:
    """Five layers with a window, then one without; queries and keys are normed."""
    count = keys.num_hidden_layers
    types = keys.layer_types or _pattern(count, full_every=keys.sliding_window_pattern)
    windows = windows_of_types(types, keys.sliding_window, count)
    ropes = keys.ropes_of_types({"rope_theta": keys.rope_local_base_freq})
    qk_norm = HeadNorm(norm=keys.norm)
    return keys.gemma([
        keys.layer(window, rope=ropes[kind], qk_norm=qk_norm)
        for kind, window in zip(types, windows, strict=True)
    ])  # fmt: skip


def _pattern(count: int, *, full_every: int) -> list[str]:
    """Every `full_every`-th layer attends to all."""
    return ["sliding_attention" if (i + 1) % full_every else "full_attention" for i in range(count)]


def names(keys: Any) -> Sequence[Rule]:
    """The norm after attention has another name than in Llama, where it is the MLP's."""
    return (
        Rename(r"\.post_attention_layernorm\.", ".post_self_attn_layernorm."),
        Rename(r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
        Rename(r"\.post_feedforward_layernorm\.", ".post_mlp_layernorm."),
    )


def _text_names(keys: Any) -> Sequence[Rule]:
    return (*text_rules(keys), *names(keys))


_IGNORED = frozenset({"hidden_act", "cache_implementation"})
GEMMA2 = Family(keys=Gemma2Keys, read=read_gemma2, names=names, ignored=_IGNORED)
GEMMA3 = Family(keys=Gemma3Keys, read=read_gemma3, names=names, ignored=_IGNORED)
GEMMA3_VL = Family(keys=Gemma3Keys, read=read_gemma3, names=_text_names, ignored=_IGNORED)
