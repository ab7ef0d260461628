"""MLA decode in Triton: in its interpreter on the CPU, or on the GPU where there is one."""

from __future__ import annotations

import math

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _dispatch
from tests.kernel.helpers import assert_close, assert_same_bits, guarded
from tests.kernel.mla_cases import HALVES, LATENT, ROPE, SCALE, Case, amplitude, make_case, oracle
from tests.kernel.triton_device import DEVICE, GPU, INTERPRETED, TRITON_ATTENTION, triton_module

rt = triton_module("mla")


pytestmark = [
    pytest.mark.cover("values"),
    pytest.mark.usefixtures("interpreter_widens_bfloat16"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy under the interpreter
]


@pytest.fixture(autouse=True)
def _poisoned_partials(monkeypatch):
    """What a split has not written must not be used."""
    original = rt._partials

    def partials(q, splits):
        return tuple(None if part is None else part.fill_(math.nan) for part in original(q, splits))

    monkeypatch.setattr(rt, "_partials", partials)


@pytest.fixture
def short_splits(monkeypatch):
    """Several pieces of a row without many keys."""
    monkeypatch.setattr(rt, "_SPLIT_KEYS", 64)


def launch(
    case: Case, out: torch.Tensor, lse: torch.Tensor | None = None, causal=True, any_split=True
) -> None:
    """The kernel on DEVICE over the storages of the arguments, as they are."""
    there = [_moved(x) for x in case.args]
    there_out = _moved(out)
    there_lse = None if lse is None else _moved(lse)
    rt.mla_decode(*there, SCALE, causal, there_out, there_lse, any_split=any_split)
    if GPU:
        out.copy_(there_out)
        if lse is not None and there_lse is not None:
            lse.copy_(there_lse)


def _moved(x: torch.Tensor) -> torch.Tensor:
    if not GPU or x.is_cuda:
        return x
    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(DEVICE)
    return flat.as_strided(x.shape, x.stride(), x.storage_offset())


def widened(case: Case) -> Case:
    """FP8 values times their scales are rounded to the type of the queries; the interpreter cuts
    bfloat16."""
    dtype = case.args[0].dtype
    if not case.fp8:
        return case
    tokens = [x.float() for x in case.tokens]
    if not INTERPRETED or dtype != torch.bfloat16:
        return Case(case.args, [x.to(dtype).double() for x in tokens])
    return Case(
        case.args, [(x.view(torch.int32) & ~0xFFFF).view(torch.float32).double() for x in tokens]
    )


def run(case: Case, causal: bool = True, any_split: bool = True) -> None:
    nope = case.args[0]
    dtype = case.args[0].dtype
    expected, expected_lse = oracle(widened(case), causal)
    out = guarded(tuple(nope.shape), dtype, gap=8)
    lse = torch.full(nope.shape[:2], math.nan)
    launch(case, out.view, lse, causal, any_split)
    out.check()
    assert_close(
        "triton mla_decode",
        out.view,
        expected,
        TRITON_ATTENTION[dtype],
        amplitude(widened(case), causal),
    )
    assert_close("triton mla_decode lse", lse, expected_lse, (4e-6, 3e-5))


@pytest.mark.parametrize("heads", [1, 16, 17, 128])
@pytest.mark.parametrize("fp8", [False, True])
def test_heads(heads, fp8, rng):
    rows = (
        [(1, 33), (0, 4)]
        if heads == 128 and not GPU
        else [(1, 70), (3, 33), (0, 4), (2, 1), (1, 0)]
    )
    run(make_case(rows, rng, heads=heads, fp8=fp8))


@pytest.mark.parametrize("heads", [4, 40])
def test_256_latent_values(heads, rng, short_splits):
    run(make_case([(1, 130), (3, 33), (1, 0)], rng, heads=heads, latent=256))


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"latent": 128}, "128 latent and 64 rotary values"),
        ({"rope": 32}, "512 latent and 32 rotary values"),
        ({"dtype": torch.float32}, "does not take float32"),
    ],
)
def test_what_it_refuses(sizes, text, rng):
    case = make_case([(1, 5)], rng, **sizes)
    with pytest.raises(NotImplementedError, match=text):
        launch(case, torch.empty_like(case.args[0]))


@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_page_sizes(page_size, fp8, dtype, rng):
    run(
        make_case(
            [(1, 130), (2, 64), (1, 31)],
            rng,
            heads=2,
            page_size=page_size,
            fp8=fp8,
            dtype=dtype,
            gap=16,
        )
    )


