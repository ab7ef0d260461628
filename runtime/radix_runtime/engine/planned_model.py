"""PlannedModel: a model as an engine would build it here, without its weights."""

from dataclasses import replace
from pathlib import Path

import torch

from ..attention.registry import create_attention_backend
from ..config import ServerArgs
from ..device import Device
from ..distributed import Communicator
from ..layers.base import BuildContext
from ..memory.kv_layout import kv_dtype_named, kv_layout
from ..model_config import ModelConfig
from ..models.loader import checkpoint_names
from ..models.size import ModelSize, model_size
from ..quantization.config import Target
from ..quantization.registry import quantization_of
from .facts import resolved_settings


class PlannedModel:
    """`config` by `args`, on the device that they choose. `folder`: its files, whose names decide
    which format a layer has; None where there are none. Raises ConfigError for what cannot work."""

    def __init__(self, config: ModelConfig, args: ServerArgs, folder: Path | None) -> None:
        settings = resolved_settings(args, config)
        self.config = config
        self.device = Device.resolve(args.device)
        self.dtype = str(settings["dtype"])
        self.attention_backend = str(settings["attention_backend"])
        dtype = getattr(torch, self.dtype)
        self._kv_dtype = kv_dtype_named(str(settings["kv_cache_dtype"]), dtype)
        self._target = Target(device=self.device.torch_device, dtype=dtype)
        self._context = BuildContext(
            communicator=Communicator(),
            backend=create_attention_backend(
                self.attention_backend, config, self.device, self._kv_dtype, args.page_size
            ),
            quantization=quantization_of(args.quantization, config.quantization, self._target),
            dtype=self._target.dtype,
            device=self._target.device,
            max_positions=config.max_context,
        )
        if folder is not None:
            names = checkpoint_names(config, folder, self._context)
            self._context = replace(self._context, checkpoint_names=names)

    def size(self, ranks: int = 1) -> ModelSize:
        """Of a rank. Raises ConfigError where the model cannot be split."""
        return model_size(self.config, self._context, ranks)

    def quantized_size(self, name: str) -> ModelSize:
        """The same with `--quantization name`. Raises ConfigError."""
        quantization = quantization_of(name, None, self._target)
        return model_size(self.config, replace(self._context, quantization=quantization))

    def token_bytes(self, ranks: int = 1) -> int:
        """What the KV cache of a rank takes for a token, in all layers."""
        layout = kv_layout(
            self.config.spec,
            kv_dtype=self._kv_dtype,
            dtype=self._target.dtype,
            page_size=1,
            ranks=ranks,
        )
        return layout.token_bytes
