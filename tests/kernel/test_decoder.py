"""Decoder against its definition: the ops that its records name, called one after the other, bit
for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import radix_kernels as rk
from radix_kernels import decoder as records
from tests.kernel.decoder_records import Layer, dense_decoder
from tests.marks import needs_cpu_library

HEADS = 4
KV_HEADS = 2
DIM = 32
HIDDEN = 96
INNER = 112
PAGE = 4
PAGES = 40
TABLE_PAGES = 8
EPS = 1e-5
SCALE = DIM**-0.5
ACTIVATIONS = {"silu": rk.silu_and_mul, "gelu": rk.gelu_and_mul, "gelu_tanh": rk.gelu_tanh_and_mul}

pytestmark = needs_cpu_library


class Model:
    """Random layers; `caches` are made anew for each way to run them."""

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        *,
        kind: str = "dense",
        bias: bool = False,
        norms: bool = True,
        int8_cache: bool = False,
        out_norms: bool = False,
        in_norms: bool = True,
        attention: dict[str, Any] | None = None,
    ):
        self.int8_cache = int8_cache
        self.gen = torch.Generator().manual_seed(7)
        self.dtype = dtype
        qkv = (HEADS + 2 * KV_HEADS) * DIM

        def product(rows: int, columns: int) -> tuple[rk.PackedWeight, torch.Tensor | None]:
            weight = rk.pack_weight(self.random(rows, columns) * columns**-0.5, kind=kind)
            return weight, self.random(rows) if bias else None

        self.layers = []
        for left in (-1, 5, -1):
            layer = Layer(
                attention_norm=self.random(HIDDEN) if in_norms else None,
                mlp_norm=self.random(HIDDEN) if in_norms else None,
                attention_out_norm=self.random(HIDDEN) if out_norms else None,
                mlp_out_norm=self.random(HIDDEN) if out_norms else None,
                q_norm=self.random(DIM) if norms else None,
                k_norm=self.random(DIM) if norms else None,
                qkv=product(qkv, HIDDEN),
                o=product(HIDDEN, HEADS * DIM),
                gate_up=product(2 * INNER, HIDDEN),
                down=product(HIDDEN, INNER),
                k_cache=None,
                v_cache=None,
                cos_sin_cache=rk.rope_cos_sin_cache(DIM, 64, 10000.0 + left),
                softmax_scale=SCALE + left / 100,
                window_left=left,
                **attention or {},
            )
            self.layers.append(layer)
        self.norm = self.random(HIDDEN)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.gen).to(self.dtype)

    def with_caches(self) -> list[Layer]:
        fill = torch.Generator().manual_seed(9)
        made = []
        if self.int8_cache:
            for layer in self.layers:
                caches = {
                    name: torch.randint(-127, 128, (PAGES, PAGE, KV_HEADS, DIM), generator=fill)
                    for name in ("k_cache", "v_cache")
                }
                scales = {
                    name: torch.rand(PAGES, PAGE, KV_HEADS, generator=fill) / 50
                    for name in ("k_scale", "v_scale")
                }
                made.append(
                    replace(layer, **{n: x.to(torch.int8) for n, x in caches.items()}, **scales)
                )
            return made
        for layer in self.layers:
            k, v = (
                torch.randn(PAGES, PAGE, KV_HEADS, DIM, generator=fill).to(self.dtype)
                for _ in range(2)
            )
            made.append(replace(layer, k_cache=k, v_cache=v))
        return made

    def decoder(self, layers: list[Layer], activation: str = "silu") -> rk.Decoder:
        return dense_decoder(layers, self.norm, eps=EPS, activation=activation)


def step(
    model: Model, query: list[int], kv: list[int], decoding: int = 0
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Embeddings and places of a batch whose rows have so many new tokens, and tokens in all, on
    shuffled pages; the first `decoding` are not of prompts."""
    order = torch.randperm(PAGES, generator=model.gen)[: len(kv) * TABLE_PAGES].view(
        len(kv), TABLE_PAGES
    )
    positions = torch.cat([torch.arange(n - q, n) for q, n in zip(query, kv, strict=True)]).int()
    rows = torch.repeat_interleave(torch.arange(len(kv)), torch.tensor(query))
    slots = order[rows, positions.long() // PAGE] * PAGE + positions % PAGE
    cu = torch.tensor([0, *query]).cumsum(0).int()
    places = {
        "positions": positions,
        "slot_mapping": slots.long(),
        "page_table": order.int(),
        "kv_lens": torch.tensor(kv).int(),
        "cu_seqlens_q": cu,
        "num_expanded": len(query) - decoding,
    }
    return model.random(sum(query), HIDDEN), places


class Products:
    """`linear` of the tokens that are decoded, which come first, and of those of prompts, which
    keep x."""

    def __init__(self, places: dict[str, Any]) -> None:
        entries = len(places["kv_lens"]) - places["num_expanded"]
        self._decoded = int(places["cu_seqlens_q"][entries])

    def __call__(
        self, x: torch.Tensor, *weight: Any, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        def of(rows: slice, keep_x: bool) -> torch.Tensor:
            added = None if residual is None else residual[rows]
            return rk.linear(x[rows], *weight, residual=added, keep_x=keep_x)

        return self._joined(of)

    def silu_and_mul(self, x: torch.Tensor, weight: rk.PackedWeight) -> torch.Tensor:
        return self._joined(
            lambda rows, keep_x: rk.linear_silu_and_mul(x[rows], weight, keep_x=keep_x)
        )

    def _joined(self, of: Callable[[slice, bool], torch.Tensor]) -> torch.Tensor:
        return torch.cat([of(slice(self._decoded), False), of(slice(self._decoded, None), True)])


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x if weight is None else rk.rmsnorm(x, weight, EPS)


def added(
    linear: Products,
    residual: torch.Tensor,
    x: torch.Tensor,
    product: Any,
    out_norm: torch.Tensor | None,
) -> torch.Tensor:
    if out_norm is None:
        return linear(x, *product, residual=residual)
    return residual + rk.rmsnorm(linear(x, *product), out_norm, EPS)


def by_ops(
    model: Model,
    layers: list[Layer],
    hidden: torch.Tensor,
    places: dict[str, Any],
    activation: str = "silu",
) -> torch.Tensor:
    """The definition."""
    residual = hidden
    linear = Products(places)
    attention = {name: places[name] for name in ("page_table", "kv_lens", "cu_seqlens_q")}
    for layer in layers:
        hidden = normed(residual, layer.attention_norm)
        parts = linear(hidden, *layer.qkv).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        q, k, v = (part.unflatten(-1, (-1, DIM)) for part in parts)
        where = (
            layer.cos_sin_cache,
            places["positions"],
            layer.k_cache,
            layer.v_cache,
            places["slot_mapping"],
        )
        scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        weights = (layer.q_norm, layer.k_norm)
        rk.fused_qk_norm_rope_store(
            q, k, v, *weights, *where, eps=EPS, is_neox=layer.is_neox, **scales
        )
        window = (layer.window_left, -1)
        caches = layer.k_cache, layer.v_cache
        out = rk.flash_attn_with_kvcache(
            q, *caches, **attention, **scales, softmax_scale=layer.softmax_scale,
            softcap=layer.softcap, sinks=layer.sinks, window_size=window,
        )  # fmt: skip
        residual = added(linear, residual, out.flatten(1), layer.o, layer.attention_out_norm)
        hidden = normed(residual, layer.mlp_norm)
        if activation == "silu" and layer.gate_up[1] is None:
            inner = linear.silu_and_mul(hidden, layer.gate_up[0])
        else:
            inner = ACTIVATIONS[activation](linear(hidden, *layer.gate_up))
        residual = added(linear, residual, inner, layer.down, layer.mlp_out_norm)
    return rk.rmsnorm(residual, model.norm, EPS)


def check(
    model: Model, steps: list[tuple[list[int], list[int], int]], activation: str = "silu"
) -> None:
    ours = model.with_caches()
    theirs = model.with_caches()
    decoder = model.decoder(ours, activation)
    for query, kv, decoding in steps:
        hidden, places = step(model, query, kv, decoding)
        expected = by_ops(model, theirs, hidden.clone(), places, activation)
        assert expected.isfinite().all()
        result = decoder(hidden, **places, max_seqlen_q=max(query))
        assert result is hidden and torch.equal(hidden, expected)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.k_cache, b.k_cache) and torch.equal(a.v_cache, b.v_cache)
            if model.int8_cache:
                assert torch.equal(a.k_scale, b.k_scale) and torch.equal(a.v_scale, b.v_scale)


# New tokens, tokens, and how many rows decode. A prompt, decode, a chunk and a prompt of one token
# beside decode; then fewer tokens, in memory that is larger than they need.
STEPS = [
    ([9], [9], 0),
    ([1, 1, 1], [10, 1, 30], 3),
    ([1, 1, 13], [7, 1, 29], 1),
    ([13, 1], [29, 7], 0),
    ([1], [3], 1),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    check(Model(dtype), STEPS)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "w8a8", "w4a8"])
