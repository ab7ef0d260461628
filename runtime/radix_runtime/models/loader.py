"""Loading: builds a model on the meta device and fills it, tensor by tensor, from safetensors or a
GGUF file.

Strict both ways: a parameter that stays empty, a tensor that has no place and a place that is
filled twice are errors. A rank reads only its slices. A parameter is packed as soon as it is
complete, from the file itself where it lies there: no second copy of the weights ever exists."""

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from safetensors import SafetensorError
from torch import nn

from .. import ops
from ..checkpoint import checkpoint_files, open_checkpoint_file
from ..config import ServerArgs
from ..distributed import Communicator
from ..errors import ConfigError
from ..families.names import Drop, Rename, Rule, apply_rules
from ..families.tensor_views import TensorSource
from ..gguf import is_gguf, open_gguf
from ..layers.base import BuildContext, Layer
from ..layers.weight import WeightLayer, weight_bytes
from ..model_config import ModelConfig
from ..progress import with_progress
from ..quantization.gguf_tensors import gguf_tensors
from ..quantization.params import Part
from ..registry import Registry
from ..specs import ModelSpec
from .base import CausalLM
from .decoder import DecoderForCausalLM
from .loaded_parameter import LoadedParameter, Staging

logger = logging.getLogger(__name__)
T = TypeVar("T")

# By the names that safetensors has for them.
_DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
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
    model, layers, params, places = _build(config, args, ctx, checkpoint)
    if not quiet:
        _tell_of_widening(layers, ctx.dtype)
    special_ops = {op for layer in layers for op in layer.special_ops}
    ops.use_native(special_ops, str(ctx.dtype).removeprefix("torch."), quiet=quiet)
    start = time.monotonic()
    if checkpoint is None:
        seed = f"{args.random_seed or 0}/{ctx.communicator.rank}"
        _fill_random(_progress(params, len(params), ctx.communicator), seed)
    else:
        _fill(places, _progress(checkpoint.tensors(), len(places), ctx.communicator))
    _tell_end(model, start, quiet=quiet, device=ctx.device)
    for layer in layers:
        layer.complete()
    if not quiet:
        _warn_of_slow(layers)
    return model


_Places = dict[str, tuple[LoadedParameter, Part]]


class _Built(NamedTuple):
    """A model on the meta device. `params`: what is to be filled; `places`: where each tensor of
    its checkpoint belongs, by its name, {} without one."""

    model: CausalLM
    layers: list[Layer]
    params: list[LoadedParameter]
    places: _Places


def check_model(
    config: ModelConfig, args: ServerArgs, ctx: BuildContext, checkpoint: "Checkpoint | None"
) -> None:
    """What `load_model` checks before it reads a weight; `checkpoint` and `ctx` are those of
    `open_checkpoint`. Raises its ConfigError."""
    _build(config, args, ctx, checkpoint)


