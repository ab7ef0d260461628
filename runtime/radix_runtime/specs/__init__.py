"""Specs: a model described in small records, whatever its checkpoint calls things. Loads no torch.

A family (families/) reads config.json into a `ModelSpec`; models/decoder.py builds the model from
it. A layer is a mixer and a feed-forward; the type and the values of their records pick the blocks
that it is built of, never the name of a family."""

from .attention import AllHeadsNorm, Gqa, HeadNorm, Mla, PositionScale, QkNorm, Rope
from .feed_forward import (
    Activation,
    ClampedSwiGlu,
    GroupedRouter,
    GroupedSoftmaxRouter,
    Mlp,
    Moe,
    Router,
    SharedExpert,
    SigmoidRouter,
    SoftmaxRouter,
)
from .model import FeedForward, Layer, Mixer, ModelSpec
from .norm import LayerNorm, Norm, RmsNorm

__all__ = [
    "Activation",
    "AllHeadsNorm",
    "ClampedSwiGlu",
    "FeedForward",
    "Gqa",
    "GroupedRouter",
    "GroupedSoftmaxRouter",
    "HeadNorm",
    "Layer",
    "LayerNorm",
    "Mixer",
    "Mla",
    "Mlp",
    "ModelSpec",
    "Moe",
    "Norm",
    "PositionScale",
    "QkNorm",
    "RmsNorm",
    "Rope",
    "Router",
    "SharedExpert",
    "SigmoidRouter",
    "SoftmaxRouter",
]
