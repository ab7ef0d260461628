"""MLA decode of few rows: each row's length decides, on the device, how many blocks share it.

On Hopper up to 8 rows of up to 16 query rows have a kernel of their own, in which a cluster of
eight blocks has a row. Where clusters are left over, several share a row of more than 2,560
tokens, 320 for each block. Of up to 4 rows with up to 32 query rows each, two clusters have a
row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import radix_kernels as rk
from radix_kernels import mla

# As imported: what the tests of single ops patch copies and waits, which a capture does not allow.
from radix_kernels import mla_decode as decode_there
from tests.kernel.helpers import ATTENTION, assert_close, assert_same_bits
from tests.kernel.mla_cases import SCALE, Case, amplitude, check, make_case, oracle
from tests.kernel.test_cuda_graphs import record

LENGTHS: tuple[int, ...] = (600, 8192, 0, 65, 2049, 1, 64, 63)
CUT = 2561  # tokens from which several clusters share one of up to 16 rows
# What the blocks of a cut row tell each other in the workspace; nothing but them writes it.
ARRIVED = 0xFFB5C3D17FA69E4B - 2**64


@pytest.fixture
def device(request) -> str:
    """Of tests that hold their tensors there themselves."""
    chosen = request.config.getoption("--device")
    if chosen != "cuda":
        pytest.skip("torch's tensors on a GPU")
    return chosen


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 17, 33, 65])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_lengths_beside_each_other(rows, page_size, rng, request):
    """On a CPU shorter ones: how a batch is dealt out there is a matter of 512 tokens."""
    lengths = LENGTHS
    if request.config.getoption("--device") == "cpu":
        lengths = (600, 0, 65, 1)
        if rows > 8:
            pytest.skip("more rows are more of the same on a CPU")
    first = int(torch.randint(len(lengths), (), generator=rng))
    of_rows = [(1, lengths[(first + row) % len(lengths)]) for row in range(rows)]
    check(make_case(of_rows, rng, heads=16, page_size=page_size))


@pytest.mark.parametrize("kv_len", [0, 1, 63, 64, 65, 513, 600, 2049, CUT - 1, CUT, 3000, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_row(kv_len, dtype, rng, request):
    if request.config.getoption("--device") == "cpu" and kv_len > CUT:
        pytest.skip("longer rows are more of the same on a CPU")
    check(make_case([(1, kv_len)], rng, heads=16, dtype=dtype, gap=16))


@pytest.mark.parametrize(
    "lengths",
    [
        (CUT, CUT),
        (8192, *[100] * 7),
        (*[100] * 7, 8192),
        (*[CUT + 64] * 8,),
        (8192, *[100] * 15),
        (*[100] * 15, 8192),
        (*[CUT + 64] * 16,),
        (3000, 40, 8100, 0, 2800),
        (CUT, 64, 20_000),
        (8192, *[100] * 16),
        (*[100] * 32, 8192),
        (*[70] * 30, 8192, *[70] * 33),
        (*[1281] * 17,),
        (*[641] * 33,),
    ],
    ids=lambda x: f"{len(x)}rows-{max(x)}",
)
def test_long_rows_among_short_ones(lengths, rng, request):
    """Clusters that are left over go to the long rows: many, some, or none."""
    if request.config.getoption("--device") == "cpu":
        pytest.skip("a CPU has no clusters")
    check(make_case([(1, n) for n in lengths], rng, heads=16, page_size=64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 3, 4, 5, 9])
@pytest.mark.parametrize(("heads", "queries"), [(17, 1), (20, 1), (32, 1), (16, 2), (5, 6)])
def test_two_blocks_of_query_rows(heads, queries, batch, dtype, rng, request):
    """Rows of fewer queries than the hint says, too, and one that several clusters share."""
    longest = 3300
    if request.config.getoption("--device") == "cpu":
        longest = 300
        if batch > 3:
            pytest.skip("more rows are more of the same on a CPU")
    rows = [(queries, longest), (1, 600), (0, 7), (queries, queries), (1, 1), (queries, 130)]
    check(
        make_case([*rows, *rows][:batch], rng, heads=heads, dtype=dtype, page_size=64),
        hint=queries,
    )


@pytest.mark.parametrize("heads", [1, 5, 16])
def test_rows_without_queries(heads, rng):
    """The rows that pad the batch of a graph: anywhere, and the first and the last."""
    check(make_case([(0, 70), (1, 600), (0, 0), (0, 3), (1, 64), (0, 1)], rng, heads=heads))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "queries"), [(16, 3), (20, 3), (5, 6), (2, 8)])
def test_more_queries_than_the_hint_says(heads, queries, causal, rng):
    """A row has more blocks of 16 query rows than clusters, which work on one after the other, and
    is not cut however long it is."""
    case = make_case(
        [(queries, 700), (1, 40), (queries, CUT + 100), (queries, 2)], rng, heads=heads
    )
    check(case, causal, hint=1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 640, 2999])
def test_a_bad_token_shows(bad, position, rng):
    """In whichever part of the row it lies. The other row stays as it is."""
    case = make_case([(1, 3000), (1, 70)], rng, heads=16, page_size=64)
    page = int(case.args[3][0, position // 64])
    case.args[2][page, position % 64, 512] = bad  # a rotary value: key alone
    case.args[1].abs_()
    got = rk.mla_decode(*case.args, softmax_scale=SCALE, max_seqlen_q=1)
    assert bool(got[0].isnan().any(-1).all())
    assert bool(got[1].isfinite().all())


class Workspace:
    """One workspace for all calls, which at first is full of ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        impl = rk.capabilities()["ops"]["mla_decode"]["bfloat16"]["impl"]
        if not impl.startswith("cuda:"):
            pytest.skip("Hopper's workspace")
        self._fresh = mla._workspace
        self.bytes = torch.empty(0, dtype=torch.uint8)
        monkeypatch.setattr(mla, "_workspace", self._kept)

    def _kept(self, *args: Any) -> Any:
        fresh = self._fresh(*args)
        assert fresh is not None
        if self.bytes.shape != fresh.shape:
            self.bytes = fresh.fill_(255)
        return self.bytes

    def holds_a_word_of_arrival(self) -> bool:
        return bool((self.bytes.view(torch.int64) == ARRIVED).any())


