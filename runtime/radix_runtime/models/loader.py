"""Loading: builds a model on the meta device and fills it, tensor by tensor, from safetensors or a
GGUF file.

Strict both ways: a parameter that stays empty, a tensor that has no place and a place that is
filled twice are errors. A rank reads only its slices. A parameter is packed as soon as it is
complete, from the file itself where it lies there: no second copy of the weights ever exists."""

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import torch
from safetensors import SafetensorError
from torch import nn

from .. import ops
from ..config import ServerArgs
from ..distributed import Communicator
from ..errors import ConfigError
from ..layers.base import BuildContext, Layer
from ..layers.weight import WeightLayer, weight_bytes
from ..model_config import ModelConfig
from ..progress import with_progress
from ..quantization.params import Part
from ..registry import Registry
from .base import CausalLM
from .checkpoint_tensors import Checkpoint, CheckpointTensor, open_checkpoint
from .decoder import DecoderForCausalLM
from .loaded_parameter import LoadedParameter, Staging

logger = logging.getLogger(__name__)
T = TypeVar("T")

_NEWS_SECONDS = 5.0  # between lines about the progress where there is no terminal
# Model classes of other packages, by the architecture that config.json names. All others are built
# by DecoderForCausalLM from their specs.
models: Registry[type[CausalLM]] = Registry(kind="architecture", group="radix.models", items={})


def load_model(config: ModelConfig, args: ServerArgs, ctx: BuildContext) -> CausalLM:
    """The model with this rank's weights from `args.model_path`, a directory or a GGUF file, ready
    to run. What the headers of its files tell is checked before a weight is read. Raises
    ConfigError."""
    quiet = ctx.communicator.rank > 0
    if config.unknown_keys and not quiet:
        keys = ", ".join(config.unknown_keys)
        logger.warning("config.json: keys that %s does not know: %s", config.architecture, keys)
    checkpoint: Checkpoint | None = None
    if args.load_format != "dummy":
        checkpoint, ctx = open_checkpoint(config, Path(args.model_path or ""), ctx)
    built = _build(config, args, ctx, checkpoint)
    if not quiet:
        _tell_of_widening(built.layers, ctx.dtype)
    special_ops = {op for layer in built.layers for op in layer.special_ops}
    ops.use_native(special_ops, str(ctx.dtype).removeprefix("torch."), quiet=quiet)
    start = time.monotonic()
    if checkpoint is None:
        seed = f"{args.random_seed or 0}/{ctx.communicator.rank}"
        _fill_random(_progress(built.params, len(built.params), ctx.communicator), seed)
    else:
        tensors = _progress(checkpoint.tensors(), len(built.places), ctx.communicator)
        _fill(built.places, tensors)
    _tell_end(built.model, start, quiet=quiet, device=ctx.device)
    for layer in built.layers:
        layer.complete()
    if not quiet:
        _warn_of_slow(built.layers)
    return built.model


_Places = dict[str, tuple[LoadedParameter, Part]]


class _Built(NamedTuple):
    """A model on the meta device. `params`: what is to be filled; `places`: where each tensor of
    its checkpoint belongs, by its name, {} without one."""

    model: CausalLM
    layers: list[Layer]
    params: list[LoadedParameter]
    places: _Places


def check_model(
    config: ModelConfig, args: ServerArgs, ctx: BuildContext, checkpoint: Checkpoint | None
) -> None:
    """What `load_model` checks before it reads a weight; `checkpoint` and `ctx` are those of
    `open_checkpoint`. Raises its ConfigError."""
    _build(config, args, ctx, checkpoint)


def _build(
    config: ModelConfig, args: ServerArgs, ctx: BuildContext, checkpoint: Checkpoint | None
) -> _Built:
    model = model_class(config.architecture)(ctx, config)
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    if args.fp8_fast_accum:
        _require_fast_accum(layers)
    staging = Staging()
    params = [
        LoadedParameter(
            cast(Layer, module), prefix=prefix, name=name, device=ctx.device, staging=staging
        )
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    ]
    places: _Places = {}
    if checkpoint is not None:
        places = {key: (param, part) for param in params for key, part in param.sources.items()}
        checkpoint.leave_out(_elsewhere(model))
        _check(places, checkpoint.headers(), ctx.quantization.may_be_left_over)
    return _Built(model=model, layers=layers, params=params, places=places)


def _require_fast_accum(layers: Iterable[Layer]) -> None:
    if not any(isinstance(layer, WeightLayer) and layer.method.fast_accum for layer in layers):
        raise ConfigError(
            "--fp8-fast-accum: no product of this model is FP8 with a scale for each output or for "
            "the whole tensor, on a GPU; leave the flag out"
        )
    isa = ops.capabilities()["isa"]
    if isa != "sm_90":
        raise ConfigError(
            f"--fp8-fast-accum changes nothing on {isa}: only Hopper's products (sm_90) have sums "
            "of either kind; leave the flag out"
        )


