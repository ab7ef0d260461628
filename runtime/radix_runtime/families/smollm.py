"""SmolLM3."""

from ..specs import Layer, Mlp, ModelSpec
from .checks import require
from .family import Family
from .keys import DecoderKeys, Size, windows_of_types


class SmolLM3Keys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of SmolLM3. `no_rope_layers[i]`: 0 where layer i has no positions; without it
    every `no_rope_layer_interval`-th layer has none."""

    rope_theta: float = 2e6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Size = 4
    use_sliding_window: bool = False
    sliding_window: Size | None = None
    layer_types: list[str] | None = None


def read(keys: SmolLM3Keys) -> ModelSpec:
    """Llama, with layers without positions."""
    count = keys.num_hidden_layers
    interval = keys.no_rope_layer_interval
    has_rope = keys.no_rope_layers or [int((i + 1) % interval != 0) for i in range(count)]
    require(len(has_rope) == count, f"no_rope_layers must be {count} numbers")
    window = keys.sliding_window if keys.use_sliding_window else None
    types = keys.layer_types or [
        "full_attention" if positions else "sliding_attention" for positions in has_rope
    ]
    rope = keys.rope()
    bias = keys.attention_bias
    mlp = Mlp(width=keys.intermediate_size, activation=keys.activation, bias=keys.mlp_bias)
    return keys.model(
        Layer(
            mixer=keys.gqa(
                rope=rope if positions else None, window=window, qkv_bias=bias, o_bias=bias
            ),
            feed_forward=mlp,
            pre_norm=keys.norm,
        )
        for positions, window in zip(has_rope, windows_of_types(types, window, count), strict=True)
    )


SMOLLM3 = Family(keys=SmolLM3Keys, read=read)
