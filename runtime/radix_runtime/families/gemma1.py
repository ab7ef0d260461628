"""Gemma, the first."""

from ..specs import Layer, Mlp, ModelSpec, RmsNorm
from .checks import require
from .family import Family
from .keys import DecoderKeys, Size, activation_named

_TANH = "gelu_pytorch_tanh"


class Gemma1Keys(DecoderKeys, kw_only=True, frozen=True):
    """config.json of Gemma. Its files say `gelu` where they mean the approximation by tanh."""

    head_dim: Size | None = 256
    hidden_act: str = _TANH
    hidden_activation: str | None = None
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_bidirectional_attention: bool | None = None

    @property
    def norm(self) -> RmsNorm:
        """Stored less one."""
        return RmsNorm(eps=self.rms_norm_eps, unit_offset=True)

    @property
    def activation(self) -> str:
        """By the newer of two keys, where a file has it. Raises ConfigError."""
        name = self.hidden_activation or self.hidden_act
        return activation_named(_TANH if name == "gelu" else name)


def read(keys: Gemma1Keys) -> ModelSpec:
    """Llama with norms stored less one and an embedding that is multiplied by the root of its
    size."""
    require(not keys.use_bidirectional_attention, "use_bidirectional_attention: not supported")
    bias = keys.attention_bias
    layer = Layer(
        mixer=keys.gqa(qkv_bias=bias, o_bias=bias),
        feed_forward=Mlp(width=keys.intermediate_size, activation=keys.activation),
        pre_norm=keys.norm,
    )
    return keys.model([layer] * keys.num_hidden_layers, embedding_multiplier=keys.hidden_size**0.5)


GEMMA1 = Family(keys=Gemma1Keys, read=read)
