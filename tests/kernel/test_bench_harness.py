"""A bench on the CPU: its input sets are larger than the caches, and no peer ends or holds up a
run."""

from __future__ import annotations

import json
import sys
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

import radix_kernels as rk
from bench.kernels import __main__ as command
from bench.kernels import harness, kv_layout, peers
from bench.kernels.families import FAMILIES
from bench.kernels.families.attention import attention
from bench.kernels.families.pointwise import pointwise
from bench.kernels.harness import Case, Contender, input_sets, measure

CPU = torch.device("cpu")

pytestmark = pytest.mark.cpu_only


def case(size: int, **contenders: Contender) -> Case:
    make = lambda: (torch.ones(size // 4),)  # noqa: E731
    return Case(
        op="op",
        shape="shape",
        dtype=torch.float32,
        bytes=size,
        flops=size,
        make_inputs=make,
        contenders={"radix": torch.Tensor.sum} | contenders,
    )


def as_list(result: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def fails(x: torch.Tensor) -> None:
    raise RuntimeError("not on this device\nand more")


def test_sets_rotate_until_they_leave_the_cache(monkeypatch):
    assert len(input_sets(case(1 << 18), CPU)) * (1 << 18) > harness.ROTATED_BYTES
    assert harness.MAX_SETS["cpu"] * (1 << 14) > 32 << 20  # small rows, in the L3 of most CPUs
    monkeypatch.setattr(harness, "MAX_SETS", {"cpu": 3})
    sets = input_sets(case(1 << 16), CPU)
    assert len(sets) == 3 and len({x.data_ptr() for (x,) in sets}) == 3


@pytest.mark.parametrize("cache", [1 << 10, 1 << 20])
def test_a_row_in_cache_says_so(cache, monkeypatch):
    monkeypatch.setattr(harness, "MAX_SETS", {"cpu": 4})
    monkeypatch.setattr(harness, "ROUND_SECONDS", 0.0)
    monkeypatch.setattr(harness, "last_level_cache", lambda: cache)
    assert measure(case(1 << 12), CPU).in_cache == (cache == 1 << 20)


def test_stores_go_to_slots_that_no_other_set_has():
    store = next(c for c in pointwise(CPU, torch.bfloat16) if c.op == "fused_qk_norm_rope_store")
    slots = torch.cat([store.make_inputs()[-1] for _ in range(1000)])
    assert len(slots.unique()) == 1000


def test_decode_rotates_over_more_as_memory_allows(monkeypatch):
    rotated = {c.shape: c.rotated for c in attention(CPU, torch.bfloat16)}
    assert rotated["B1 q1 kv1024 16/8x128"] == harness.DECODE_BYTES == 1 << 30
    assert rotated["B1 q128 kv128 16/8x128"] == harness.ROTATED_BYTES
    monkeypatch.setattr(harness, "ROTATED_BYTES", 1 << 20)
    row = case(1 << 18)
    row.rotated = 1 << 22
    for available, sets in ((1 << 40, 17), (1 << 23, 9), (0, 5)):
        monkeypatch.setattr(harness, "_available_memory", lambda available=available: available)
        assert len(input_sets(row, CPU)) == sets


def test_numbers_from_the_pool_differ():
    a, b = (harness.randn(3, (1 << 23) + 5, device=CPU, dtype=torch.bfloat16) for _ in range(2))
    assert a.shape == (3, (1 << 23) + 5) and not torch.equal(a, b)
    assert abs(a.float().std() - 1) < 0.01 and (a[:, -5:] != 0).any()


def test_no_library_for_gpus_is_asked_on_the_cpu(monkeypatch, capsys):
    # As if every library were installed.
    monkeypatch.setattr(peers, "_imported", lambda name: SimpleNamespace())
    monkeypatch.setattr(peers, "_enabled", False)
    # The KV caches stay small.
    monkeypatch.setattr(sys.modules[pointwise.__module__], "ROTATED_BYTES", 1 << 20)
    monkeypatch.setattr(rk, "set_num_threads", lambda n: None)
    for backend, offered in (("cpu", False), ("cuda", True)):
        monkeypatch.setattr(sys, "argv", ["bench", "all", "--backend", backend, "--peers"])
        command._parse()
        assert bool(peers.load("flashinfer")) == offered
        assert ("torch is the peer" in capsys.readouterr().out) != offered
        if not offered:
            rows = [
                c
                for family in ("pointwise", "mla", "moe")
                for c in FAMILIES[family](CPU, torch.bfloat16)
            ]
            assert {c.op for c in rows} >= {
                "layernorm",
                "fused_qk_norm_rope_store",
                "topk_softmax",
                "mla_decode",
            }
            assert {name for c in rows for name in c.contenders} == {"radix", "torch", "separate"}


def test_a_peer_that_fails_is_left_out_of_its_row(monkeypatch, capsys):
    monkeypatch.setattr(harness, "ROUND_SECONDS", 0.0)
    row = case(
        1 << 20,
        torch=torch.Tensor.sum,
        flashinfer=fails,
        planned=peers.planned(lambda: fails(torch.ones(1))),  # type: ignore[return-value]
    )
    assert set(measure(row, CPU).timings) == {"radix", "torch"}
    said = capsys.readouterr().out
    assert said.count("\n") == 2
    assert "no peer flashinfer for op shape: RuntimeError: not on this device\n" in said
    assert "no peer planned for op shape: RuntimeError: not on this device\n" in said
    with pytest.raises(RuntimeError, match="not on this device"):
        measure(case(1 << 20, radix=fails), CPU)


def test_a_peer_is_planned_once():
    plans = []

    def plan() -> Contender:
        plans.append(1)
        return torch.neg

    contender = peers.planned(plan)
    assert contender(torch.ones(1)) == contender(torch.ones(1)) == -1 and plans == [1]


def test_a_row_keeps_no_weights(monkeypatch):
    monkeypatch.setattr(harness, "ROUND_SECONDS", 0.0)
    weights = torch.ones(1)
    held = weakref.ref(weights)
    row = measure(case(1 << 20, torch=lambda x, weights=weights: weights), CPU)
    del weights
    assert held() is None and row.case.shape == "shape" and row.ratio("torch") > 0


def test_a_slow_contender_has_the_fewest_rounds(monkeypatch):
    monkeypatch.setattr(harness, "ROUND_SECONDS", 1e-3)
    calls = []

    def slow(x: torch.Tensor) -> None:
        calls.append(1)
        time.sleep(2e-3)

    timings = measure(case(1 << 22, torch=slow), CPU, slow_seconds=5e-3).timings
    assert timings["torch"].rounds == harness.MIN_ROUNDS and len(calls) == 1 + harness.MIN_ROUNDS
    assert measure(case(1 << 22), CPU).timings["radix"].rounds == harness.ROUNDS


@pytest.mark.parametrize(
    ("family", "op"),
    [
        ("pointwise", "layernorm"),
        ("moe", "topk_softmax"),
        ("moe", "moe_align_block_size"),
        ("linear", "linear"),
        ("linear", "linear w8a8"),
        ("linear", "linear int4"),
        ("linear", "linear fp8"),
    ],
)
def test_torch_does_what_we_do(family, op):
    row = next(c for c in FAMILIES[family](CPU, torch.bfloat16) if c.op == op)
    inputs = row.make_inputs()
    ours, theirs = (as_list(fn(*inputs)) for fn in row.contenders.values())
    assert set(row.contenders) == {"radix", "torch"} and len(ours) == len(theirs)
    if op == "moe_align_block_size":  # behind the used rows and blocks is garbage
        rows = int(ours[2])
        ours, theirs = ([x[0][:rows], x[1][: rows // 16], x[2]] for x in (ours, theirs))
    # Of two equal logits either may stand first: the weights say which were taken.
    if op == "topk_softmax":
        ours = ours[:1]
        theirs = theirs[:1]
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        error = (a.float() - b.float()).norm() / b.float().norm()
        assert error < (0.15 if "int4" in op else 0.03), float(error)


def test_both_orders_of_a_pool_are_all_of_its_memory():
    memory = torch.zeros(
        5 * 2 * 3 * 4 * 6 + 7, dtype=torch.bfloat16
    )  # 5 pages of 4 tokens and a bit
    pool = kv_layout.Pool(memory, layers=2, parts=3, shape=(2, 3))
    for order in kv_layout.FIRST:
        layers = pool.views(order, 4)
        assert [len(parts) for parts in layers] == [3, 3]
        for part in (part for parts in layers for part in parts):
            assert part.shape == (5, 4, 2, 3)
            part += 1
        assert (memory[:-7] == 1).all() and not memory[-7:].any()
        memory.zero_()
    a_page = [part[1] for parts in pool.views("page first", 4) for part in parts]
    starts = sorted(part.data_ptr() for part in a_page)
    assert starts[-1] - starts[0] == 5 * a_page[0].nbytes


@pytest.mark.parametrize("latent", [[], ["--latent"]])
def test_the_orders_of_a_pool_are_compared(latent, tmp_path, monkeypatch, capsys):
    for works in ("CPU_DECODE", "CPU_PREFILL", "CPU_STORE", "DECODE", "PREFILL"):
        small = [kv_layout.Work(rows=2, new=1, context=9)] * 2
        monkeypatch.setattr(kv_layout, works, small)
    report = tmp_path / "figures.json"
    sizes = "--gib 0.001 --layers 2 --page-sizes 1 4 --rounds 2 --seconds 0".split()
    lines = kv_layout.main([*sizes, "--json", str(report), *latent])
    written = json.loads(report.read_text())["rows"]
    assert [row["ratio"] for row in written] == [line.ratio for line in lines]
    assert len(lines) == (6 if latent else 16)
    assert all(set(line.timings) == set(kv_layout.FIRST) and line.ratio > 0 for line in lines)
    assert capsys.readouterr().out.count("2 x 1 tokens of 9") == len(lines)
    with pytest.raises(SystemExit, match="give a larger --gib"):
        kv_layout.main(["--gib", "0.00001", "--page-sizes", "16", "--layers", "1"])
