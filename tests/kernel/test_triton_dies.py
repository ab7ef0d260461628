"""Programs on chips of several dies: what they compute does not depend on where they run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernel.helpers import assert_same_bits
from tests.kernel.mla_cases import SCALE, make_case
from tests.kernel.triton_device import DEVICE, triton_module

dies = triton_module("dies")
mla = triton_module("mla")
attention = triton_module("attention")

pytestmark = pytest.mark.usefixtures("interpreter_widens_bfloat16")


def test_a_die_gets_pieces_that_stand_side_by_side() -> None:
    """Every piece is done once, whatever their number; each die, which is every so many-th program,
    does neighbours."""
    for count in (1, 2, 6, 8):
        for pieces in (1, 5, 8, 13, 64):
            programs = dies.programs_for(pieces, count)
            each = programs // count
            found = [program % count * each + program // count for program in range(programs)]
            assert sorted(found)[:pieces] == list(range(pieces)) and programs % count == 0
            for die in range(count):
                own = found[die::count]
                assert own == list(range(own[0], own[0] + each))


def test_only_amd_chips_of_several_dies_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Facts:
        gcnArchName = "gfx942:sramecc+:xnack-"
        multi_processor_count = 304

    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Facts)
    count = dies.count_dies.__wrapped__
    monkeypatch.setattr(torch.version, "hip", None)
    assert count(gpu) == 1
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert count(gpu) == 8 and count(torch.device("cpu")) == 1
    for arch, units, expected in (
        ("gfx942", 228, 6), ("gfx942", 38, 1), ("gfx950", 256, 8), ("gfx90a", 104, 1),
    ):  # fmt: skip
        monkeypatch.setattr(Facts, "gcnArchName", arch)
        monkeypatch.setattr(Facts, "multi_processor_count", units)
        assert count(gpu) == expected


@pytest.mark.parametrize("heads", [8, 40])
def test_splits_of_latents(heads: int, rng: torch.Generator, monkeypatch: Any) -> None:
    monkeypatch.setattr(mla, "_SPLIT_KEYS", 64)
    case = make_case([(1, 150), (2, 65), (1, 0)], rng, heads=heads)
    there = [x.to(DEVICE) for x in case.args]
    found = []
    for count in (1, 6, 8):
        monkeypatch.setattr(mla, "count_dies", lambda device, count=count: count)
        out = torch.full_like(there[0], math.nan)
        lse = torch.full(there[0].shape[:2], math.nan, device=DEVICE)
        mla.mla_decode(*there, SCALE, True, out, lse, any_split=False)
        found.append((out, lse))
    for out, lse in found[1:]:
        assert_same_bits(out.cpu(), found[0][0].cpu())
        assert_same_bits(lse.cpu(), found[0][1].cpu())
    assert not found[0][0].isnan().any()


@pytest.mark.parametrize(("kv_heads", "used"), [(4, 2), (3, 1)])
def test_options_of_a_prompt(
    kv_heads: int, used: int, rng: torch.Generator, monkeypatch: Any
) -> None:
    """On two dies the KV heads are shared out; three heads are not, for dies would differ."""
    lens = [150, 9]
    starts = torch.tensor([0, 150, 159], dtype=torch.int32, device=DEVICE)
    q, k, v = (
        torch.randn(sum(lens), n, 64, generator=rng).half().to(DEVICE)
        for n in (2 * kv_heads, kv_heads, kv_heads)
    )
    chosen = []
    found = []
    original = attention._choose_dies
    for count in (1, 2):
        monkeypatch.setattr(attention, "count_dies", lambda device, count=count: count)
        monkeypatch.setattr(
            attention, "_choose_dies", lambda *a: chosen.append(original(*a)) or chosen[-1]
        )
        out = torch.full_like(q, math.nan)
        attention.flash_attn_varlen(
            q, k, v, starts, starts, 0.125, True, -1, -1, 0.0, None, out, None
        )
        found.append(out)
    assert chosen == [1, used]
    assert_same_bits(found[1].cpu(), found[0].cpu())
    assert not found[0].isnan().any()