@pytest.mark.parametrize("heads", [4, 9])
@pytest.mark.parametrize("causal", [True, False])
def test_several_queries(heads, causal, rng):
    """Behind a prefix; queries that see nothing: more of them than keys, and no keys at all."""
    run(make_case([(3, 40), (4, 2), (2, 0), (5, 33)], rng, heads=heads), causal)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("any_split", [False, True])
@pytest.mark.usefixtures("short_splits")
def test_splits(fp8, any_split, rng):
    """Rows of one piece, of several and of none; queries whose last piece holds nothing that they
    see."""
    case = make_case([(1, 150), (3, 65), (1, 64), (1, 3), (1, 0)], rng, heads=2, fp8=fp8)
    assert rt.choose_splits(case.args[3].shape[1] * 16, 5, any_split) == 3
    run(case, True, any_split)


@pytest.mark.usefixtures("short_splits")
def test_pieces_of_more_than_the_least(rng):
    """A row of more keys than the splits have at least: pieces of 128."""
    case = make_case([(1, 16 * 64 + 10)], rng, heads=1, page_size=64)
    assert rt.choose_splits(case.args[3].shape[1] * 64, 1, False) == 16
    run(case, True, False)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("more", [16, 4, 48])
def test_pools_of_any_stride(fp8, more, rng):
    """Layers beside each other in a token; tokens that begin at no multiple of 16 bytes."""
    case = make_case([(1, 40), (2, 33)], rng, fp8=fp8)
    cache = case.args[2]
    pool = torch.full(
        (*cache.shape[:2], cache.shape[2] + more), 255 if fp8 else math.nan, dtype=cache.dtype
    )
    view = pool[..., more // 2 if fp8 else 2 :][..., : cache.shape[2]]
    if fp8 and view.data_ptr() % 4:
        view = pool[..., : cache.shape[2]]
    view.copy_(cache)
    run(Case((*case.args[:2], view, *case.args[3:]), case.tokens))


@pytest.mark.parametrize("far", ["page", "token"])
def test_far_strides(far, rng):
    """Offsets beyond 2**31 elements, by strides and numbers that are below it."""
    case = make_case([(1, 6)], rng, page_size=1 if far == "page" else 6)
    cache = case.args[2]
    table = case.args[3]
    step = 2**29 + 1
    width = LATENT + ROPE
    buffer = torch.empty(5 * step + width, dtype=cache.dtype, device=DEVICE)
    if far == "page":
        pool = buffer.as_strided((6, 1, width), (step, width, 1))
    else:
        pool = buffer.as_strided((1, 6, width), (8, step, 1))
    pages = len(pool)
    pool.copy_(cache[table[0, :pages].long()])
    there = torch.arange(pages, dtype=torch.int32)[None]
    run(Case((*case.args[:2], pool, there, *case.args[4:]), case.tokens))


def test_queries_far_apart_and_unaligned(rng):
    case = make_case([(2, 20), (1, 9)], rng, heads=3, gap=7)
    run(case)


def test_fp8_tokens_at_odd_bytes_are_refused(rng):
    case = make_case([(1, 5)], rng, fp8=True)
    cache = case.args[2]
    odd = torch.zeros((*cache.shape[:2], 658), dtype=torch.uint8)[..., :656]
    with pytest.raises(NotImplementedError, match="aligned to 4 bytes"):
        launch(
            Case((*case.args[:2], odd, *case.args[3:]), case.tokens), torch.empty_like(case.args[0])
        )


@pytest.mark.parametrize("kv_len", [40, 100])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("where", ["query", "key"])
@pytest.mark.usefixtures("short_splits")
def test_nan_reaches_out_and_lse(kv_len, fp8, where, rng):
    """In one piece and in two."""
    case = make_case([(1, kv_len)], rng, fp8=fp8)
    cache = case.args[2]
    table = case.args[3]
    if where == "query":
        case.args[0][:, :, 3] = math.nan
    else:
        last = kv_len - 1
        cache[table[0, last // 16], last % 16, 5] = 127 if fp8 else math.nan
    out = torch.zeros_like(case.args[0])
    lse = torch.zeros(case.args[0].shape[:2])
    launch(case, out, lse)
    assert lse.isnan().all() and out.isnan().all()


def test_rows_without_tokens_or_pages(rng):
    nope, rope, cache, table, lens, starts = make_case([(1, 0), (2, 0)], rng).args
    out = torch.full_like(nope, 7)
    lse = torch.zeros(nope.shape[:2])
    launch(Case((nope, rope, cache[:0], table[:, :0], lens, starts), []), out, lse)
    assert not out.any() and bool((lse == -math.inf).all())


@pytest.mark.usefixtures("short_splits")
def test_bits_follow_a_rows_own_length(rng):
    """Neither the other rows, nor their queries, nor the width of the page table."""
    case = make_case([(1, 140), (1, 70), (2, 33)], rng, heads=9, page_size=64)
    whole = torch.empty_like(case.args[0])
    launch(case, whole, any_split=False)
    nope, rope, cache, table, lens, starts = case.args
    for row, more in enumerate((0, 5, 0)):
        at = slice(int(starts[row]), int(starts[row + 1]))
        wide = torch.cat((table[row : row + 1], table.new_full((1, more), 2**30)), 1)
        start = torch.tensor([0, at.stop - at.start], dtype=torch.int32)
        alone = Case((nope[at], rope[at], cache, wide, lens[row : row + 1], start), [])
        out = torch.empty_like(nope[at])
        launch(alone, out, any_split=False)
        assert_same_bits(out, whole[at])


def test_choices_are_of_shapes_alone():
    """Nothing is read on the host: tensors without data do, and lead to the same launch."""
    launched = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append((grid, args, options))

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    def ints(*shape):
        return meta(*shape, dtype=torch.int32)

    for batch, heads, columns, any_split, splits in (
        (1, 16, 2560, True, 64),
        (1, 16, 2560, False, 16),
        (64, 128, 2560, True, 2),
        (64, 128, 2560, False, 16),
        (600, 16, 2560, True, 1),
        (1, 16, 4, True, 1),
    ):
        launched.clear()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("attend_latent", "join_splits"):
                patch.setattr(rt, name, Recorder())
            q = meta(batch, heads, LATENT), meta(batch, heads, ROPE)
            tensors = (
                *q,
                meta(9, 64, LATENT + ROPE),
                ints(batch, columns),
                ints(batch),
                ints(batch + 1),
            )
            rt.mla_decode(
                *tensors, SCALE, True, meta(batch, heads, LATENT), None, any_split=any_split
            )
        tiles = rt.choose_tiles(heads, torch.version.hip is not None)
        blocks = batch * heads // tiles.block_m + batch
        assert launched[0][0] == (blocks * splits,)
        joins = [(batch, heads)] if splits > 1 else []
        assert [grid for grid, _, _ in launched[1:]] == joins


def test_the_tensors_alignment_is_what_the_kernel_is_told():
    half = torch.zeros(4, 16, 576, dtype=torch.float16)
    bytes_ = torch.zeros(4, 16, 656, dtype=torch.uint8)
    assert rt._piece(half) == 8 and rt._piece(bytes_) == 16
    assert rt._piece(half, half[:, :, 4:]) == 4 and rt._piece(bytes_[:, :, 1:]) == 1
    assert rt._piece(half.as_strided((4, 16, 570), (16 * 576, 574, 1))) == 2
    assert rt._piece(half.as_strided((1, 16, 576), (3, 576, 1))) == 8  # one page steps nowhere


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.usefixtures("short_splits")
def test_gpus_without_a_kernel_have_this_one(batch_invariant, rng, monkeypatch):
    """The public op hands it over as it does to the library, and needs no other: a missing kernel
    is an error."""
    for device in ("cuda", "rocm"):
        assert _dispatch._has_triton("mla_decode", device)
    rk.set_fallback("error")
    monkeypatch.setitem(_dispatch._chosen[DEVICE], "mla_decode", rt.mla_decode)
    case = make_case([(2, 90), (1, 5)], rng)
    out, lse = rk.mla_decode(
        *(x.to(DEVICE) for x in case.args),
        softmax_scale=SCALE,
        return_softmax_lse=True,
        batch_invariant=batch_invariant,
        max_seqlen_q=2,
    )
    expected, expected_lse = oracle(case)
    assert_close("triton mla_decode", out, expected, TRITON_ATTENTION[torch.bfloat16])
    assert_close("triton mla_decode lse", lse, expected_lse, (4e-6, 3e-5))


@pytest.mark.parametrize(
    ("index", "change", "error"),
    [
        (0, lambda x: x.float(), TypeError),
        (1, lambda x: x[:, :2], ValueError),
        (2, lambda x: x.half(), TypeError),
        (3, lambda x: x.long(), TypeError),
        (3, lambda x: x.repeat(1, 2)[:, ::2], ValueError),
        (4, lambda x: x[:1], ValueError),
        (5, lambda x: torch.stack((x, x), 1)[:, 0], ValueError),
    ],
)
def test_errors(index, change, error, rng):
    args = list(make_case([(1, 5), (1, 3)], rng).args)
    args[index] = change(args[index])
    with pytest.raises(error, match="mla_decode: "):
        launch(Case(tuple(args), []), torch.empty_like(args[0]))
