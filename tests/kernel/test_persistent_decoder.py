"""A decode step in one kernel against the same step in float64, and against itself: graphs, other
rows, pages that it must not read. With `--device cuda`, on Hopper; elsewhere the class refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import radix_kernels as rk
from tests.kernel.persistent_model import (
    EPS,
    Model,
    Sizes,
    as_ops_round,
    error,
    exact,
    expected,
    make_step,
    places,
)

SMALL = Sizes()
EXPERTS = Sizes(hidden=1280, width=256, experts=64, top_k=4, renormalize=True)
SCALED = Sizes(hidden=2048, heads=16, width=512, experts=32, top_k=4, scaled=True)
KINDS = {"dense": SMALL, "experts": EXPERTS, "FP8 experts": SCALED}
LLAMA = Sizes(hidden=4096, heads=32, width=14336, head_norms=False, layers=1)
CASES = {
    "one token": (SMALL, [1]),
    "a tile": (SMALL, [16]),
    "a token more": (SMALL, [17]),
    "split": (SMALL, [640]),
    "long": (replace(SMALL, pages=2600), [40_000]),
    "rows of all lengths": (SMALL, [5, 640, 33, 2047, 2048, 2049, 700, 1]),
    "pages of one token": (replace(SMALL, page_size=1, pages=3000), [700, 3, 2049]),
    "page first": (replace(SMALL, page_first=True), [5, 640, 2049, 1]),
    "page first, pages of one token": (
        replace(SMALL, page_first=True, page_size=1, pages=3000),
        [700, 2, 2049],
    ),
    "pages of 64": (replace(SMALL, page_size=64, pages=64), [700, 3, 128, 64, 65]),
    "llama": (LLAMA, [640, 31]),
    "a bias, seven heads a KV head": (
        Sizes(
            hidden=3584, heads=28, kv_heads=4, width=18944, head_norms=False, bias=True, layers=1
        ),
        [640, 300],
    ),
    "a short last chunk": (Sizes(hidden=2560, heads=32, width=9728, layers=1), [900, 1, 20]),
    "FP8": (Sizes(hidden=2048, scaled=True), [640, 1, 17]),
    "FP8, a short last chunk": (Sizes(hidden=2304, heads=24, width=2688, scaled=True), [33]),
    "eight heads a KV head": (Sizes(hidden=2048, heads=16, kv_heads=2, width=1088), [300, 17]),
}


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_float64(name: str):
    sizes, lens = CASES[name]
    model = Model(sizes)
    step = make_step(model, lens)
    wanted, stored = expected(model, step, exact)
    ops, _ = expected(model, step, as_ops_round)
    before = [(layer.k_cache.clone(), layer.v_cache.clone()) for layer in model.layers]
    found = step.run(model)
    assert torch.isfinite(found).all()
    assert error(found, wanted) < 1.3 * error(ops, wanted)
    for layer, caches, new in zip(model.layers, before, stored, strict=True):
        for cache, old, values in zip((layer.k_cache, layer.v_cache), caches, new, strict=True):
            new_place = places(sizes, step.slots)
            assert error(cache[new_place], values) < 2e-2
            old[new_place] = cache[new_place]
            assert torch.equal(cache.view(torch.int16), old.view(torch.int16)), "another slot"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_others_and_bits_repeat(kind: str):
    model = Model(KINDS[kind])
    step = make_step(model, [640, 100, 2049, 7])
    first = step.run(model)
    for _ in range(20):
        assert torch.equal(step.run(model), first)
    order = torch.tensor([2, 0, 3, 1], device="cuda")
    other = step.rows(order)
    assert torch.equal(other.run(model), first[order])


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_serves_other_rows(kind: str):
    model = Model(KINDS[kind])
    first = make_step(model, [2049, 33])
    held = replace(first, hidden=torch.empty_like(first.hidden))
    held.run(model, held.hidden)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.run(model, held.hidden)
    for lens in ([640, 33], [2049, 1], [15, 16]):
        step = make_step(model, lens)  # poisons the pages of the one before
        wanted = step.run(model)
        held.table[:, : step.table.shape[1]] = step.table
        for name in ("hidden", "positions", "slots", "lens"):
            getattr(held, name).copy_(getattr(step, name))
        graph.replay()
        assert torch.equal(held.hidden, wanted)


@pytest.mark.usefixtures("on_hopper")
def test_nothing_is_stored_at_slot_minus_one_and_other_numbers_of_rows_follow():
    model = Model(SMALL)
    step = make_step(model, [640, 5])
    before = [(layer.k_cache.clone(), layer.v_cache.clone()) for layer in model.layers]
    wanted = replace(step, slots=torch.full_like(step.slots, -1)).run(model)
    for layer, caches in zip(model.layers, before, strict=True):
        for cache, old in zip((layer.k_cache, layer.v_cache), caches, strict=True):
            assert torch.equal(cache.view(torch.int16), old.view(torch.int16))
    assert torch.equal(step.run(model), wanted)
    for count in (1, 8, 3, 2):  # of rows
        other = make_step(model, [100 + count] * count)
        assert error(other.run(model), expected(model, other, exact)[0]) < 2e-2


def next_flag(model: Model) -> torch.Tensor:
    """The word of the workspace that says which flag the next launch begins with: it is behind the
    layers' table, of 17 words of 64 bits each, in pieces of 32 such words."""
    word = -(-17 * model.sizes.layers // 32) * 32
    return model.decoder._workspace.view(torch.int32)[2 * word : 2 * word + 1]


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("kind", KINDS)
def test_flags_come_round(kind: str):
    """After 2^32 steps, and where words that were not used meanwhile have the flags of today."""
    model = Model(KINDS[kind])
    step = make_step(model, [2049, 640, 17, 5])
    few = step.rows(torch.tensor([3], device="cuda"))
    wanted = step.run(model)
    wanted_few = few.run(model)
    count = 5 * model.sizes.layers + 1
    assert int(next_flag(model)) == 1 + 2 * count
    for begin in (2**30, 2**31, 3 * 2**30, 2**32):
        for before in (1, 3, count, count + 1):
            begin_at = torch.tensor(begin - before, dtype=torch.int64)
            next_flag(model).copy_(begin_at.to(torch.int32))
            assert torch.equal(few.run(model), wanted_few)
            assert torch.equal(step.run(model), wanted)
            assert torch.equal(few.run(model), wanted_few)
    assert 0 < int(next_flag(model)) < 5 * count, "flags have begun again at 1"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"width": 1000}, NotImplementedError),
        ({"hidden": 768}, NotImplementedError),
        ({"page_size": 24}, NotImplementedError),
        ({"kv_heads": 1, "heads": 16}, NotImplementedError),
        ({"kv_heads": 3}, ValueError),
    ],
)
def test_what_it_does_not_serve(change: dict[str, int], problem: type[Exception]):
    with pytest.raises(problem):
        Model(replace(SMALL, layers=1, **change))


