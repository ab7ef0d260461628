"""Pools whose pages are one piece of memory: the layout, and the bits of a pool that is layer
first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from radix_runtime.device import Device
from radix_runtime.memory import kv_pool
from radix_runtime.memory.kv_layout import KvLayout, KvPart
from radix_runtime.memory.kv_pool import KVPool
from tests.runtime.family_models import Checkpoints
from tests.runtime.tiny_models import Driver, Sequence, random_ids

CPU = Device.resolve("cpu")


def uneven_layout() -> KvLayout:
    """Layers of two shapes and types, with parts that are no multiple of 16 bytes."""
    small = [
        KvPart(name="k", shape=(3, 20), dtype=torch.int8),
        KvPart(name="v", shape=(3, 20), dtype=torch.int8),
        KvPart(name="k_scale", shape=(3,), dtype=torch.float32),
        KvPart(name="v_scale", shape=(3,), dtype=torch.float32),
    ]
    latent = KvPart(name="latent", shape=(36,), dtype=torch.bfloat16)
    layers = (tuple(small), (latent,), tuple(small))
    return KvLayout(page_size=3, query_dtype=torch.bfloat16, layers=layers)


def test_a_page_is_one_piece() -> None:
    layout = uneven_layout()
    assert layout.page_bytes == 2 * (2 * 192 + 2 * 48) + 224
    pool = KVPool(layout, num_pages=4, device=CPU, _page_first=True)
    assert pool.pages is not None and pool.pages.shape == (5, layout.page_bytes)
    assert pool.pages.is_contiguous() and not pool.pages.any()
    views = list(pool.tensors())
    assert len(views) == 9
    for number, view in enumerate(views):
        assert view.data_ptr() % 16 == 0 and view.stride(0) * view.itemsize % 16 == 0
        assert view.stride(-1) == 1 and not view.view(torch.uint8).any()
        view[2].view(torch.uint8).fill_(number + 1)
    for number, view in enumerate(views):  # none lies over another
        assert (view[2].view(torch.uint8) == number + 1).all()
    copied = pool.pages[2].clone()
    assert not pool.pages[[0, 1, 3, 4]].any()
    pool.pages.zero_()
    pool.pages[3] = copied
    for number, view in enumerate(views):
        assert (view[3].view(torch.uint8) == number + 1).all() and not view[2].any()


def test_shapes_do_not_depend_on_the_order() -> None:
    layout = uneven_layout()
    first, second = (
        KVPool(layout, num_pages=4, device=CPU, _page_first=order) for order in (False, True)
    )
    assert first.pages is None
    for a, b in zip(first.tensors(), second.tensors(), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype


def test_the_device_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "PAGE_FIRST", ("cuda",))
    assert KVPool(uneven_layout(), num_pages=1, device=CPU).pages is None
    monkeypatch.setattr(kv_pool, "PAGE_FIRST", ("cpu",))
    assert KVPool(uneven_layout(), num_pages=1, device=CPU).pages is not None


def logits_of(folder: Path, kv_dtype: torch.dtype, page_size: int, backend: str) -> torch.Tensor:
    """Of a prompt, of two sequences in chunks and of decode steps, all together."""
    driver = Driver(folder, kv_dtype=kv_dtype, page_size=page_size, backend=backend)
    ids = random_ids(driver.config, 90, seed=5)
    rows = [Sequence(row, ids[row:]) for row in range(3)]
    steps = [
        [(rows[0], 40)],
        [(rows[0], 1), (rows[1], 30)],
        [(rows[0], 1), (rows[1], 20), (rows[2], 9)],
        [(row, 1) for row in rows],
    ]
    found = [driver.step(work) for work in steps]
    return torch.cat([logits for logits in found if logits is not None])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("name", "kv_dtype", "backend"),
    [
        ("qwen3", torch.float32, "paged"),
        ("qwen3", torch.int8, "paged"),
        ("llama", torch.float32, "torch_native"),
        ("llama", torch.int8, "torch_native"),
        ("deepseek_v3", torch.float32, "paged"),
        ("deepseek_v3", torch.float32, "torch_native"),
    ],
)
def test_the_order_changes_no_bit(
    checkpoint: Checkpoints,
    name: str,
    kv_dtype: torch.dtype,
    backend: str,
    page_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, _ = checkpoint(name)
    found = []
    for order in ((), ("cpu",)):
        monkeypatch.setattr(kv_pool, "PAGE_FIRST", order)
        found.append(logits_of(folder, kv_dtype, page_size, backend))
    assert torch.isfinite(found[0]).all() and torch.equal(found[0], found[1])
