"""PlannedModel: a model as an engine would build it here, without its weights."""

from dataclasses import replace
from pathlib import Path

import torch

from .. import ops
from ..attention.registry import create_attention_backend
from ..config import ServerArgs
from ..device import Device
from ..distributed import Communicator
from ..layers.base import BuildContext
from ..memory.kv_layout import kv_dtype_named, kv_layout
from ..model_config import ModelConfig
from ..models.checkpoint_tensors import Checkpoint, open_checkpoint
from ..models.loader import check_model
from ..models.size import ModelSize, PlannedRank, model_size
from ..quantization.config import Target
from ..quantization.registry import quantization_of
from .device_defaults import with_device_defaults
from .facts import resolved_settings
from .graph_sizes import check_graph_flags


class PlannedModel:
    """`config` by `args`, on the device that they choose. `folder`: its files, whose names decide
    which format a layer has; None where there are none. Raises ConfigError for what cannot work.

    `settings`: those that are decided at start."""

    def __init__(self, config: ModelConfig, args: ServerArgs, folder: Path | None) -> None:
        self.settings = resolved_settings(args, config)
        self.config = config
        self._args = with_device_defaults(args)
        self.device = Device.resolve(args.device)
        self.dtype = str(self.settings["dtype"])
        self.attention_backend = str(self.settings["attention_backend"])
        dtype = getattr(torch, self.dtype)
        self._kv_dtype = kv_dtype_named(str(self.settings["kv_cache_dtype"]), dtype)
        self._target = Target(
            device=self.device.torch_device, dtype=dtype, fp8_fast_accum=args.fp8_fast_accum
        )
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
        self._checkpoint: Checkpoint | None = None
        if folder is not None:
            self._checkpoint, self._context = open_checkpoint(config, folder, self._context)

    def check(self) -> None:
        """Raises the ConfigError that a start would raise, as far as settings and the headers of
        the files show it."""
        ops.check_device(self.device.kind)
        if not self.device.is_cpu:
            check_graph_flags(self._args, with_chunks=not self.config.spec.keeps_latents)
        for rank in range(self._args.tp_size):
            communicator = PlannedRank(rank, self._args.tp_size)
            # Nothing is computed: no table of positions has to reach far.
            context = replace(self._context, communicator=communicator, max_positions=1)
            check_model(self.config, self._args, context, self._checkpoint)
            if self._checkpoint is None or self._checkpoint.is_whole:
                break  # the other ranks look at the same tensors

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