def test_quantized_weights(kind: str) -> None:
    check(Model(kind=kind), STEPS[1:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_int8_caches(dtype: torch.dtype) -> None:
    check(Model(dtype, int8_cache=True), STEPS)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_biases_without_head_norms(activation: str) -> None:
    check(Model(bias=True, norms=False), STEPS[1:3], activation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("in_norms", [True, False])
def test_norms_behind_the_blocks(dtype: torch.dtype, in_norms: bool) -> None:
    check(Model(dtype, out_norms=True, in_norms=in_norms), STEPS, "gelu_tanh")


@pytest.mark.parametrize(
    "attention",
    [{"softcap": 3.0}, {"sinks": torch.linspace(-1, 2, HEADS)}, {"is_neox": False}],
    ids=["softcap", "sinks", "pairs side by side"],
)
def test_kinds_of_attention(attention: dict[str, Any]) -> None:
    check(Model(attention=attention), STEPS[:2])


def test_threads_do_not_show() -> None:
    model = Model()
    before = rk.get_num_threads()
    hidden, places = step(model, [1, 20, 1], [30, 24, 8])
    results = []
    try:
        for threads in (1, 2, 5):
            rk.set_num_threads(threads)
            results.append(model.decoder(model.with_caches())(hidden.clone(), **places))
    finally:
        rk.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_no_tokens() -> None:
    model = Model()
    hidden, places = step(model, [0], [4])
    assert model.decoder(model.with_caches())(hidden, **places).shape == (0, HIDDEN)


def test_refusals() -> None:
    model = Model()
    layers = model.with_caches()
    with pytest.raises(ValueError, match="activation is 'relu'"):
        model.decoder(layers, "relu")
    plain = replace(layers[0], down=(torch.randn(HIDDEN, INNER), None))
    with pytest.raises(NotImplementedError, match="weights that the CPU library has packed"):
        model.decoder([plain])
    other = [
        replace(layer, k_cache=layer.k_cache.float(), v_cache=layer.v_cache.float())
        for layer in layers
    ]
    hidden, places = step(model, [3], [3])
    with pytest.raises(TypeError, match="k_cache has dtype"):
        model.decoder(other)(hidden, **places)
    with pytest.raises(ValueError, match="there are no ops"):
        model.decoder([])(hidden, **places)
    decoder = model.decoder(layers)
    with pytest.raises(TypeError, match="hidden has dtype"):
        decoder(hidden.float(), **places)
    with pytest.raises(ValueError, match="max_seqlen_q is -1"):
        decoder(hidden, **places, max_seqlen_q=-1)
    with pytest.raises(ValueError, match="fused_qk_norm_rope_store: slot_mapping"):
        decoder(hidden, **{**places, "slot_mapping": places["slot_mapping"] + PAGES * PAGE})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (records.Columns(buffer=1, first=0, count=4), "there is no buffer 1"),
        (records.Columns(buffer=-1, first=0, count=4), "there is no buffer -1"),
        (records.Columns(buffer=0, first=HIDDEN - 2, count=4), "of buffer 0, which has 96"),
        (records.Columns(buffer=0, first=-1, count=4), "of buffer 0, which has 96"),
        (records.Columns(buffer=0, first=0, count=0), "of buffer 0, which has 96"),
    ],
)
def test_columns_that_are_not_there(columns: records.Columns, message: str) -> None:
    model = Model()
    hidden, places = step(model, [2], [2])
    norm = records.NormOp(x=columns, out=columns, weight=model.random(4), eps=EPS)
    with pytest.raises(ValueError, match=message):
        rk.Decoder([(HIDDEN, "bfloat16")], [norm])(hidden, **places)


def test_buffers_that_cannot_be() -> None:
    model = Model()
    hidden, places = step(model, [2], [2])
    every = records.Columns(buffer=0, first=0, count=HIDDEN)
    norm = records.NormOp(x=every, out=every, weight=model.norm, eps=EPS)
    with pytest.raises(ValueError, match="buffer 1 has no columns"):
        rk.Decoder([(HIDDEN, "bfloat16"), (0, "float32")], [norm])(hidden, **places)
    with pytest.raises(TypeError, match="no buffer can be float8_e4m3fn"):
        rk.Decoder([(HIDDEN, "float8_e4m3fn")], [norm])
    with pytest.raises(ValueError, match="hidden has shape"):
        rk.Decoder([(HIDDEN + 1, "bfloat16")], [norm])(hidden, **places)
    other = [norm, records.AddOp(0, 1)]
    with pytest.raises(TypeError, match="to of an add has dtype|x of an add has dtype"):
        rk.Decoder([(HIDDEN, "bfloat16"), (HIDDEN, "float32")], other)(hidden, **places)
    with pytest.raises(ValueError, match="x of an add has shape"):
        rk.Decoder([(HIDDEN, "bfloat16"), (8, "bfloat16")], other)(hidden, **places)
