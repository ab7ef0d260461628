"""gpt-oss, with its experts in MXFP4 or in 16 bits."""

from collections.abc import Sequence

from ..specs import ClampedSwiGlu, Layer, ModelSpec, Moe, SoftmaxRouter
from .family import Family
from .keys import DecoderKeys, Size, windows_of_types
from .names import Deinterleave, Rename, Rule, Transpose, Unstack

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssKeys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of gpt-oss."""

    num_local_experts: Size
    head_dim: Size | None = 64
    num_experts_per_tok: Size = 4
    rope_theta: float = 150000.0
    rms_norm_eps: float = 1e-5
    sliding_window: Size | None = 128
    layer_types: list[str] | None = None
    attention_bias: bool = True
    torch_dtype: str = "bfloat16"  # what the published files hold, without saying so
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0


def read(keys: GptOssKeys) -> ModelSpec:
    """Attention sinks, a window on every second layer, experts with biases."""
    count = keys.num_hidden_layers
    moe = Moe(
        num_experts=keys.num_local_experts,
        width=keys.intermediate_size,
        router=SoftmaxRouter(top_k=keys.num_experts_per_tok, renormalize=True, bias=True),
        activation=ClampedSwiGlu(alpha=keys.swiglu_alpha, limit=keys.swiglu_limit),
        bias=True,
    )
    types = keys.layer_types or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(count)
    ]
    settings = keys.rope_parameters or {}
    rope = keys.rope(settings if "rope_type" in settings else {**_ROPE, **settings})
    bias = keys.attention_bias
    return keys.model(
        Layer(
            mixer=keys.gqa(rope=rope, window=window, qkv_bias=bias, o_bias=bias, sinks=True),
            feed_forward=moe,
            pre_norm=keys.norm,
        )
        for window in windows_of_types(types, keys.sliding_window, count)
    )


def names(keys: GptOssKeys) -> Sequence[Rule]:
    """The experts of a layer are in one tensor, the outputs of gate and up in turn; inputs come
    first in 16 bits, outputs in MXFP4 (quantization/mxfp4.py)."""
    return (
        Rename(r"\.mlp\.router\.", ".mlp.gate."),
        Unstack(r"\.experts\.(gate_up_proj|down_proj)_bias$", r".experts.{}.\1.bias"),
        Transpose(r"\.experts\.(gate_up_proj|down_proj)$"),
        Unstack(r"\.experts\.(gate_up_proj|down_proj)$", r".experts.{}.\1.weight"),
        Unstack(r"\.experts\.(gate_up_proj|down_proj)_(blocks|scales)$", r".experts.{}.\1.\2"),
        Deinterleave(r"\.gate_up_proj\.", even=".gate_proj.", odd=".up_proj."),
    )


GPT_OSS = Family(
    keys=GptOssKeys,
    read=read,
    names=names,
    ignored=frozenset({"experts_per_token", "hidden_act", "initial_context_length"}),
)
