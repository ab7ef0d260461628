"""Small random decoders for the persistent decoder's tests, steps of them, and both in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

import radix_kernels as rk

DEVICE = "cuda"
D = 128
BLOCK = 128
EPS = 1e-6
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Sizes:
    """A small decoder's. With `experts` the MLP is a mixture of experts of `width`. `scaled`: its
    weights are FP8 with a scale for each 128 x 128 elements."""

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
    experts: int = 0
    top_k: int = 0
    renormalize: bool = False
    scaled: bool = False


class Model:
    """Random layers with a random cache, poisoned where no row has pages."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.layers = [self._layer(sizes, *caches) for caches in self._caches(sizes)]
        self.norm = self._random(sizes.hidden, around=1)
        positions = torch.arange(50_000, dtype=torch.float64)[:, None]
        angles = positions * 1e6 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
        self.table = torch.cat((angles.cos(), angles.sin()), -1).float().to(DEVICE)
        self.decoder = rk.PersistentDecoder(
            layers=self.layers,
            final_norm=self.norm,
            cos_sin_cache=self.table,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            eps=EPS,
            qk_eps=EPS,
            softmax_scale=D**-0.5,
            top_k=sizes.top_k,
            renormalize=sizes.renormalize,
        )

    @staticmethod
    def _random(*shape: int, scale: float = 0.2, around: float = 0) -> torch.Tensor:
        return (around + scale * torch.randn(shape, device=DEVICE)).to(BF16)

    @staticmethod
    def _caches(s: Sizes) -> list[tuple[torch.Tensor, ...]]:
        """Keys and values of each layer, which `make_step` fills."""
        page = (s.page_size, s.kv_heads, D)
        if s.page_first:
            pool = torch.empty((s.pages, s.layers, 2, *page), dtype=BF16, device=DEVICE)
            return [pool[:, layer].unbind(1) for layer in range(s.layers)]
        pool = torch.empty((s.layers, 2, s.pages, *page), dtype=BF16, device=DEVICE)
        return [layer.unbind() for layer in pool]

    def _layer(self, s: Sizes, k_cache: torch.Tensor, v_cache: torch.Tensor) -> rk.PersistentLayer:
        def weight(*shape: int) -> torch.Tensor:
            return self._random(*shape, scale=shape[-1] ** -0.5)

        all_heads = s.heads + 2 * s.kv_heads
        norms = [1 + 0.2 * torch.randn(D, device=DEVICE) if s.head_norms else None for _ in "qk"]
        stack = (s.experts,) if s.experts else ()
        weights = {
            "qkv": weight(all_heads * D, s.hidden),
            "o": weight(s.hidden, s.heads * D),
            "gate_up": weight(*stack, 2 * s.width, s.hidden),
            "down": weight(*stack, s.hidden, s.width),
        }
        if s.scaled:
            for name in tuple(weights):
                weights[name], weights[f"{name}_scale"] = in_blocks(weights[name])
        return rk.PersistentLayer(
            **weights,
            qkv_bias=self._random(all_heads * D) if s.bias else None,
            input_norm=self._random(s.hidden, around=1),
            post_norm=self._random(s.hidden, around=1),
            q_norm=norms[0],
            k_norm=norms[1],
            k_cache=k_cache,
            v_cache=v_cache,
            router=weight(s.experts, s.hidden) if s.experts else None,
        )


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in FP8 and random scales [.., rows / 128, k / 128], of about the weight's size."""
    shape = (*weight.shape[:-2], weight.shape[-2] // BLOCK, weight.shape[-1] // BLOCK)
    scales = weight.float().std() / 32 * (0.5 + torch.rand(shape, device=DEVICE))
    return (weight / _spread(scales).to(BF16)).to(torch.float8_e4m3fn), scales


def _spread(scales: torch.Tensor) -> torch.Tensor:
    return scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)


