"""A decode step in one kernel against the same step in float64, and against itself: graphs, other
rows, pages that it must not read. With `--device cuda`, on Hopper; elsewhere the class refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch

import radix_kernels as rk

D = 128
EPS = 1e-6
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """A small decoder's."""

    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    width: int = 3072
    layers: int = 2
    head_norms: bool = True
    bias: bool = False
    page_size: int = 16
    pages: int = 700
    page_first: bool = False  # a page of all layers in one piece, as the runtime has it on a GPU


class Model:
    """Random layers with a random cache, poisoned where no row has pages."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.layers = [self._layer(sizes, *caches) for caches in self._caches(sizes)]
        self.norm = self._random(sizes.hidden, around=1)
        positions = torch.arange(50_000, dtype=torch.float64)[:, None]
        angles = positions * 1e6 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        self.table = torch.cat((angles.cos(), angles.sin()), -1).float().cuda()
        self.decoder = rk.PersistentDecoder(
            layers=self.layers,
            final_norm=self.norm,
            cos_sin_cache=self.table,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            eps=EPS,
            qk_eps=EPS,
            softmax_scale=D**-0.5,
        )

    @staticmethod
    def _random(*shape: int, scale: float = 0.2, around: float = 0) -> torch.Tensor:
        return (around + scale * torch.randn(shape, device="cuda")).to(BF16)

    @staticmethod
    def _caches(s: Sizes) -> list[tuple[torch.Tensor, ...]]:
        """Keys and values of each layer, which `make_step` fills."""
        page = (s.page_size, s.kv_heads, D)
        if s.page_first:
            pool = torch.empty((s.pages, s.layers, 2, *page), dtype=BF16, device="cuda")
            return [pool[:, layer].unbind(1) for layer in range(s.layers)]
        pool = torch.empty((s.layers, 2, s.pages, *page), dtype=BF16, device="cuda")
        return [layer.unbind() for layer in pool]

    def _layer(self, s: Sizes, k_cache: torch.Tensor, v_cache: torch.Tensor) -> rk.DenseLayer:
        def weight(rows: int, k: int) -> torch.Tensor:
            return self._random(rows, k, scale=k**-0.5)

        all_heads = s.heads + 2 * s.kv_heads
        norms = [1 + 0.2 * torch.randn(D, device="cuda") if s.head_norms else None for _ in "qk"]
        return rk.DenseLayer(
            qkv=weight(all_heads * D, s.hidden),
            o=weight(s.hidden, s.heads * D),
            gate_up=weight(2 * s.width, s.hidden),
            down=weight(s.hidden, s.width),
            qkv_bias=self._random(all_heads * D) if s.bias else None,
            input_norm=self._random(s.hidden, around=1),
            post_norm=self._random(s.hidden, around=1),
            q_norm=norms[0],
            k_norm=norms[1],
            k_cache=k_cache,
            v_cache=v_cache,
        )


@dataclass(frozen=True)
class Step:
    """One new token a row."""

    hidden: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor

    def run(self, model: Model, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """The decoder's result; `hidden` is memory to leave it in."""
        hidden = self.hidden.clone() if hidden is None else hidden
        return model.decoder(hidden, self.positions, self.slots, self.table, self.lens)

    def rows(self, chosen: torch.Tensor) -> Step:
        """Some of the rows, in this order."""
        return Step(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})


