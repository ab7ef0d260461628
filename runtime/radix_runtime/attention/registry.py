"""Attention backends by name; other packages add theirs through "radix.attention_backends"."""

import torch

from ..device import Device
from ..errors import ConfigError
from ..model_config import ModelConfig
from ..registry import Registry
from .base import AttentionBackend
from .radix import RadixAttention, TritonAttention
from .torch_native import TorchNativeAttention

# The first that supports the model is the default.
_OURS = {"radix": RadixAttention, "triton": TritonAttention, "torch_native": TorchNativeAttention}
attention_backends: Registry[type[AttentionBackend]] = Registry(
    kind="attention backend", group="radix.attention_backends", items=dict(_OURS)
)


def create_attention_backend(
    name: str | None, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int
) -> AttentionBackend:
    """The backend called `name`, or the best for None. Raises ConfigError: unknown, or not for this
    model."""
    candidates = [name] if name else [*_OURS]
    for candidate in candidates:
        backend = attention_backends.get(candidate)
        if backend.supports(config, device, kv_dtype, page_size):
            return backend(config, device)
    what = f"{config.architecture} with head_dim {config.head_dim}, {kv_dtype} KV and page size {page_size}"
    raise ConfigError(
        f"attention backend {' / '.join(candidates)} does not support {what} on {device.kind}"
    )