def value_of(layer: rk.PersistentLayer, name: str, expert: int | None = None) -> torch.Tensor:
    """A weight, or an expert's, in float64."""
    weight = getattr(layer, name)
    scales = getattr(layer, f"{name}_scale")
    if expert is not None:
        weight = weight[expert]
        scales = None if scales is None else scales[expert]
    return weight.double() if scales is None else weight.double() * _spread(scales.double())


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
    free = torch.randperm(s.pages, device=DEVICE).int()
    table = torch.full((len(lens), width), s.pages - 1, dtype=torch.int32, device=DEVICE)
    used = torch.zeros(s.pages * s.page_size, dtype=torch.bool, device=DEVICE)
    taken = 0
    slots = []
    for row, n in enumerate(lens):
        pages = -(-n // s.page_size)
        table[row, :pages] = free[taken : taken + pages]
        taken += pages
        page, place = places(s, torch.arange(n, device=DEVICE))
        row_slots = table[row, page].long() * s.page_size + place
        used[row_slots[:-1]] = True
        slots.append(int(row_slots[-1]))
    assert taken <= s.pages
    filled = places(s, used.nonzero()[:, 0])
    for layer in model.layers:
        for cache in (layer.k_cache, layer.v_cache):
            cache.fill_(float("nan"))
            cache[filled] = torch.randn((int(used.sum()), s.kv_heads, D), device=DEVICE).to(BF16)
    kv_lens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    return Step(
        hidden=torch.randn(len(lens), s.hidden, device=DEVICE).to(BF16),
        positions=kv_lens - 1,
        slots=torch.tensor(slots, device=DEVICE),
        table=table,
        lens=kv_lens,
    )


Rounded = Callable[[torch.Tensor], torch.Tensor]
# Sees a mixture's layer and its normed input, [T, hidden], before experts are chosen.
Prepare = Callable[[rk.PersistentLayer, torch.Tensor], None]


def expected(
    model: Model, step: Step, rounded: Rounded, prepare: Prepare | None = None
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """In float64, with activations `rounded` where the ops round them: the result, and the keys and
    values of each layer."""
    s = model.sizes
    x = step.hidden.double()
    stored = []
    for layer in model.layers:
        qkv = rounded(_norm(x, layer.input_norm, rounded) @ value_of(layer, "qkv").T + _bias(layer))
        q, k, v = qkv.unflatten(-1, (-1, D)).split([s.heads, s.kv_heads, s.kv_heads], dim=1)
        q = rounded(_turned(_head_norm(q, layer.q_norm), model, step))
        k = rounded(_turned(_head_norm(k, layer.k_norm), model, step))
        stored.append((k, v))
        rows = [_attended(model, layer, step, i, q[i], k[i], v[i]) for i in range(len(q))]
        x = rounded(x + rounded(torch.stack(rows)) @ value_of(layer, "o").T)
        normed = _norm(x, layer.post_norm, rounded)
        if s.experts:
            if prepare is not None:
                prepare(layer, normed)
            x = rounded(x + rounded(_mixture(s, layer, normed, rounded)))
        else:
            x = rounded(x + _mlp(normed, layer, None, rounded))
    return _norm(x, model.norm, rounded), stored


def chosen_experts(
    sizes: Sizes, layer: rk.PersistentLayer, normed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and numbers, [T, top_k]; logits are compared in float32."""
    logits = normed @ layer.router.double().T
    _, ids = logits.float().sort(dim=-1, descending=True, stable=True)
    ids = ids[:, : sizes.top_k]
    if sizes.renormalize:
        return logits.gather(1, ids).softmax(-1), ids
    return logits.softmax(-1).gather(1, ids), ids


def _mixture(
    sizes: Sizes, layer: rk.PersistentLayer, normed: torch.Tensor, rounded: Rounded
) -> torch.Tensor:
    weights, ids = chosen_experts(sizes, layer, normed)
    rows = []
    for token in range(len(normed)):
        parts = [
            weights[token, place] * _mlp(normed[token], layer, number, rounded)
            for place, number in enumerate(ids[token].tolist())
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


def _mlp(
    x: torch.Tensor, layer: rk.PersistentLayer, expert: int | None, rounded: Rounded
) -> torch.Tensor:
    gate, up = (x @ value_of(layer, "gate_up", expert).T).chunk(2, -1)
    gated = rounded(torch.nn.functional.silu(gate) * up)
    return gated @ value_of(layer, "down", expert).T


def _bias(layer: rk.PersistentLayer) -> torch.Tensor | float:
    return 0.0 if layer.qkv_bias is None else layer.qkv_bias.double()


def _norm(x: torch.Tensor, weight: torch.Tensor, rounded: Rounded) -> torch.Tensor:
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
    layer: rk.PersistentLayer,
    step: Step,
    row: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """One row's heads, in one dimension."""
    s = model.sizes
    page, place = places(s, torch.arange(int(step.lens[row]) - 1, device=DEVICE))
    seen = step.table[row, page].long(), place
    group = s.heads // s.kv_heads
    keys, values = (
        torch.cat((cache[seen].double(), new[None]))
        for cache, new in ((layer.k_cache, k), (layer.v_cache, v))
    )
    scores = torch.einsum("hd,nhd->hn", q, keys.repeat_interleave(group, 1)) * D**-0.5
    values = values.repeat_interleave(group, 1)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values).flatten()


def exact(x: torch.Tensor) -> torch.Tensor:
    """Nothing is rounded."""
    return x


def as_ops_round(x: torch.Tensor) -> torch.Tensor:
    """To bfloat16."""
    return x.to(BF16).double()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, by norms."""
    return float((found.double() - wanted).norm() / wanted.norm())


def poison(layer: rk.PersistentLayer, which: torch.Tensor) -> None:
    """Makes the weights of some experts, a mask [E], NaN, and their scales."""
    for name in ("gate_up", "down"):
        weight = getattr(layer, name)
        scales = getattr(layer, f"{name}_scale")
        if scales is None:
            weight[which] = float("nan")
        else:
            weight.view(torch.uint8)[which] = 0x7F
            scales[which] = float("nan")


def steer(model: Model, step: Step, ids: torch.Tensor) -> None:
    """Has row r of the step pass the experts ids[r] in all layers: their logits become at least one
    larger than those of the others, so that rounding chooses no others; and the weights of experts
    that no row passes become NaN."""
    s = model.sizes
    is_idle = torch.ones(s.experts, dtype=torch.bool, device=DEVICE)
    is_idle[ids.unique()] = False

    def prepare(layer: rk.PersistentLayer, normed: torch.Tensor) -> None:
        wanted = torch.rand(len(ids), s.experts, dtype=torch.float64, device=DEVICE) * 2 - 2
        wanted.scatter_add_(1, ids, torch.full_like(ids, 3, dtype=torch.float64))
        router = layer.router.double()
        missing = wanted - normed @ router.T
        layer.router.copy_(router + (torch.linalg.pinv(normed) @ missing).T)
        assert torch.equal(chosen_experts(s, layer, normed)[1].sort().values, ids.sort().values)
        poison(layer, is_idle)

    expected(model, step, exact, prepare)
