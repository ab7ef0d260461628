"""ModelSpec: a decoder with an output head."""

from dataclasses import dataclass

from ..errors import ConfigError
from .attention import Gqa
from .feed_forward import Mlp, Moe
from .norm import Norm

Mixer = Gqa
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
        shapes = {(layer.mixer.num_kv_heads, layer.mixer.head_dim) for layer in self.layers}
        if len(shapes) != 1:
            raise ConfigError("config.json: layers with KV caches of several shapes")

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """The KV heads of every layer."""
        return self.layers[0].mixer.num_kv_heads

    @property
    def head_dim(self) -> int:
        """The elements of a key, and of a value, of every layer."""
        return self.layers[0].mixer.head_dim

    def check_tp(self, tp_size: int) -> None:
        """Raises ConfigError when the model cannot be split over `tp_size` ranks."""
        for layer in self.layers:
            heads = layer.mixer.num_heads
            kv_heads = layer.mixer.num_kv_heads
            _require_division(tp_size, heads, "attention heads")
            _check_feed_forward(tp_size, layer.feed_forward)
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
