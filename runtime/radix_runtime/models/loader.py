"""Loading: builds a model on the meta device and fills it, tensor by tensor, from safetensors.

Strict both ways: a parameter that stays empty, a tensor that has no place and a place that is
filled twice are errors. A rank reads only its slices. As soon as all parts of a parameter are
there it is finalized (packed) and its source freed, so no second copy of the weights ever exists.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from .. import ops
from ..attention.base import AttentionBackend
from ..config import ServerArgs
from ..device import Device
from ..distributed import Communicator
from ..errors import ConfigError
from ..layers.base import BuildContext, Layer, Part, TensorSource
from ..model_config import ModelConfig
from ..quantization.registry import linear_methods
from .base import CausalLM
from .registry import models

_DUMMY_STD = 0.02


def load_model(
    config: ModelConfig,
    args: ServerArgs,
    *,
    communicator: Communicator,
    backend: AttentionBackend,
    device: Device,
    dtype: torch.dtype,
    max_positions: int | None = None,
) -> CausalLM:
    """The model of `config` with this rank's weights on `device`, ready to run.

    `args.model_path` is a local directory; with `load_format` dummy only its config was needed.
    `max_positions` (default: the model's context) bounds the RoPE table. Raises ConfigError.
    """
    ops.use_native()
    ctx = BuildContext(
        communicator=communicator,
        backend=backend,
        linear_method=linear_methods.get(args.quantization or "dense")(),
        dtype=dtype,
        device=device.torch_device,
        max_positions=max_positions or config.max_context,
    )
    model = models.get(config.architecture)(ctx, config)
    filler = _Filler(model, device.torch_device)
    if args.load_format == "dummy":
        filler.fill_random(args.random_seed, communicator.rank)
    else:
        files = _checkpoint_files(Path(args.model_path or ""))
        filler.fill(_tensors(files, config.tie_word_embeddings), quiet=communicator.rank != 0)
    return model


class _Filler:
    """Knows every parameter that wants loading and which of its parts have come."""

    def __init__(self, model: CausalLM, device: torch.device) -> None:
        self._stacked = model.stacked
        self._device = device
        self._owners: dict[str, tuple[Layer, str]] = {}
        self._missing: dict[str, set[Part]] = {}
        for prefix, module in model.named_modules():
            for name, _ in module.named_parameters(recurse=False):
                layer = cast(Layer, module)
                self._owners[f"{prefix}.{name}"] = (layer, name)
                self._missing[f"{prefix}.{name}"] = set(layer.parts(name))

    def fill(self, tensors: Iterator[tuple[str, TensorSource]], *, quiet: bool) -> None:
        total = sum(len(parts) for parts in self._missing.values())
        hide = True if quiet else None  # None: where stderr is no terminal
        for key, source in tqdm(tensors, "loading weights", total, disable=hide):
            name, part = self._place(key)
            if part not in self._missing[name]:
                raise ConfigError(f"checkpoint: {key} is there twice")
            layer, attribute = self._owners[name]
            param = self._materialize(layer, attribute)
            try:
                layer.weight_loader(param, source, part)
            except (ValueError, SafetensorError) as error:
                raise ConfigError(f"checkpoint: {key} {error}") from None
            self._missing[name].remove(part)
            if not self._missing[name]:
                layer.finalize(attribute)
        names = [f"{n} ({p})" if p else n for n, ps in self._missing.items() for p in ps]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ConfigError(f"checkpoint: no tensor for {', '.join(sorted(names)[:3])}{more}")

    def fill_random(self, seed: int, rank: int) -> None:
        """Norm weights 1, everything else normal with deviation 0.02; the same for a seed."""
        for name, (layer, attribute) in self._owners.items():
            param = self._materialize(layer, attribute)
            if param.dim() == 1 and attribute == "weight":
                param.fill_(1)
            else:
                generator = torch.Generator(self._device)
                generator.manual_seed(zlib.crc32(f"{seed}/{rank}/{name}".encode()))
                param.normal_(0, _DUMMY_STD, generator=generator)
            layer.finalize(attribute)

    def _place(self, key: str) -> tuple[str, Part]:
        """The parameter and part that a tensor of the checkpoint belongs to."""
        prefix, _, attribute = key.rpartition(".")
        path, dot, module = prefix.rpartition(".")
        merged, part = self._stacked.get(module, (module, None))
        name = f"{path}{dot}{merged}.{attribute}"
        layer, attribute = self._owners.get(name, (None, ""))
        if layer is None or part not in layer.parts(attribute):
            raise ConfigError(f"checkpoint: {key} has no place in this model")
        return name, part

    def _materialize(self, layer: Layer, attribute: str) -> torch.Tensor:
        param: torch.Tensor = getattr(layer, attribute)
        if param.is_meta:
            param = torch.empty(param.shape, dtype=param.dtype, device=self._device)
            setattr(layer, attribute, nn.Parameter(param, requires_grad=False))
        return param.data


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _checkpoint_files(folder: Path) -> dict[Path, set[str] | None]:
    """The files of a checkpoint with the tensors that the index names in each (None: no index)."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        try:
            weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{index} cannot be read: {error}") from None
        names: defaultdict[Path, set[str]] = defaultdict(set)
        for key, file in weight_map.items():
            if Path(file).name != file:
                raise ConfigError(f"{index} names a file outside of its directory: {file}")
            names[folder / file].add(key)
        return dict(sorted(names.items()))
    if single.is_file():
        return {single: None}
    raise ConfigError(f"{folder} holds no model.safetensors (other formats are not supported)")


def _tensors(files: dict[Path, set[str] | None], tied: bool) -> Iterator[tuple[str, TensorSource]]:
    for path, expected in files.items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                keys = file.keys()
                if expected is not None and set(keys) != expected:
                    odd = sorted(set(keys) ^ expected)[0]
                    raise ConfigError(f"{path}: the index and the file disagree about {odd}")
                for key in keys:
                    if not _harmless(key, tied):
                        yield key, cast(Any, file.get_slice(key))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None


def _harmless(key: str, tied: bool) -> bool:
    """Tensors that files carry beyond the model: RoPE frequencies, which follow from the config,
    and the head of a model whose head is its embedding."""
    return key.endswith(".rotary_emb.inv_freq") or (tied and key == "lm_head.weight")