def places(sizes: Sizes, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and place in it."""
    return slots // sizes.page_size, slots % sizes.page_size


def make_step(model: Model, lens: list[int]) -> Step:
    """Rows of these lengths on pages of their own; all other slots are NaN."""
    s = model.sizes
    width = max(-(-n // s.page_size) for n in lens) + 1
    free = torch.randperm(s.pages, device="cuda").int()
    table = torch.full((len(lens), width), s.pages - 1, dtype=torch.int32, device="cuda")
    used = torch.zeros(s.pages * s.page_size, dtype=torch.bool, device="cuda")
    taken = 0
    slots = []
    for row, n in enumerate(lens):
        pages = -(-n // s.page_size)
        table[row, :pages] = free[taken : taken + pages]
        taken += pages
        page, place = places(s, torch.arange(n, device="cuda"))
        row_slots = table[row, page].long() * s.page_size + place
        used[row_slots[:-1]] = True
        slots.append(int(row_slots[-1]))
    assert taken <= s.pages
    filled = places(s, used.nonzero()[:, 0])
    for layer in model.layers:
        for cache in (layer.k_cache, layer.v_cache):
            cache.fill_(float("nan"))
            cache[filled] = torch.randn((int(used.sum()), s.kv_heads, D), device="cuda").to(BF16)
    kv_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    return Step(
        hidden=torch.randn(len(lens), s.hidden, device="cuda").to(BF16),
        positions=kv_lens - 1,
        slots=torch.tensor(slots, device="cuda"),
        table=table,
        lens=kv_lens,
    )


def expected(
    model: Model, step: Step, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """In float64, with activations `rounded` where the ops round them: the result, and the keys and
    values of each layer."""
    s = model.sizes
    x = step.hidden.double()
    stored = []
    for layer in model.layers:
        qkv = rounded(_norm(x, layer.input_norm, rounded) @ layer.qkv.double().T + _bias(layer))
        q, k, v = qkv.unflatten(-1, (-1, D)).split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        q = rounded(_turned(_head_norm(q, layer.q_norm), model, step))
        k = rounded(_turned(_head_norm(k, layer.k_norm), model, step))
        stored.append((k, v))
        rows = [_attended(model, layer, step, i, q[i], k[i], v[i]) for i in range(len(q))]
        x = rounded(x + rounded(torch.stack(rows)) @ layer.o.double().T)
        both = _norm(x, layer.post_norm, rounded) @ layer.gate_up.double().T
        gate, up = both.chunk(2, -1)
        gated = rounded(torch.nn.functional.silu(gate) * up)
        x = rounded(x + gated @ layer.down.double().T)
    return _norm(x, model.norm, rounded), stored


def _bias(layer: rk.DenseLayer) -> torch.Tensor | float:
    return 0.0 if layer.qkv_bias is None else layer.qkv_bias.double()


def _norm(x: torch.Tensor, weight: torch.Tensor, rounded: Callable) -> torch.Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return rounded(x * scale * weight.double())


def _head_norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x if weight is None else _norm(x, weight, lambda y: y)


def _turned(x: torch.Tensor, model: Model, step: Step) -> torch.Tensor:
    cos, sin = model.table[step.positions.long()].double()[:, None].chunk(2, -1)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _attended(
    model: Model,
    layer: rk.DenseLayer,
    step: Step,
    row: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """One row's heads, in one dimension."""
    s = model.sizes
    page, place = places(s, torch.arange(int(step.lens[row]) - 1, device="cuda"))
    seen = step.table[row, page].long(), place
    group = s.heads // s.kv_heads
    keys, values = (
        torch.cat((cache[seen].double(), new[None]))
        for cache, new in ((layer.k_cache, k), (layer.v_cache, v))
    )
    scores = torch.einsum("hd,nhd->hn", q, keys.repeat_interleave(group, 1)) * D**-0.5
    values = values.repeat_interleave(group, 1)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values).flatten()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, by norms."""
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.fixture
def on_hopper(request) -> None:
    if request.config.getoption("--device") != "cuda":
        pytest.skip("wants --device cuda")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wants a Hopper GPU")


SMALL = Sizes()
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
    "eight heads a KV head": (Sizes(hidden=2048, heads=16, kv_heads=2, width=1088), [300, 17]),
}


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_float64(name: str):
    sizes, lens = CASES[name]
    model = Model(sizes)
    step = make_step(model, lens)
    wanted, stored = expected(model, step, lambda x: x)
    ops, _ = expected(model, step, lambda x: x.to(BF16).double())
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
def test_a_row_does_not_depend_on_the_others_and_bits_repeat():
    model = Model(SMALL)
    step = make_step(model, [640, 100, 2049, 7])
    first = step.run(model)
    for _ in range(20):
        assert torch.equal(step.run(model), first)
    order = torch.tensor([2, 0, 3, 1], device="cuda")
    other = step.rows(order)
    assert torch.equal(other.run(model), first[order])


@pytest.mark.usefixtures("on_hopper")
def test_a_graph_serves_other_rows():
    model = Model(SMALL)
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
    for count in (1, 8, 3, 2):
        other = make_step(model, [100 + count] * count)
        assert error(other.run(model), expected(model, other, lambda x: x)[0]) < 2e-2


def next_flag(model: Model) -> torch.Tensor:
    """The word of the workspace that says which flag the next launch begins with: it is behind the
    layers' table, of 11 words of 64 bits each, in pieces of 32 such words."""
    word = -(-11 * model.sizes.layers // 32) * 32
    return model.decoder._workspace.view(torch.int32)[2 * word : 2 * word + 1]


@pytest.mark.usefixtures("on_hopper")
def test_flags_come_round():
    """After 2^32 steps, and where words that were not used meanwhile have the flags of today."""
    model = Model(SMALL)
    step = make_step(model, [2049, 640, 17, 5])
    few = step.rows(torch.tensor([3], device="cuda"))
    wanted = step.run(model)
    wanted_few = few.run(model)
    count = 5 * SMALL.layers + 1
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
    layer = rk.DenseLayer(
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
