"""How many kernels a call of the experts' products launches on Hopper, and in which order, by
torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

# As imported: what the tests of single ops patch copies too.
from radix_kernels import (
    capabilities,
    fused_experts,
    m_grouped_gemm_contiguous,
    m_grouped_gemm_masked,
)
from tests.kernel import experts_cases

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _hopper(request, monkeypatch) -> None:
    if request.config.getoption("--device") != "cuda" or capabilities()["isa"] != "sm_90":
        pytest.skip("Hopper's kernels alone")
    monkeypatch.setattr("radix_kernels.moe._triton_is_faster", lambda *_: False)


def launched(call: Callable[[], object]) -> list[str]:
    """The library's kernels of a call, by the time at which they began."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [
        event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    if not events:
        pytest.skip("the profiler sees no kernels here")
    events.sort(key=lambda event: event.time_range.start)
    names = (re.search(r"\bradix::.*?(\w+_kernel)\b", event.name) for event in events)
    return [name[1] for name in names if name]


@pytest.mark.parametrize("scales", ["", "tensor", "block"])
def test_experts_of_few_pairs(scales, rng):
    case = experts_cases.make(3, 8, 2, 256, 128, BF16, rng, scales=scales)
    args = [x.cuda() for x in (case.x, case.w1, case.w2, case.weights, case.ids)]
    options = {name: scale.cuda() for name, scale in case.options.items()}
    assert launched(lambda: fused_experts(*args, **options)) == [
        "grouped_mma_m16_up_kernel",
        "grouped_mma_m16_down_kernel",
    ]


@pytest.mark.parametrize("fp8", [False, True])
def test_grouped_products(fp8, rng):
    x, weight = (
        torch.randn(shape, generator=rng).to(FP8 if fp8 else BF16)
        for shape in ((512, 256), (2, 128, 256))
    )
    scales = (
        {"x_scale": torch.ones(512, 2).cuda(), "weight_scale": torch.ones(2, 1, 2).cuda()}
        if fp8
        else {}
    )
    x, weight = x.cuda(), weight.cuda()
    groups = torch.arange(2, dtype=torch.int32).repeat_interleave(256).cuda()
    persistent = ["contiguous_kernel", "grouped_persistent_kernel"]
    found = launched(lambda: m_grouped_gemm_contiguous(x, weight, groups, **scales))
    assert found == (persistent if fp8 else ["prepare_kernel", "grouped_swap_ab_kernel"])
    if not fp8:
        counts = torch.tensor([256, 100], dtype=torch.int32).cuda()
        assert launched(
            lambda: m_grouped_gemm_masked(x.unflatten(0, (2, 256)), weight, counts)
        ) == ["grouped_swap_ab_kernel"]