def _build(
    config: ModelConfig, args: ServerArgs, ctx: BuildContext, checkpoint: "Checkpoint | None"
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


def open_checkpoint(
    config: ModelConfig, path: Path, ctx: BuildContext
) -> tuple["Checkpoint", BuildContext]:
    """The checkpoint at `path`, and `ctx` for a model that it fills. Reads headers alone; raises
    ConfigError."""
    rules = (*_kv_scales(config.spec), *ctx.quantization.names(), *config.names)
    checkpoint = Checkpoint(path, rules, is_tied=config.spec.tied_head, dtype=ctx.dtype)
    names = frozenset(tensor.name for tensor in checkpoint.headers())
    known = checkpoint.module_names()
    return checkpoint, replace(ctx, checkpoint_names=known, tensor_names=names)


def _kv_scales(spec: ModelSpec) -> Sequence[Rule]:
    """Rules about the scales of an FP8 cache that a checkpoint was calibrated with, which writers
    put beside the attention or the products of keys and values. Latent values have scales of their
    own."""
    if spec.keeps_latents:
        return (Drop(r"\.[kv]_scale$"),)
    return (
        Rename(r"\.([kv])_proj\.(\1_scale|output_scale)$", r".\1_scale"),
        Rename(r"\.self_attn\.attn\.([kv]_scale)$", r".self_attn.\1"),
    )


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


class _Tensor(NamedTuple):
    """A tensor of a checkpoint. `file` and `key`: where it stands, with the shape `stored`;
    `name`: what the model's layers call it; `dtype`: of its elements, None where they are made of
    codes as they are read, and for a type that reading alone can judge."""

    file: Path
    key: str
    stored: list[int]
    name: str
    source: TensorSource
    dtype: torch.dtype | None

    def unusable(self, error: Exception) -> ConfigError:
        """The error of a tensor that does not fit the model."""
        notes = []
        if self.name != self.key:
            notes.append(f"here {self.name}")
        if self.source.get_shape() != self.stored:
            notes.append(f"{self.stored} in the file")
        note = f" ({', '.join(notes)})" if notes else ""
        return ConfigError(f"{self.file}: {self.key}{note} {error}")


class _Header:
    """What the header of a file tells of a tensor: its shape."""

    def __init__(self, shape: list[int]) -> None:
        self._shape = shape

    def get_shape(self) -> list[int]:
        """TensorSource.get_shape."""
        return self._shape

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError("a header holds no elements")


class Checkpoint:
    """The tensors of a checkpoint after name rules; codes of a GGUF file that no rule is about are
    widened to `dtype`. Raises ConfigError when a file cannot be read, or holds other tensors than
    the index says."""

    def __init__(
        self, folder: Path, rules: Sequence[Rule], *, is_tied: bool, dtype: torch.dtype
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._rules = rules
        self._is_tied = is_tied
        self._elsewhere: set[str] = set()
        self._headers = [
            tensor._replace(source=_Header(tensor.source.get_shape())) for tensor in self.tensors()
        ]

    def module_names(self) -> dict[str, str]:
        """The checkpoint's name of each module that has another in the model."""
        names = {}
        for tensor in self._headers:
            ours = tensor.name.rpartition(".")[0]
            theirs = tensor.key.rpartition(".")[0]
            if ours != theirs:
                names[ours] = theirs
        return names

    def leave_out(self, modules: set[str]) -> None:
        """The tensors of these modules are passed over from now on."""
        self._elsewhere = modules

    def headers(self) -> Iterator[_Tensor]:
        """All of them, without their elements."""
        return (tensor for tensor in self._headers if self._is_here(tensor.name))

    def tensors(self) -> Iterator[_Tensor]:
        """All of them, file by file; a source can be read until the next is taken."""
        if is_gguf(self._folder):
            for key, source in gguf_tensors(open_gguf(self._folder), self._dtype):
                yield from self._renamed(self._folder, key, source, None)
            return
        for path, expected in checkpoint_files(self._folder).items():
            with open_checkpoint_file(path, expected, framework="pt") as file:
                for key in file.keys():
                    piece = file.get_slice(key)
                    dtype = _DTYPES.get(piece.get_dtype())
                    yield from self._renamed(path, key, cast(Any, piece), dtype)

    def _renamed(
        self, path: Path, key: str, source: TensorSource, dtype: torch.dtype | None
    ) -> Iterator[_Tensor]:
        # Views bring elements into another order: their type stays.
        stored = source.get_shape()
        whole = _Tensor(file=path, key=key, stored=stored, name=key, source=source, dtype=dtype)
        found = apply_rules(
            self._rules, [(key, source)], fail=lambda _, error: whole.unusable(error)
        )
        for name, view in found:
            if self._is_here(name) and not _is_surplus(name, self._is_tied):
                yield whole._replace(name=name, source=view)

    def _is_here(self, name: str) -> bool:
        return name.rpartition(".")[0] not in self._elsewhere


def _check(
    places: _Places, tensors: Iterable[_Tensor], may_be_left_over: Callable[[str], bool]
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


def _fill(places: _Places, tensors: Iterable[_Tensor]) -> None:
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


def _is_surplus(name: str, is_tied: bool) -> bool:
    """What files carry beyond the model: RoPE frequencies, which follow from the config, and the
    head of a model whose head is its embedding."""
    return name.endswith(".rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")
