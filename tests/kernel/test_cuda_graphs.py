"""A captured graph of attention or MLA serves other lengths, pages and values; one op follows
another without a wait.

With `--device cuda` the steps are captured once and replayed; on the CPU the same steps run as they
are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

# As imported: what the tests of single ops patch copies and waits, which a capture does not allow.
from radix_kernels import (
    accept_tokens,
    fill_step_tensors,
    flash_attn_with_kvcache,
    merge_state,
    mla_decode,
    reference,
    store_kv_cache,
    store_mla_kv,
)
from tests.kernel import mla_cases
from tests.kernel.attention_cases import Case, make_case, oracle
from tests.kernel.helpers import ATTENTION, assert_close, spread
from tests.kernel.step_cases import (
    POISON,
    expected_accept,
    expected_fill,
    random_samples,
    random_step,
)

BF16 = torch.bfloat16
PAGES = 400
PAGE_SIZE = 16
WIDTH = 170
SCALE = 192**-0.5


@pytest.fixture
def device(request) -> str:
    chosen = request.config.getoption("--device")
    if chosen == "cupy":
        pytest.skip("torch's graphs")
    return chosen


def record(step: Callable[[], None], device: str) -> Callable[[], None]:
    """Runs the step once, for what compiles or loads at the first call, and captures it."""
    if device == "cpu":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@dataclass
class Rows:
    """The pages, lengths and new tokens of a batch, at fixed addresses."""

    table: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor

    @staticmethod
    def empty(batch: int, tokens: int, device: str) -> Rows:
        return Rows(
            table=torch.zeros(batch, WIDTH, dtype=torch.int32, device=device),
            lens=torch.zeros(batch, dtype=torch.int32, device=device),
            starts=torch.zeros(batch + 1, dtype=torch.int32, device=device),
            slots=torch.full((tokens,), -1, device=device),
        )

    def load(self, table: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor) -> list[int]:
        """Takes them over, and returns the slots of the rows' last tokens, which the step is to
        store."""
        self.table.fill_(2**30)
        self.table[:, : table.shape[1]].copy_(table)
        self.lens.copy_(lens)
        self.starts.copy_(starts)
        slots = []
        for row, (kv_len, count) in enumerate(
            zip(lens.tolist(), starts.diff().tolist(), strict=True)
        ):
            slots += [
                int(table[row, t // PAGE_SIZE]) * PAGE_SIZE + t % PAGE_SIZE
                for t in range(kv_len - count, kv_len)
            ]
        self.slots.copy_(torch.tensor(slots, dtype=torch.int64))
        return slots


# (new tokens, tokens) of the rows and the tokens of a prefix that they see besides, for each
# replay.
DECODE = [
    ([(1, 1), (1, 2), (1, 3), (1, 17)], [5, 0, 16, 1]),
    ([(1, 2500), (1, 1), (1, 600), (1, 64)], [0, 700, 3, 0]),
    ([(1, 30), (1, 1300), (1, 1), (1, 512)], [513, 0, 0, 40]),
]
PREFILL = [
    ([(33, 33), (47, 90), (20, 21)], [0, 40, 1]),
    ([(98, 500), (1, 1), (1, 700)], [129, 0, 300]),
    ([(2, 1000), (3, 3), (95, 128)], [64, 64, 0]),
]


class Attention:
    """Stores new tokens, attends to a row's own pages and to its prefix's, joins both, and attends
    with the result."""

    def __init__(self, batch: int, tokens: int, hint: int, device: str) -> None:
        heads = 4
        kv_heads = 2
        dim = 128
        self.q, self.out, self.again = (
            torch.zeros(tokens, heads, dim, dtype=BF16, device=device) for _ in range(3)
        )
        self.k, self.v = (
            torch.zeros(tokens, kv_heads, dim, dtype=BF16, device=device) for _ in range(2)
        )
        shape = PAGES, PAGE_SIZE, kv_heads, dim
        self.k_cache = torch.zeros(shape, dtype=BF16, device=device)
        self.v_cache = torch.zeros(shape, dtype=BF16, device=device)
        self.lse = torch.zeros(tokens, heads, device=device)
        self.own, self.prefix = (Rows.empty(batch, stored, device) for stored in (tokens, 0))
        self.hint = hint

    def step(self) -> None:
        caches = self.k_cache, self.v_cache
        own = *caches, self.own.table, self.own.lens, self.own.starts
        prefix = *caches, self.prefix.table, self.prefix.lens, self.own.starts
        options: dict[str, Any] = {"return_softmax_lse": True, "max_seqlen_q": self.hint}
        store_kv_cache(self.k, self.v, *caches, self.own.slots)
        a, lse_a = flash_attn_with_kvcache(self.q, *own, **options)
        b, lse_b = flash_attn_with_kvcache(self.q, *prefix, causal=False, **options)
        merge_state(a, lse_a, b, lse_b, out=self.out, lse=self.lse)
        flash_attn_with_kvcache(self.out, *own, max_seqlen_q=self.hint, out=self.again)

    def load(self, own: Case, prefix: Case) -> None:
        first = len(own.k_cache)
        slots = self.own.load(own.page_table, own.kv_lens, own.cu_seqlens_q)
        self.prefix.load(
            prefix.page_table + first, prefix.kv_lens, torch.zeros_like(own.cu_seqlens_q)
        )
        for cache, new, mine, shared in (
            (self.k_cache, self.k, own.k_cache, prefix.k_cache),
            (self.v_cache, self.v, own.v_cache, prefix.v_cache),
        ):
            pages = torch.full(cache.shape, math.nan, dtype=BF16)
            pages[:first] = mine
            pages[first : first + len(shared)] = shared
            tokens = pages.flatten(0, 1)
            new.copy_(tokens[slots])
            tokens[slots] = math.nan
            cache.copy_(pages)
        for x, value in (
            (self.q, own.q),
            (self.out, math.nan),
            (self.lse, math.nan),
            (self.again, math.nan),
        ):
            if isinstance(value, torch.Tensor):
                x.copy_(value)
            else:
                x.fill_(value)


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_attention(kind, device, rng):
    replays, hint = (DECODE, 1) if kind == "decode" else (PREFILL, 98)
    rows = replays[0][0]
    state = Attention(batch=len(rows), tokens=sum(n for n, _ in rows), hint=hint, device=device)
    sizes = {"heads": (4, 2), "dim": 128, "page_size": PAGE_SIZE, "dtype": BF16}
    run = None
    for rows, shared in [*replays, replays[0]]:
        own = make_case(rows, rng, **sizes)
        prefix = make_case([(0, n) for n in shared], rng, **sizes)
        state.load(own, prefix)
        run = run or record(state.step, device)
        state.load(own, prefix)
        run()
        both = replace(
            own,
            keys=[torch.cat(pair) for pair in zip(prefix.keys, own.keys, strict=True)],
            values=[torch.cat(pair) for pair in zip(prefix.values, own.values, strict=True)],
        )
        expected, lse = oracle(both)
        got = state.out.cpu()
        assert_close("merge_state", got, expected, (8e-3, 5e-2))
        assert_close("merge_state lse", state.lse.cpu(), lse, (4e-6, 2e-5))
        expected, _ = oracle(replace(own, q=got))
        assert_close("flash_attn_with_kvcache", state.again.cpu(), expected, ATTENTION[BF16])


class Mla:
    """Stores new tokens, attends, and attends with the result."""

    def __init__(
        self, batch: int, heads: int, fp8: bool, batch_invariant: bool, device: str
    ) -> None:
        self.nope, self.rope = (
            torch.zeros(batch, heads, n, dtype=BF16, device=device) for n in (512, 64)
        )
        self.latent, self.key = (
            torch.zeros(batch, n, dtype=BF16, device=device) for n in (512, 64)
        )
        width, dtype = (656, torch.uint8) if fp8 else (576, BF16)
        self.cache = torch.zeros(PAGES, PAGE_SIZE, width, dtype=dtype, device=device)
        self.out, self.again = (torch.zeros_like(self.nope) for _ in range(2))
        self.rows = Rows.empty(batch, batch, device)
        self.options: dict[str, Any] = {
            "softmax_scale": SCALE,
            "max_seqlen_q": 1,
            "batch_invariant": batch_invariant,
        }

    def step(self) -> None:
        rows = self.rows.table, self.rows.lens, self.rows.starts
        store_mla_kv(self.latent, self.key, self.cache, self.rows.slots)
        mla_decode(self.nope, self.rope, self.cache, *rows, **self.options, out=self.out)
        mla_decode(self.out, self.rope, self.cache, *rows, **self.options, out=self.again)

    def load(self, lens: list[int], rng: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Random queries and tokens; returns the caches, the stored tokens in place, and the page
        table and lengths."""
        fp8 = self.cache.dtype == torch.uint8
        needed = [-(-n // PAGE_SIZE) for n in lens]
        table = torch.full((len(lens), max(needed)), 2**30, dtype=torch.int32)
        free = torch.randperm(PAGES, generator=rng)
        for row, count in enumerate(needed):
            table[row, :count] = free[:count].int()
            free = free[count:]
        args = (
            table,
            torch.tensor(lens, dtype=torch.int32),
            torch.arange(len(lens) + 1, dtype=torch.int32),
        )
        slots = self.rows.load(*args)
        tokens = spread((PAGES * PAGE_SIZE, 576), BF16, rng)
        whole = reference.pack_mla_tokens(tokens[:, :512], tokens[:, 512:]) if fp8 else tokens
        before = whole.clone()
        before[slots] = 255 if fp8 else math.nan
        self.cache.copy_(before.view(self.cache.shape))
        self.latent.copy_(tokens[slots, :512])
        self.key.copy_(tokens[slots, 512:])
        for x in (self.nope, self.rope):
            x.copy_(spread(x.shape, BF16, rng))
        self.out.fill_(math.nan)
        self.again.fill_(math.nan)
        return (whole.view(self.cache.shape), *args)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_mla(heads, fp8, batch_invariant, device, rng):
    replays = [[1, 2, 17, 40], [2700, 1, 600, 64], [30, 1300, 1, 2713], [3, 3, 3, 3]]
    if device == "cpu":
        if heads > 16 or batch_invariant:
            pytest.skip("the reference has one way for all of these")
        heads = 2
        replays = replays[::3]
    state = Mla(batch=4, heads=heads, fp8=fp8, batch_invariant=batch_invariant, device=device)
    run = None
    for lens in replays:
        seen = state.load(lens, rng)
        if run is None:
            run = record(state.step, device)
            seen = state.load(lens, rng)
        run()
        cache = reference.unpack_mla_cache(seen[0], torch.float64)
        table = seen[1].long()
        # Hopper's way with many rows rounds a widened token to bfloat16.
        if heads > 16 and not batch_invariant:
            cache = cache.to(BF16).double()
        tokens = [
            cache[table[row, : -(-n // PAGE_SIZE)]].flatten(0, 1)[:n] for row, n in enumerate(lens)
        ]
        for nope, out in ((state.nope, state.out), (state.out, state.again)):
            case = mla_cases.Case((nope.cpu(), state.rope.cpu(), *seen), tokens)
            expected = mla_cases.oracle(case)[0]
            assert_close(
                "mla_decode", out.cpu(), expected, ATTENTION[BF16], mla_cases.amplitude(case)
            )


def test_calls_in_a_row_without_a_wait(device, rng):
    """Six steps over caches of their own, again and again: a kernel begins before the one ahead has
    ended."""
    rows, shared = DECODE[1]
    sizes = {"heads": (4, 2), "dim": 128, "page_size": PAGE_SIZE, "dtype": BF16}
    states = []
    expected = []
    for _ in range(6):
        states.append(Attention(batch=len(rows), tokens=len(rows), hint=1, device=device))
        states[-1].load(
            make_case(rows, rng, **sizes), make_case([(0, n) for n in shared], rng, **sizes)
        )
        states[-1].step()
        expected.append((states[-1].out.clone(), states[-1].again.clone()))
    if device != "cpu":
        torch.cuda.synchronize()
    for _ in range(2 if device == "cpu" else 20):
        for state in states:
            state.out.fill_(math.nan)
            state.again.fill_(math.nan)
        for state in states:
            state.step()
    for state, (out, again) in zip(states, expected, strict=True):
        assert torch.equal(state.out, out) and torch.equal(state.again, again)


def test_step_tensors(device, rng):
    """A decode step's tensors, and what it accepts, from other lengths, pages and tokens."""
    sizes = {"decodes": 5, "chunks": 0, "padding": 3, "page_size": 16, "spare": 2}
    held = random_step(rng, **sizes)
    *given, page_size = [x.to(device) if isinstance(x, torch.Tensor) else x for x in held.given]
    made = {name: x.to(device) for name, x in held.made.items()}
    drawn = random_samples(rng, 5, most=1, ragged=False)
    accepted = [x.to(device) for x in drawn.given]

    def step() -> None:
        fill_step_tensors(*given, page_size, **made)
        accept_tokens(*accepted)

    run = None
    for _ in range(4):
        fresh = random_step(rng, **sizes)
        samples = random_samples(rng, 5, most=1, ragged=False)
        # The first run is the one that is recorded.
        for _ in range(1 if run else 2):
            for there, x in zip(
                [*given, *accepted], [*fresh.given[:-1], *samples.given], strict=True
            ):
                there.copy_(x)
            for x in made.values():
                x.fill_(POISON)
            run = run or record(step, device)
        run()
        expected = expected_fill(fresh)
        assert given[4].tolist()[:-1] == expected.pop("committed_len")[:-1]
        assert {name: x.tolist() for name, x in made.items()} == expected
        _, next_token, committed = expected_accept(samples, all_drawn=False)
        assert accepted[3].tolist() == next_token and accepted[4].tolist() == committed
