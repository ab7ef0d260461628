"""Values of a config.json that no model has, told before anything is made of them."""

import math
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError

# What a file may say at most. A thousand times what models have; work and memory of reading a
# configuration grow with it, before the checkpoint shows that it is not so.
_LARGEST = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 20,
    "num_key_value_heads": 1 << 20,
    "num_experts": 1 << 20,
    "num_local_experts": 1 << 20,
    "n_routed_experts": 1 << 20,
    "hidden_size": 1 << 24,
    "intermediate_size": 1 << 28,
    "head_dim": 1 << 20,
    "vocab_size": 1 << 28,
    "max_position_embeddings": 1 << 40,
}


def check_values(keys: Mapping[str, Any]) -> None:
    """Raises ConfigError, naming the key, on a number that is not finite, a size beyond all
    reason, or a list of layers' types that is shorter than there are layers."""
    for key, most in _LARGEST.items():
        value = keys.get(key)
        if isinstance(value, int | float) and value > most:
            raise ConfigError(f"config.json: {key} is {_short(value)}, at most {most} can be")
    _check_finite(keys)
    types = keys.get("layer_types")
    layers = keys.get("num_hidden_layers")
    if isinstance(types, list) and isinstance(layers, int) and len(types) < layers:
        raise ConfigError(f"config.json: layer_types must be {layers} of them, got {len(types)}")


def _check_finite(keys: Mapping[str, Any]) -> None:
    open_parts: list[tuple[str, Any]] = [("", keys)]
    while open_parts:
        path, part = open_parts.pop()
        if isinstance(part, float) and not math.isfinite(part):
            raise ConfigError(f"config.json: {path} is {part}: not a finite number")
        if isinstance(part, Mapping):
            open_parts += [(f"{path}.{key}".removeprefix("."), part[key]) for key in part]
        elif isinstance(part, list):
            open_parts += [(f"{path}[{i}]", value) for i, value in enumerate(part)]


def _short(value: float) -> str:
    text = str(value)
    return text if len(text) <= 20 else f"a number of {len(text)} digits"
