"""Mixtures of experts in a decode step of one kernel, against float64: which experts a token passes
and what they weigh, with all weights NaN that no token should read. With `--device cuda`, on
Hopper; elsewhere the class refuses (test_persistent_decoder.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import radix_kernels as rk
from tests.kernel.persistent_model import (
    DEVICE,
    Model,
    Sizes,
    Step,
    as_ops_round,
    error,
    exact,
    expected,
    make_step,
    poison,
    steer,
)

pytestmark = pytest.mark.usefixtures("on_hopper")

QWEN = Sizes(hidden=2048, heads=32, kv_heads=4, width=768, experts=128, top_k=8, renormalize=True)
FEW = Sizes(width=576, experts=8, top_k=2)
TWO_THOUSAND = {"hidden": 2048, "heads": 16}
CASES = {
    "one token": (QWEN, [1]),
    "640 tokens": (QWEN, [640]),
    "2049 tokens": (QWEN, [2049]),
    "weights of all experts": (replace(QWEN, renormalize=False), [640]),
    "rows": (QWEN, [640, 1, 33, 2049]),
    "one expert of 1024": (replace(FEW, width=1024, top_k=1), [640]),
    "one expert, normalized": (replace(FEW, width=1024, top_k=1, renormalize=True), [17, 1]),
    "a short last chunk": (FEW, [1]),
    "a short last chunk, rows": (FEW, [640, 2049, 5]),
    "all experts": (replace(FEW, width=128, top_k=8, renormalize=True), [640]),
    "experts of 128": (replace(FEW, width=128, experts=128, top_k=8), [640]),
    "experts of 192 of 256": (replace(FEW, width=192, experts=256, top_k=8), [2049, 16]),
    "hidden 1280": (replace(FEW, hidden=1280, experts=24, width=384, top_k=3), [100, 7, 640]),
    "FP8": (replace(QWEN, scaled=True), [640]),
    "FP8, weights of all experts": (replace(QWEN, scaled=True, renormalize=False), [1]),
    "FP8, rows": (replace(QWEN, scaled=True), [2049, 1, 33]),
    "FP8, two experts of 1024": (replace(FEW, width=1024, scaled=True, **TWO_THOUSAND), [17]),
    "FP8, a short last chunk": (
        replace(FEW, width=384, experts=16, top_k=6, scaled=True, **TWO_THOUSAND),
        [640, 3],
    ),
    "FP8, experts of 256 of 256": (
        replace(FEW, width=256, experts=256, top_k=8, scaled=True, **TWO_THOUSAND),
        [2049],
    ),
    "heads of llama": (
        Sizes(hidden=4096, heads=32, head_norms=False, bias=True, width=768, experts=16, top_k=6),
        [300],
    ),
}


def random_ids(sizes: Sizes, rows: int) -> torch.Tensor:
    """The experts that each row shall pass, the first and the last of all among them."""
    ids = torch.stack([torch.randperm(sizes.experts)[: sizes.top_k] for _ in range(rows)])
    ends = torch.tensor([0, sizes.experts - 1])
    row = int(torch.randint(rows, ()))
    others = ids[row][~torch.isin(ids[row], ends)]
    ids[row] = torch.cat((ends, others))[: sizes.top_k]
    if sizes.top_k == 1:
        ids[row] = ends[int(torch.randint(2, ()))]
    return ids.to(DEVICE)


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_float64(name: str):
    sizes, lens = CASES[name]
    model = Model(sizes)
    step = make_step(model, lens)
    steer(model, step, random_ids(sizes, len(lens)))
    wanted, _ = expected(model, step, exact)
    ops, _ = expected(model, step, as_ops_round)
    found = step.run(model)
    assert torch.isfinite(found).all()
    assert error(found, wanted) < 1.3 * error(ops, wanted)
    for _ in range(10):
        assert torch.equal(step.run(model), found)


def test_rows_may_share_experts():
    model = Model(FEW)
    step = make_step(model, [100, 33, 5])
    steer(model, step, torch.tensor([[7, 0], [0, 3], [7, 0]], device=DEVICE))
    assert error(step.run(model), expected(model, step, exact)[0]) < 2e-2


def test_of_equal_logits_the_first_experts_are_chosen():
    sizes = replace(QWEN, layers=1)
    model = Model(sizes)
    step = make_step(model, [33, 1])
    layer = model.layers[0]
    layer.router.copy_(layer.router[:1].expand_as(layer.router).clone())
    poison(layer, torch.arange(sizes.experts, device=DEVICE) >= sizes.top_k)
    found = step.run(model)
    assert torch.isfinite(found).all()
    assert error(found, expected(model, step, exact)[0]) < 2e-2


def test_a_row_of_nan_leaves_the_others_alone():
    model = Model(replace(FEW, layers=1))
    step = make_step(model, [20, 20])
    wanted = step.run(model)
    broken = step.hidden.clone()
    broken[1] = float("nan")
    found = replace(step, hidden=broken).run(model)
    assert torch.equal(found[0], wanted[0])
    assert found[1].isnan().all()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"width": 160}, NotImplementedError),
        ({"width": 448}, NotImplementedError),
        ({"experts": 12}, NotImplementedError),
        ({"experts": 264}, NotImplementedError),
        ({"experts": 16, "top_k": 9}, NotImplementedError),
        ({"scaled": True, "width": 1024, "experts": 8}, NotImplementedError),
        ({"scaled": True, "hidden": 2048, "width": 512}, NotImplementedError),
        ({"top_k": 0}, ValueError),
        ({"top_k": 9}, ValueError),
    ],
)
def test_what_it_does_not_serve(change: dict[str, int], problem: type[Exception]):
    with pytest.raises(problem):
        Model(replace(FEW, layers=1, **change))


def test_layers_of_both_kinds_are_refused():
    dense = Model(replace(FEW, layers=1, experts=0, top_k=0, width=1024))
    mixture = Model(replace(FEW, layers=1, width=1024))
    with pytest.raises(NotImplementedError, match="in all layers or in none"):
        rk.PersistentDecoder(
            layers=[*mixture.layers, *dense.layers],
            final_norm=mixture.norm,
            cos_sin_cache=mixture.table,
            num_heads=FEW.heads,
            num_kv_heads=FEW.kv_heads,
            eps=1e-6,
            softmax_scale=1.0,
            top_k=2,
        )


def test_a_graph_follows_the_choice():
    """Every replay chooses anew."""
    model = Model(QWEN)
    step = make_step(model, [640])
    held: Step = replace(step, hidden=step.hidden.clone())
    held.run(model, held.hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.run(model, held.hidden)
    for _ in range(5):
        hidden = torch.randn_like(step.hidden)
        held.hidden.copy_(hidden)
        graph.replay()
        assert torch.equal(held.hidden, replace(step, hidden=hidden).run(model))
