"""What the weights of a model take in memory, told without loading them."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..distributed import Communicator
from ..layers.base import BuildContext
from ..layers.base import Layer as LayerModule
from ..layers.weight import WeightLayer
from ..model_config import ModelConfig
from ..quantization.dense import DenseMethod
from ..specs import Layer
from .loader import model_class

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class ModelSize(NamedTuple):
    """Of the first rank, which has as much as any other. `bytes`: of weights and RoPE tables as
    they are held. `parameters`: of products, embeddings, norms and biases. `special_ops`: the ops
    that this model uses and most do not. `weight_kinds`: those of `ops.pack_weight` that its
    packed weights are of, beside the compute type."""

    bytes: int
    parameters: int
    special_ops: tuple[str, ...]
    weight_kinds: tuple[str, ...]


class PlannedRank(Communicator):
    """A rank of a group that is only spoken of."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size


def model_size(config: ModelConfig, ctx: BuildContext, ranks: int = 1) -> ModelSize:
    """The size of a model that `ctx` would build on each of `ranks`. Raises ConfigError where it
    cannot be split or held."""
    config.check_tp(ranks)
    layers, copies = _distinct(config)
    built = replace(ctx, communicator=PlannedRank(0, ranks), max_positions=1)
    spec = replace(config.spec, layers=tuple(layers))
    model = model_class(config.architecture)(built, replace(config, spec=spec))
    size = _table_bytes(config.spec.layers, ctx.max_positions)
    parameters = 0
    special_ops: set[str] = set()
    kinds: set[str] = set()
    for name, module in model.named_modules():
        if not isinstance(module, LayerModule):
            continue
        place = _LAYER.search(f".{name}.")
        times = copies[int(place[1])] if place else 1
        size += times * module.held_bytes()
        special_ops.update(module.special_ops)
        parameters += times * sum(param.numel() for param in module.parameters(recurse=False))
        if isinstance(module, WeightLayer):
            shape = module.shape
            if isinstance(module.method, DenseMethod):
                kinds.add(module.method.kind or "dense")
            stored = sum(module.get_parameter(each).numel() for each in module.stored)
            parameters += times * (shape.out_features * shape.in_features - stored)
    return ModelSize(
        bytes=size,
        parameters=parameters,
        special_ops=tuple(sorted(special_ops)),
        weight_kinds=tuple(sorted(kinds - {"dense"})),
    )


def _distinct(config: ModelConfig) -> tuple[list[Layer], list[int]]:
    """The layers to build, and how many each stands for: equal ones once, but where the format of a
    checkpoint goes by their names."""
    if config.quantization is not None:
        return list(config.spec.layers), [1] * config.num_layers
    distinct: list[Layer] = []
    copies: list[int] = []
    for layer in config.spec.layers:
        if layer not in distinct:
            distinct.append(layer)
            copies.append(0)
        copies[distinct.index(layer)] += 1
    return distinct, copies


def _table_bytes(layers: Sequence[Layer], max_positions: int) -> int:
    """Of the cosines and sines of every RoPE, float32."""
    ropes = []
    for layer in layers:
        rope = layer.mixer.rope
        if rope is not None and rope not in ropes:
            ropes.append(rope)
    return sum(rope.rotary_dim * max_positions * 4 for rope in ropes)
