"""Qwen2 and Qwen3, dense."""

from typing import Any

from ..specs import HeadNorm, Layer, ModelSpec
from .family import Family
from .keys import DecoderKeys, Size, windows_of_types


class QwenKeys(DecoderKeys, frozen=True):
    """config.json of Qwen. The window is on where `use_sliding_window` says so: from layer
    `max_window_layers` up, or where `layer_types` says so."""

    sliding_window: Size | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer. Raises ConfigError."""
        layers = self.num_hidden_layers
        if not self.use_sliding_window or self.sliding_window is None:
            return (None,) * layers
        if self.layer_types is not None:
            return windows_of_types(self.layer_types, self.sliding_window, layers)
        first = self.max_window_layers
        return tuple(self.sliding_window if i >= first else None for i in range(layers))


class Qwen3Keys(QwenKeys, frozen=True):
    """config.json of Qwen3."""

    attention_bias: bool = False


def read_qwen2(keys: QwenKeys) -> ModelSpec:
    """The products to queries, keys and values have biases."""
    return _model(keys, qkv_bias=True)


def read_qwen3(keys: Qwen3Keys) -> ModelSpec:
    """Queries and keys are normed."""
    bias = keys.attention_bias
    return _model(keys, qkv_bias=bias, o_bias=bias, qk_norm=HeadNorm(norm=keys.norm))


def _model(keys: QwenKeys, **attention: Any) -> ModelSpec:
    rope = keys.rope()
    return keys.model(
        Layer(
            mixer=keys.gqa(rope=rope, window=window, **attention),
            feed_forward=keys.mlp,
            pre_norm=keys.norm,
        )
        for window in keys.windows
    )


QWEN2 = Family(keys=QwenKeys, read=read_qwen2)
QWEN3 = Family(keys=Qwen3Keys, read=read_qwen3)