def _warn_of_slow(layers: Iterable[Layer]) -> None:
    slow = sorted({layer.slow for layer in layers if layer.slow is not None})
    if slow:
        logger.warning("no kernel takes these together: %s", "; ".join(slow))


def _tell_of_widening(layers: Iterable[Layer], dtype: torch.dtype) -> None:
    """One line where weights are widened as they load, with the memory that this takes."""
    widened = [layer for layer in layers if isinstance(layer, WeightLayer) and layer.method.widens]
    if not widened:
        return
    before = sum(param.nbytes for layer in widened for param in layer.parameters())
    elements = sum(layer.shape.in_features * layer.shape.out_features for layer in widened)
    logger.info(
        "%s weights are widened to %s as they load, for want of a kernel: %.3g GB become %.3g GB",
        " and ".join(sorted({str(layer.method.widens) for layer in widened})),
        str(dtype).removeprefix("torch."),
        before / 1e9,
        elements * dtype.itemsize / 1e9,
    )


def _elsewhere(model: CausalLM) -> set[str]:
    """The modules of the checkpoint that other ranks hold alone."""
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, Layer)
        for name in module.elsewhere()
    }


def model_class(architecture: str) -> type[CausalLM]:
    """The class of a model that ModelConfig knows."""
    if architecture in models.names():
        return models.get(architecture)
    return DecoderForCausalLM


def _progress(items: Iterable[T], total: int, communicator: Communicator) -> Iterator[T]:
    """The items, with a bar on a terminal; elsewhere a line in the log every few seconds. On ranks
    other than 0 no bar, and lines of level debug. Raises CommunicatorAborted when another rank has
    failed: loading may take minutes more."""
    quiet = communicator.rank > 0
    bar = with_progress(items, "loading weights", total, hidden=quiet)
    level = logging.DEBUG if quiet else logging.INFO
    last_line = time.monotonic()
    for done, item in enumerate(bar):
        communicator.check()
        if bar.disable and time.monotonic() - last_line >= _NEWS_SECONDS:
            last_line = time.monotonic()
            logger.log(level, "loading weights: %d of %d tensors", done, total)
        yield item


def _tell_end(model: nn.Module, start: float, *, quiet: bool, device: torch.device) -> None:
    """How long it took until `device` had all weights, and how many bytes a second that are."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    seconds = time.monotonic() - start
    size = weight_bytes(model) / 1e9
    logger.log(
        logging.DEBUG if quiet else logging.INFO,
        "loading weights took %.1f s: %.3g GB, %.3g GB/s",
        seconds,
        size,
        size / max(seconds, 1e-6),
    )


def _check(
    places: _Places, tensors: Iterable[CheckpointTensor], may_be_left_over: Callable[[str], bool]
) -> None:
    """Raises ConfigError unless there is one tensor for each place, of the right shape and type,
    and no other that may not be left over."""
    missing = set(places)
    for tensor in tensors:
        if tensor.name not in places:
            if may_be_left_over(tensor.name):
                continue
            raise tensor.unusable(ValueError("has no place in this model"))
        if tensor.name not in missing:
            raise tensor.unusable(ValueError("is there twice"))
        missing.remove(tensor.name)
        param, part = places[tensor.name]
        try:
            param.layer.check_source(param.name, tensor.source, part)
            if tensor.dtype is not None:
                param.layer.check_dtype(param.name, tensor.dtype)
        except ValueError as error:
            raise tensor.unusable(error) from None
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(f"checkpoint: no tensor for {', '.join(sorted(missing)[:3])}{more}")


def _fill(places: _Places, tensors: Iterable[CheckpointTensor]) -> None:
    missing = set(places)
    for tensor in tensors:
        if tensor.name not in places:  # left over
            if bool(tensor.source[:].any()):
                raise tensor.unusable(ValueError("has no place in this model, and is not 0"))
            continue
        missing.remove(tensor.name)
        param, part = places[tensor.name]
        try:
            param.load(tensor.source, part)
        except (ValueError, SafetensorError) as error:
            raise tensor.unusable(error) from None
        if missing.isdisjoint(param.sources):
            try:
                param.finalize()
            except ValueError as error:
                parts = " + ".join(param.sources)
                raise ConfigError(f"{tensor.file}: {parts} {error}") from None


def _fill_random(params: Iterable[LoadedParameter], seed: str) -> None:
    """The same for one seed; what suits each parameter its layer knows."""
    for param in params:
        memory = param.memory()
        checksum = zlib.crc32(f"{seed}/{param.path}".encode())
        generator = torch.Generator(memory.device).manual_seed(checksum)
        param.layer.fill_random(param.name, memory, generator)
        param.finalize()
