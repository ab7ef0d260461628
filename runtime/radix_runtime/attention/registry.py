"""Attention backends by name; other packages add theirs through "radix.attention_backends"."""

import torch

from ..config import FORMER_BACKENDS
from ..device import Device
from ..errors import ConfigError
from ..model_config import ModelConfig
from ..registry import Registry
from .base import AttentionBackend
from .paged import PagedAttention
from .torch_native import TorchNativeAttention
from .triton import TritonAttention

# The first that supports the model is the default.
_OURS: dict[str, type[AttentionBackend]] = {
    "paged": PagedAttention,
    "triton": TritonAttention,
    "torch_native": TorchNativeAttention,
}
attention_backends: Registry[type[AttentionBackend]] = Registry(
    kind="attention backend", group="radix.attention_backends", items=_OURS
)


def create_attention_backend(
    name: str | None, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int
) -> AttentionBackend:
    """The backend called `name`, or the best for None. Raises ConfigError when there is none of
    that name, or none that supports the model."""
    chosen = choose_attention_backend(name, config, device, kv_dtype, page_size)
    return attention_backends.get(chosen)(config, device)


def choose_attention_backend(
    name: str | None, config: ModelConfig, device: Device, kv_dtype: torch.dtype, page_size: int
) -> str:
    """The name of what `create_attention_backend` gives. Raises ConfigError as it does."""
    candidates = [FORMER_BACKENDS.get(name, name)] if name else [*_OURS]
    for candidate in candidates:
        backend = attention_backends.get(candidate)
        serves_latents = backend.supports_latents or not config.spec.keeps_latents
        if serves_latents and backend.supports(config, device, kv_dtype, page_size):
            return candidate
    names = " / ".join(candidates)
    cache = f"{kv_dtype} KV and page size {page_size}"
    raise ConfigError(
        f"attention backend {names} does not support {config.architecture} with {cache} on "
        f"{device.kind}"
    )
