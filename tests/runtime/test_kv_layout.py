"""What the KV cache holds of each token, by the model's spec."""

from __future__ import annotations

import pytest
import torch

from radix_runtime import ops
from radix_runtime.device import Device
from radix_runtime.errors import ConfigError
from radix_runtime.memory.kv_layout import KvLayout, kv_dtype_named, kv_layout
from radix_runtime.memory.kv_pool import KVPool
from radix_runtime.specs import Gqa, Layer, Mla, Mlp, ModelSpec, RmsNorm, Rope
from tests.runtime.pools import gqa_layout

CPU = Device.resolve("cpu")


def test_keys_and_values() -> None:
    layout = gqa_layout(
        num_layers=3, page_size=4, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16
    )
    pool = KVPool(layout, num_pages=5, device=CPU)
    assert len(pool.k) == len(pool.v) == 3 and pool.dummy_page == 5 and not pool.latent
    assert all(t.shape == (6, 4, 2, 16) and not t.any() for t in pool.tensors())
    held = sum(t.nbytes for t in pool.tensors())
    assert held == 6 * layout.page_bytes


def test_layers_that_differ() -> None:
    layers = [gqa_layer(4, 32), gqa_layer(1, 64)]
    layout = layout_of(layers, torch.float16, page_size=8, ranks=2)
    assert layout.page_bytes == 8 * 2 * (2 * 2 * 32 + 2 * 1 * 64)
    pool = KVPool(layout, num_pages=3, device=CPU)
    assert pool.k[0].shape == (4, 8, 2, 32) and pool.v[1].shape == (4, 8, 1, 64)


def test_latents() -> None:
    """One row a token, whole on every rank."""
    layers = [mla_layer()] * 3
    layout = layout_of(layers, torch.bfloat16, page_size=16, ranks=4)
    assert layout.page_bytes == 3 * 16 * 576 * 2
    pool = KVPool(layout, num_pages=2, device=CPU)
    assert not pool.k and [t.shape for t in pool.tensors()] == [(3, 16, 576)] * 3
    mixed = [*layers, gqa_layer(2, 16)]
    with pytest.raises(ConfigError, match="latent attention in some layers only"):
        spec_of(mixed)


def test_int8_has_a_scale_for_each_token_and_head() -> None:
    layout = layout_of([gqa_layer(4, 32)], torch.int8, page_size=8, ranks=2)
    assert layout.query_dtype == torch.bfloat16
    assert layout.page_bytes == 8 * 2 * 2 * (32 + 4)
    pool = KVPool(layout, num_pages=3, device=CPU)
    assert pool.k[0].dtype == torch.int8 and pool.k_scale[0].shape == (4, 8, 2)
    assert sum(t.nbytes for t in pool.tensors()) == 4 * layout.page_bytes


def test_fp8_has_one_scale() -> None:
    layout = layout_of([gqa_layer(4, 32)] * 2, torch.float8_e4m3fn, page_size=8, ranks=1)
    assert layout.page_bytes == 2 * 8 * 2 * 4 * 32
    pool = KVPool(layout, num_pages=3, device=CPU)
    assert pool.v_scale[1].tolist() == [1.0] and len([*pool.tensors()]) == 4


def test_fp8_of_an_mi300_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its format by the name that --kv-cache-dtype has for both; scales are twice OCP's."""
    assert kv_dtype_named("fp8_e4m3", torch.bfloat16) == torch.float8_e4m3fn
    monkeypatch.setattr(ops, "fp8_format", lambda: "float8_e4m3fnuz")
    kv_dtype = kv_dtype_named("fp8_e4m3", torch.bfloat16)
    assert kv_dtype == torch.float8_e4m3fnuz
    assert kv_dtype_named("auto", torch.bfloat16) == torch.bfloat16
    layout = layout_of([gqa_layer(4, 32)] * 2, kv_dtype, page_size=8)
    assert layout.query_dtype == torch.bfloat16 and layout.page_bytes == 2 * 8 * 2 * 4 * 32
    pool = KVPool(layout, num_pages=3, device=CPU)
    assert pool.k[0].dtype == kv_dtype and pool.k_scale[1].tolist() == [2.0]
    scale = torch.tensor([0.75])
    pool.calibrate("k", 1, scale)
    assert pool.k_scale[1].tolist() == [1.5] and scale.tolist() == [0.75]
    assert pool.k_scale[0].tolist() == pool.v_scale[1].tolist() == [2.0]
    latents = layout_of([mla_layer()], kv_dtype, page_size=8)
    assert latents.layers[0][0].shape == (656,) and latents.scale_unit is None


def test_latents_in_fp8() -> None:
    layout = layout_of([mla_layer()], torch.float8_e4m3fn, page_size=8, ranks=2)
    (part,) = layout.layers[0]
    assert (part.shape, part.dtype) == ((656,), torch.uint8) and layout.scale_unit is None
    with pytest.raises(ConfigError, match="latent values have no INT8 form"):
        layout_of([mla_layer()], torch.int8)
    with pytest.raises(ConfigError, match="not 256 and 64 in bfloat16"):
        layout_of([mla_layer(latent_dim=256)], torch.float8_e4m3fn)


def layout_of(
    layers: list[Layer], kv_dtype: torch.dtype, *, page_size: int = 16, ranks: int = 1
) -> KvLayout:
    return kv_layout(
        spec_of(layers), kv_dtype=kv_dtype, dtype=torch.bfloat16, page_size=page_size, ranks=ranks
    )


def gqa_layer(num_kv_heads: int, head_dim: int) -> Layer:
    mixer = Gqa(
        num_heads=8,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=Rope(theta=1e4, rotary_dim=16),
        scale=1.0,
    )
    return Layer(mixer=mixer, feed_forward=Mlp(width=32), pre_norm=None)


def mla_layer(latent_dim: int = 512) -> Layer:
    mixer = Mla(
        num_heads=16,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        latent_dim=latent_dim,
        query_latent_dim=None,
        rope=Rope(theta=1e4, rotary_dim=64),
        scale=1.0,
        norm=RmsNorm(eps=1e-6),
    )
    return Layer(mixer=mixer, feed_forward=Mlp(width=32), pre_norm=None)


def spec_of(layers: list[Layer]) -> ModelSpec:
    return ModelSpec(
        hidden_size=64,
        vocab_size=100,
        max_context=64,
        dtype="bfloat16",
        tied_head=True,
        final_norm=RmsNorm(eps=1e-6),
        layers=tuple(layers),
    )
