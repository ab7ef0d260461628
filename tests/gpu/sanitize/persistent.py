"""Decode steps of a model in one kernel: dense layers and mixtures, in bfloat16 and in FP8."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.gpu.sanitize.compare import compare
from tests.kernel.persistent_model import Model, Sizes, as_ops_round, expected, make_step

_DENSE = Sizes(layers=1, width=1088, pages=64)
_EXPERTS = Sizes(hidden=1280, width=384, experts=24, top_k=3, layers=1, pages=64)
_SCALED = Sizes(hidden=2048, heads=16, width=512, layers=1, pages=64, scaled=True)


def persistent() -> None:
    """One row and several, a tile of tokens and what is split over blocks; a last chunk of weights
    that is not full, a layer behind another."""
    torch.manual_seed(0)
    for name, sizes, lens in (
        ("dense", _DENSE, [1]),
        ("dense", _DENSE, [33, 300]),
        ("two dense layers", replace(_DENSE, layers=2, page_first=True), [300, 5, 17]),
        ("in FP8", replace(_SCALED, heads=24, hidden=2304, width=2688), [17, 300]),
        ("a mixture", _EXPERTS, [300]),
        ("a mixture", replace(_EXPERTS, renormalize=True, layers=2), [17, 5]),
        ("a mixture in FP8", replace(_SCALED, experts=16, top_k=4), [33]),
    ):
        model = Model(sizes)
        step = make_step(model, lens)
        wanted, _ = expected(model, step, as_ops_round)
        compare(f"persistent decoder, {name}, rows of {lens}", step.run(model), wanted.cpu(), 2e-2)
