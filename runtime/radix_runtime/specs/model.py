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
        """Raises ConfigError, with the sizes that fit, when the model cannot be split over
        `tp_size` ranks."""
        problem = self._tp_problem(tp_size)
        if problem is not None:
            most = self.layers[0].mixer.num_heads
            fitting = [str(n) for n in range(1, most + 1) if self._tp_problem(n) is None]
            sizes = f"what fits: {', '.join(fitting)}"
            raise ConfigError(f"--tp-size {tp_size} {problem}; {sizes}")

    def _tp_problem(self, ranks: int) -> str | None:
        """Why the model cannot be split over `ranks`."""
        for layer in self.layers:
            problem = _mixer_problem(ranks, layer.mixer)
            problem = problem or _feed_forward_problem(ranks, layer.feed_forward)
            if problem is not None:
                return problem
        return None


def _mixer_problem(ranks: int, mixer: Mixer) -> str | None:
    if mixer.num_heads % ranks:
        return f"does not divide the {mixer.num_heads} attention heads"
    if isinstance(mixer, Gqa):
        kv_heads = mixer.num_kv_heads
        if kv_heads % ranks and ranks % kv_heads:
            return f"does not fit {kv_heads} KV heads"
    return None


def _feed_forward_problem(ranks: int, block: FeedForward) -> str | None:
    if isinstance(block, Mlp):
        return None if block.width % ranks == 0 else f"does not divide the MLP width {block.width}"
    shared = block.shared
    if shared is not None and shared.mlp.width % ranks:
        return f"does not divide the width {shared.mlp.width} of the shared expert"
    # Experts are split by width, or else held whole by one rank each.
    if block.width % ranks and block.num_experts < ranks:
        return (
            f"does not divide the width {block.width} of an expert and exceeds the "
            f"{block.num_experts} experts"
        )
    return None
