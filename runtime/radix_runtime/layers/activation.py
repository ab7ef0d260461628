"""Gated activations, by the names of ModelConfig.hidden_act."""

from .. import ops

# act(x[..., :I]) * x[..., I:], [..., 2 I] -> [..., I]
gated_activations = {
    "silu": ops.silu_and_mul,
    "gelu": ops.gelu_and_mul,
    "gelu_tanh": ops.gelu_tanh_and_mul,
}