def call(args: list[torch.Tensor]) -> torch.Tensor:
    out = torch.full_like(args[0], math.nan)
    decode_there(*args, softmax_scale=SCALE, max_seqlen_q=1, out=out)
    return out


def assert_right(case: Case, got: torch.Tensor) -> None:
    expected = oracle(case)[0]
    assert_close("mla_decode", got.cpu(), expected, ATTENTION[torch.bfloat16], amplitude(case))


@pytest.mark.parametrize("lengths", [(8192,), (600,), (3000, 40, 8100, 0, 2800), (600,) * 4])
def test_any_workspace_will_do(lengths, device, rng, monkeypatch):
    """Ones, noise, and what the call before left; in the end no word of arrival is in it."""
    workspace = Workspace(monkeypatch)
    case = make_case([(1, n) for n in lengths], rng, heads=16, page_size=64)
    args = [x.to(device) for x in case.args]
    first = call(args).cpu()
    assert_right(case, first)
    assert not workspace.holds_a_word_of_arrival()
    for _ in range(20):
        assert_same_bits(call(args).cpu(), first)
    noise = torch.randint(256, workspace.bytes.shape, generator=rng, dtype=torch.uint8)
    for filled in (noise.to(device), torch.zeros_like(workspace.bytes)):
        workspace.bytes.copy_(filled)
        assert_same_bits(call(args).cpu(), first)
    assert not workspace.holds_a_word_of_arrival()


def test_calls_follow_each_other_without_a_wait(device, rng, monkeypatch):
    """Two hundred calls over one workspace, the results of each checked at the end."""
    workspace = Workspace(monkeypatch)
    cases = [
        make_case([(1, n) for n in lengths], rng, heads=16, page_size=64)
        for lengths in ((8192,), (3000, 2800), (600, 8100, 1))
    ]
    there = [[x.to(device) for x in case.args] for case in cases]
    outs = [call(there[turn % 3]) for turn in range(200)]
    first = [out.cpu() for out in outs[:3]]
    for case, got in zip(cases, first, strict=True):
        assert_right(case, got)
    for turn, out in enumerate(outs):
        assert_same_bits(out.cpu(), first[turn % 3])
    assert not workspace.holds_a_word_of_arrival()


def test_two_streams(device, rng):
    """Each call with a workspace of its own, as torch gives them: nobody waits for another."""
    cases = [make_case([(1, 8192)], rng, heads=16), make_case([(1, 600), (1, 8000)], rng, heads=16)]
    streams = [torch.cuda.Stream() for _ in cases]
    args = [[x.to(device) for x in case.args] for case in cases]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    for _ in range(50):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[which].append(decode_there(*args[which], softmax_scale=SCALE, max_seqlen_q=1))
    torch.cuda.synchronize()
    for which, case in enumerate(cases):
        first = got[which][0].cpu()
        assert_right(case, first)
        for out in got[which]:
            assert_same_bits(out.cpu(), first)


def batches(rows: int) -> Iterator[list[int]]:
    yield [600] * rows
    yield [1 + 37 * row for row in range(rows)]
    yield [8192, *[0] * (rows - 1)]
    yield [*[CUT] * (rows // 2), *[63] * (rows - rows // 2)]
    yield [600] * rows


@pytest.mark.parametrize("rows", [1, 4, 16, 17, 33])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_one_graph_serves_all_lengths(rows, page_size, device, rng):
    """Captured once: a row that was short becomes one that clusters share, and short again."""
    cases = [
        make_case([(1, n) for n in lengths], rng, heads=16, page_size=page_size)
        for lengths in batches(rows)
    ]
    pages = max(len(case.args[2]) for case in cases)
    columns = max(case.args[3].shape[1] for case in cases)
    nope, rope, cache, *_ = cases[0].args
    there = [x.to(device) for x in (nope, rope)]
    kept = torch.full((pages, *cache.shape[1:]), math.nan, dtype=cache.dtype, device=device)
    table = torch.full((rows, columns), 2**30, dtype=torch.int32, device=device)
    lens, starts = (cases[0].args[i].to(device) for i in (4, 5))
    out = torch.zeros_like(there[0])

    def load(case: Case) -> None:
        there[0].copy_(case.args[0])
        there[1].copy_(case.args[1])
        kept.fill_(math.nan)[: len(case.args[2])].copy_(case.args[2])
        table.fill_(2**30)[:, : case.args[3].shape[1]].copy_(case.args[3])
        lens.copy_(case.args[4])
        starts.copy_(case.args[5])
        out.fill_(math.nan)

    def step() -> None:
        decode_there(
            *there, kept, table, lens, starts, softmax_scale=SCALE, max_seqlen_q=1, out=out
        )

    load(cases[0])
    replay = record(step, device)
    for case in cases:
        load(case)
        replay()
        once = out.cpu()
        assert_right(case, once)
        out.fill_(math.nan)
        replay()
        assert_same_bits(out.cpu(), once)
