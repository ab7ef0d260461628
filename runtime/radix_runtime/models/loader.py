"""Loading: builds a model on the meta device and fills it, tensor by tensor, from safetensors.

Strict both ways: a parameter that stays empty, a tensor that has no place and a place that is
filled twice are errors. A rank reads only its slices. A parameter is packed, and its source freed,
as soon as it is complete: no second copy of the weights ever exists."""

import logging
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from torch import nn

from .. import ops
from ..checkpoint import checkpoint_files, open_checkpoint_file
from ..config import ServerArgs
from ..errors import ConfigError
from ..families.names import apply_rules
from ..families.tensor_views import TensorSource
from ..layers.base import BuildContext, Layer, Part
from ..model_config import ModelConfig
from ..progress import with_progress
from ..registry import Registry
from .base import CausalLM
from .decoder import DecoderForCausalLM

logger = logging.getLogger(__name__)
T = TypeVar("T")

_NEWS_SECONDS = 5.0  # between lines about the progress where there is no terminal
# Model classes of other packages, by the architecture that config.json names. All others are built
# by DecoderForCausalLM from their specs.
models: Registry[type[CausalLM]] = Registry(kind="architecture", group="radix.models", items={})


def load_model(config: ModelConfig, args: ServerArgs, ctx: BuildContext) -> CausalLM:
    """The model with this rank's weights from `args.model_path`, a directory, ready to run. Raises
    ConfigError."""
    quiet = ctx.communicator.rank > 0
    if config.unknown_keys and not quiet:
        keys = ", ".join(config.unknown_keys)
        logger.warning("config.json: keys that %s does not know: %s", config.architecture, keys)
    model = model_class(config.architecture)(ctx, config)
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    slow = sorted({layer.slow for layer in layers if layer.slow is not None})
    if slow and not quiet:
        logger.warning("no kernel takes these together: %s", "; ".join(slow))
    special_ops = {op for layer in layers for op in layer.special_ops}
    ops.use_native(special_ops, quiet=quiet)
    params = [
        _Parameter(cast(Layer, module), prefix=prefix, name=name, device=ctx.device)
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    ]
    if args.load_format == "dummy":
        seed = f"{args.random_seed or 0}/{ctx.communicator.rank}"
        _fill_random(_progress(params, len(params), quiet=quiet), seed)
    else:
        files = _tensors(Path(args.model_path or ""), is_tied=config.spec.tied_head)
        elsewhere = {
            f"{prefix}.{name}"
            for prefix, module in model.named_modules()
            if isinstance(module, Layer)
            for name in module.elsewhere()
        }
        named = apply_rules(config.names, files, fail=_unusable)
        tensors = (each for each in named if each[0] not in elsewhere)
        count = sum(len(param.sources) for param in params)
        _fill(params, _progress(tensors, count, quiet=quiet))
    return model


def model_class(architecture: str) -> type[CausalLM]:
    """The class of a model that ModelConfig knows."""
    if architecture in models.names():
        return models.get(architecture)
    return DecoderForCausalLM


def _unusable(key: str, error: Exception) -> ConfigError:
    return ConfigError(f"checkpoint: {key} {error}")


def _progress(items: Iterable[T], total: int, *, quiet: bool) -> Iterator[T]:
    """The items, with a bar on a terminal; elsewhere a line in the log every few seconds. A last
    line says how long it took. `quiet`: no bar, and lines of level debug."""
    bar = with_progress(items, "loading weights", total, hidden=quiet)
    level = logging.DEBUG if quiet else logging.INFO
    start = time.monotonic()
    last_line = start
    for done, item in enumerate(bar):
        if bar.disable and time.monotonic() - last_line >= _NEWS_SECONDS:
            last_line = time.monotonic()
            logger.log(level, "loading weights: %d of %d tensors", done, total)
        yield item
    logger.log(level, "loading weights took %.1f s", time.monotonic() - start)


class _Parameter:
    """A parameter that is to be loaded. `sources`: the names of its tensors in a checkpoint, and
    the part that each of them is."""

    def __init__(self, layer: Layer, *, prefix: str, name: str, device: torch.device) -> None:
        self.layer = layer
        self.name = name
        self.path = f"{prefix}.{name}"
        self._device = device
        parent = prefix.rpartition(".")[0]
        self.sources: dict[str, Part] = {}
        for part in layer.parts(name):
            module = prefix if part is None else f"{parent}.{part}"
            self.sources[f"{module}.{name}"] = part

    def memory(self) -> torch.Tensor:
        """The parameter's memory on its device, allocated when it is first asked for."""
        param: torch.Tensor = getattr(self.layer, self.name)
        if param.is_meta:
            param = self.layer.allocate(self.name, self._device)
            setattr(self.layer, self.name, nn.Parameter(param, requires_grad=False))
        return param.data


def _fill(params: list[_Parameter], tensors: Iterator[tuple[str, TensorSource]]) -> None:
    places = {key: (param, part) for param in params for key, part in param.sources.items()}
    missing = set(places)
    for key, source in tensors:
        if key not in places:
            raise ConfigError(f"checkpoint: {key} has no place in this model")
        if key not in missing:
            raise ConfigError(f"checkpoint: {key} is there twice")
        missing.remove(key)
        param, part = places[key]
        try:
            param.layer.weight_loader(param.memory(), source, part)
        except (ValueError, SafetensorError) as error:
            raise _unusable(key, error) from None
        if missing.isdisjoint(param.sources):
            _finalize(param)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(f"checkpoint: no tensor for {', '.join(sorted(missing)[:3])}{more}")


def _finalize(param: _Parameter) -> None:
    try:
        param.layer.finalize(param.name)
    except ValueError as error:
        raise _unusable(" + ".join(param.sources), error) from None


def _fill_random(params: Iterable[_Parameter], seed: str) -> None:
    """Norm weights are 1, everything else is normal with deviation 0.02; the same for one seed."""
    for param in params:
        memory = param.memory()
        if memory.dim() == 1 and param.name == "weight":
            memory.fill_(1)
        else:
            checksum = zlib.crc32(f"{seed}/{param.path}".encode())
            generator = torch.Generator(memory.device).manual_seed(checksum)
            memory.normal_(0, 0.02, generator=generator)
        _finalize(param)


def _tensors(folder: Path, *, is_tied: bool) -> Iterator[tuple[str, TensorSource]]:
    """The tensors of a checkpoint that belong in a model, by name. Raises ConfigError when a file
    cannot be read or holds other tensors than the index says."""
    for path, expected in checkpoint_files(folder).items():
        with open_checkpoint_file(path, expected, framework="pt") as file:
            for key in file.keys():
                if not _is_surplus(key, is_tied):
                    yield key, cast(Any, file.get_slice(key))


def _is_surplus(key: str, is_tied: bool) -> bool:
    """What files carry beyond the model: RoPE frequencies, which follow from the config, and the
    head of a model whose head is its embedding."""
    return key.endswith(".rotary_emb.inv_freq") or (is_tied and key == "lm_head.weight")
