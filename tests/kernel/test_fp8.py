"""The FP8 format of the chip and weights in it."""

from __future__ import annotations

import pytest
import torch

import radix_kernels as rk
from radix_kernels import _checks, _dispatch, _loader

OCP = torch.float8_e4m3fn
FNUZ = torch.float8_e4m3fnuz


@pytest.fixture
def chip(monkeypatch):
    """A library of that backend on that chip."""

    def make(backend, isa):
        monkeypatch.setattr(_loader, "backend", backend)
        monkeypatch.setattr(_dispatch, "isa", lambda: isa)

    return make


@pytest.mark.parametrize(
    ("backend", "isa", "expected"),
    [
        ("rocm", "gfx942", "float8_e4m3fnuz"),
        ("rocm", "gfx950", "float8_e4m3fn"),
        ("rocm", "gfx90a", "float8_e4m3fn"),
        ("rocm", "no device", "float8_e4m3fn"),
        ("cuda", "sm_90", "float8_e4m3fn"),
        ("cpu", "avx2", "float8_e4m3fn"),
    ],
)
def test_format_of_a_chip(chip, backend, isa, expected):
    chip(backend, isa)
    assert rk.fp8_format() == expected


def test_every_code_keeps_its_value(chip):
    chip("rocm", "gfx942")
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scale = torch.rand(16, 1) + 0.5
    kept = codes.clone(), scale.clone()
    weight, doubled = rk.native_fp8(codes.view(OCP), scale)
    assert weight.dtype == FNUZ and weight.shape == codes.shape
    before = codes.view(OCP).double() * scale.double()
    after = weight.double() * doubled.double()
    assert torch.equal(before.isnan(), after.isnan())
    assert before.isnan().sum() == 2
    assert torch.equal(before.nan_to_num(), after.nan_to_num())
    assert (weight.view(torch.uint8) == 0x80).sum() == 2  # the NaNs alone
    assert torch.equal(codes, kept[0]) and torch.equal(scale, kept[1])


@pytest.mark.parametrize("shape", [(0, 16), (1,), (3, 5, 7)])
def test_shapes_and_strides(chip, shape):
    chip("rocm", "gfx942")
    wide = torch.randn(*shape[:-1], 2 * shape[-1]).to(OCP)
    view = wide[..., ::2]
    weight, scale = rk.native_fp8(view, torch.ones(1))
    assert weight.shape == view.shape
    assert torch.equal(weight.double() * scale.double(), view.double())


def test_the_very_tensors_where_formats_agree(chip):
    chip("rocm", "gfx950")
    weight = torch.randn(4, 16).to(OCP)
    scale = torch.ones(4)
    found = rk.native_fp8(weight, scale)
    assert found[0].data_ptr() == weight.data_ptr() and found[1].data_ptr() == scale.data_ptr()


def test_refused(chip):
    chip("rocm", "gfx942")
    with pytest.raises(TypeError, match="native_fp8: weight has dtype float8_e4m3fnuz"):
        rk.native_fp8(torch.zeros(4).to(FNUZ), torch.ones(1))
    with pytest.raises(TypeError, match="native_fp8: scale has dtype float64"):
        rk.native_fp8(torch.zeros(4).to(OCP), torch.ones(1, dtype=torch.float64))


def test_a_product_of_two_formats_names_the_converter():
    a = torch.zeros(16, 16).to(FNUZ)
    b = torch.zeros(16, 16).to(OCP)
    one = torch.ones(1)
    with pytest.raises(TypeError, match=r"mat_b has dtype .*e4m3fn, .*radix_kernels\.native_fp8"):
        rk.fp8_scaled_mm(a, b.t(), one, one)
    with pytest.raises(TypeError, match=r"native_fp8\(\)"):
        _checks.same_dtype("op", "x", a, "y", b)
    with pytest.raises(TypeError) as refusal:
        _checks.same_dtype("op", "x", a, "y", one)
    assert "native_fp8" not in str(refusal.value)
