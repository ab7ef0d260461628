"""How Cohere 2's config.json is read. Loads no torch."""

from radix_runtime.families import Family
from radix_runtime.families.keys import DecoderKeys, Size, windows_of_types
from radix_runtime.specs import Layer, LayerNorm, ModelSpec


class Cohere2Keys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of Cohere 2, where it differs from most families."""

    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    sliding_window: Size | None = 4096
    sliding_window_pattern: Size = 4
    layer_types: list[str] | None = None


def read(keys: Cohere2Keys) -> ModelSpec:
    """Layers with a window have positions, the others have none; norms subtract the mean."""
    count = keys.num_hidden_layers
    types = keys.layer_types or [
        "sliding_attention" if (i + 1) % keys.sliding_window_pattern else "full_attention"
        for i in range(count)
    ]
    norm = LayerNorm(eps=keys.layer_norm_eps)
    rope = keys.rope(interleaved=True)
    bias = keys.attention_bias
    layers = [
        Layer(
            mixer=keys.gqa(
                rope=None if window is None else rope, window=window, qkv_bias=bias, o_bias=bias
            ),
            feed_forward=keys.mlp,
            pre_norm=norm,
        )
        for window in windows_of_types(types, keys.sliding_window, count)
    ]
    return keys.model(layers, final_norm=norm, logit_multiplier=keys.logit_scale)


COHERE2 = Family(
    keys=Cohere2Keys,
    read=read,
    ignored=frozenset({
        "cache_implementation", "order_of_interleaved_layers", "position_embedding_type",
        "rotary_pct", "use_embedding_sharing", "use_gated_activation", "use_parallel_block",
        "use_parallel_embedding",
    }),
)  # fmt: skip