@pytest.mark.usefixtures("on_hopper")
def test_a_step_that_does_not_fit():
    model = Model(LLAMA)
    assert 1 <= model.decoder.max_tokens < 8
    step = make_step(model, [5] * (model.decoder.max_tokens + 1))
    with pytest.raises(ValueError, match="tokens, this decoder serves"):
        step.run(model)
    with pytest.raises(TypeError, match="positions"):
        one = make_step(model, [5])
        replace(one, positions=one.positions.long()).run(model)
    none = step.rows(torch.zeros(0, dtype=torch.long, device="cuda"))
    assert none.run(model).shape == (0, 4096)


def test_without_the_cuda_library():
    if getattr(rk._loader.bind, "PersistentDecoder", None) is not None:
        pytest.skip("the library is CUDA's")
    x = torch.zeros(4)
    layer = rk.PersistentLayer(
        qkv=x, o=x, gate_up=x, down=x, input_norm=x, post_norm=x, k_cache=x, v_cache=x
    )
    with pytest.raises(NotImplementedError, match="needs the native CUDA library"):
        rk.PersistentDecoder(
            layers=[layer],
            final_norm=x,
            cos_sin_cache=x,
            num_heads=1,
            num_kv_heads=1,
            eps=EPS,
            softmax_scale=1.0,
        )
