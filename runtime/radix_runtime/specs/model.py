"""ModelSpec: a decoder with an output head."""

from dataclasses import dataclass

from ..errors import ConfigError
from .attention import Gqa, Mla
from .feed_forward import Mlp, Moe
from .norm import Norm

Mixer = Gqa | Mla
FeedForward = Mlp | Moe


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A mixer, then a feed-forward; each adds to the residual stream:

        residual += residual_multiplier * post_norm(block(pre_norm(residual)))

    A norm that is None is left out. The mixer and the feed-forward have norms of the same kinds but
    weights of their own."""

    mixer: Mixer
    feed_forward: FeedForward
    pre_norm: Norm | None
    post_norm: Norm | None = None
    residual_multiplier: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model. All sizes are those of the whole model, not of one rank.

    `max_context`: the longest sequence, in tokens, that its positions reach. `dtype`: the type that
    the checkpoint names: bfloat16, float16 or float32. `tied_head`: the output head is the
    embedding. The embedding's output is multiplied by `embedding_multiplier`, rounded to the
    compute type. Logits are multiplied by `logit_multiplier`, then, with a `logit_softcap`, become
    softcap * tanh(logit / softcap)."""

    hidden_size: int
    vocab_size: int
    max_context: int
    dtype: str
    tied_head: bool
    final_norm: Norm
    layers: tuple[Layer, ...]
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        latent = [isinstance(layer.mixer, Mla) for layer in self.layers]
        if any(latent) and not all(latent):
            raise ConfigError("config.json: latent attention in some layers only is not supported")

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def keeps_latents(self) -> bool:
        """Whether the cache holds latent values instead of keys and values."""
        return isinstance(self.layers[0].mixer, Mla)

    def check_tp(self, tp_size: int) -> None:
        """Raises ConfigError when the model cannot be split over `tp_size` ranks."""
        for layer in self.layers:
            _require_division(tp_size, layer.mixer.num_heads, "attention heads")
            _check_feed_forward(tp_size, layer.feed_forward)
            if isinstance(layer.mixer, Gqa):
                _check_kv_heads(tp_size, layer.mixer.num_kv_heads)


def _check_kv_heads(tp_size: int, kv_heads: int) -> None:
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ConfigError(f"--tp-size {tp_size} does not fit {kv_heads} KV heads")


def _check_feed_forward(tp_size: int, block: FeedForward) -> None:
    if isinstance(block, Mlp):
        _require_division(tp_size, block.width, "MLP")
        return
    if block.shared is not None:
        _require_division(tp_size, block.shared.mlp.width, "shared expert")
    # Experts are split by width, or else held whole by one rank each.
    if block.width % tp_size and block.num_experts < tp_size:
        raise ConfigError(
            f"--tp-size {tp_size} does not divide the {block.width} of an expert and exceeds the "
            f"{block.num_experts} experts"
        )


def _require_division(tp_size: int, size: int, what: str) -> None:
    if size % tp_size:
        raise ConfigError(f"--tp-size {tp_size} does not divide the {size} {what}")
