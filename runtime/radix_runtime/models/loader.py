"""Loading: builds a model on the meta device and fills it, tensor by tensor, from safetensors.

Strict both ways: a parameter that stays empty, a tensor that has no place and a place that is
filled twice are errors. A rank reads only its slices. A parameter is packed and its source freed at
once: no second copy ever exists."""

import logging
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from .. import ops
from ..config import ServerArgs
from ..errors import ConfigError
from ..layers.base import BuildContext, Layer, TensorSource
from ..model_config import ARCHITECTURES, ModelConfig
from ..registry import Registry
from .base import CausalLM
from .llama import LlamaForCausalLM

logger = logging.getLogger(__name__)
T = TypeVar("T")

_NEWS_SECONDS = 5.0  # between lines about the progress where there is no terminal
# By the architecture that config.json names; other packages add theirs.
models = Registry[type[CausalLM]](
    "architecture", "radix.models", dict.fromkeys(ARCHITECTURES, LlamaForCausalLM)
)


def load_model(config: ModelConfig, args: ServerArgs, ctx: BuildContext) -> CausalLM:
    """The model with this rank's weights from `args.model_path`, a directory, ready to run. Raises
    ConfigError."""
    quiet = ctx.communicator.rank > 0
    ops.use_native(quiet=quiet)
    model = models.get(config.architecture)(ctx, config)
    params = [
        _Parameter(cast(Layer, module), prefix, name, ctx.device)
        for prefix, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
    ]
    if args.load_format == "dummy":
        _fill_random(
            _progress(params, len(params), quiet),
            f"{args.random_seed or 0}/{ctx.communicator.rank}",
        )
    else:
        tensors = _tensors(Path(args.model_path or ""), config.tie_word_embeddings)
        _fill(params, _progress(tensors, sum(len(param.sources) for param in params), quiet))
    return model


# The items, with a bar on a terminal, elsewhere a line in the log every few seconds, and one at the
# end.
def _progress(items: Iterable[T], total: int, quiet: bool) -> Iterator[T]:
    bar = tqdm(
        items, "loading weights", total, disable=True if quiet else None
    )  # None: where stderr is no terminal
    level = logging.DEBUG if quiet else logging.INFO
    start = told = time.monotonic()
    for done, item in enumerate(bar):
        if bar.disable and time.monotonic() - told >= _NEWS_SECONDS:
            told = time.monotonic()
            logger.log(level, "loading weights: %d of %d tensors", done, total)
        yield item
    logger.log(level, "loading weights took %.1f s", time.monotonic() - start)


class _Parameter:
    """A parameter that wants loading. `sources`: its tensors' names in a checkpoint, and the part
    that each is."""

    def __init__(self, layer: Layer, prefix: str, name: str, device: torch.device) -> None:
        self.layer, self.name, self.path, self._device = layer, name, f"{prefix}.{name}", device
        beside = prefix.rpartition(".")[0]
        modules = {
            part: prefix if part is None else f"{beside}.{part}" for part in layer.parts(name)
        }
        self.sources = {f"{module}.{name}": part for part, module in modules.items()}

    def memory(self) -> torch.Tensor:
        param: torch.Tensor = getattr(self.layer, self.name)
        if param.is_meta:
            param = torch.empty(param.shape, dtype=param.dtype, device=self._device)
            setattr(self.layer, self.name, nn.Parameter(param, requires_grad=False))
        return param.data


def _fill(params: list[_Parameter], tensors: Iterator[tuple[str, TensorSource]]) -> None:
    places = {key: (param, part) for param in params for key, part in param.sources.items()}
    missing = set(places)
    for key, source in tensors:
        if key not in missing:
            wrong = "is there twice" if key in places else "has no place in this model"
            raise ConfigError(f"checkpoint: {key} {wrong}")
        param, part = places[key]
        try:
            param.layer.weight_loader(param.memory(), source, part)
            missing.remove(key)
            if missing.isdisjoint(param.sources):
                key = " + ".join(param.sources)
                param.layer.finalize(param.name)
        except (ValueError, SafetensorError) as error:
            raise ConfigError(f"checkpoint: {key} {error}") from None
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(f"checkpoint: no tensor for {', '.join(sorted(missing)[:3])}{more}")


# Norm weights 1, everything else normal with deviation 0.02; the same for a seed.
def _fill_random(params: Iterable[_Parameter], seed: str) -> None:
    for param in params:
        memory = param.memory()
        if memory.dim() == 1 and param.name == "weight":
            memory.fill_(1)
        else:
            generator = torch.Generator(memory.device).manual_seed(
                zlib.crc32(f"{seed}/{param.path}".encode())
            )
            memory.normal_(0, 0.02, generator=generator)
        param.layer.finalize(param.name)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


# The files of a checkpoint with the tensors that the index names in each (None: no index).
def _checkpoint_files(folder: Path) -> dict[Path, set[str] | None]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise ConfigError(
                f"{folder} holds no model.safetensors (other formats are not supported)"
            )
        return {single: None}
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{index} cannot be read: {error}") from None
    names: dict[Path, set[str]] = {}
    for key, file in weight_map.items():
        if Path(file).name != file:
            raise ConfigError(f"{index} names a file outside of its directory: {file}")
        names.setdefault(folder / file, set()).add(key)
    return dict(sorted(names.items()))


def _tensors(folder: Path, tied: bool) -> Iterator[tuple[str, TensorSource]]:
    for path, expected in _checkpoint_files(folder).items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                keys = file.keys()
                if expected is not None and (odd := expected.symmetric_difference(keys)):
                    raise ConfigError(f"{path}: the index and the file disagree about {min(odd)}")
                for key in keys:
                    # What files carry beyond the model: RoPE frequencies, which follow from the
                    # config, and the head of a model whose head is its embedding.
                    if not key.endswith(".rotary_emb.inv_freq") and not (
                        tied and key == "lm_head.weight"
                    ):
                        yield key, cast(Any, file.get_slice(key))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
