from __future__ import annotations

from dataclasses import dataclass

import pytest

from radix_runtime.config import ServerArgs
from radix_runtime.device import Memory
from radix_runtime.engine.model_runner import kv_pages
from radix_runtime.errors import ConfigError

GIB, MIB = 1 << 30, 1 << 20


@dataclass
class FakeDevice:
    available: int
    total: int = 64 * GIB
    is_cpu: bool = True

    def memory(self):
        return Memory(self.total, self.available)


def need(page=MIB, ranks=1, full=10**9, before=20 * GIB):
    return {"page_bytes": page, "ranks_here": ranks, "full_pages": full, "before": Memory(64 * GIB, before)}


@pytest.mark.parametrize(
    "settings, device, wanted, pages",
    [
        ({}, FakeDevice(16 * GIB), need(), 4096),  # a quarter of what is available
        ({}, FakeDevice(16 * GIB), need(ranks=2), 2048),  # the ranks share it
        ({}, FakeDevice(16 * GIB), need(full=100), 100),  # no more than can be used
        ({"model_path": None}, FakeDevice(16 * GIB), need(), 512),  # the demo model
        # Half of the 20 GiB that were there, 4 of them weights.
        ({"mem_fraction_static": 0.5}, FakeDevice(16 * GIB), need(), 6 * 1024),
        ({"mem_fraction_static": 0.5}, FakeDevice(16 * GIB), need(ranks=2), 3 * 1024),
        # A GPU: a share of all its memory, 10 of 80 GiB are in use.
        ({}, FakeDevice(70 * GIB, 80 * GIB, False), need(), int(80 * 1024 * 0.88) - 10 * 1024),
        ({"mem_fraction_static": 0.25}, FakeDevice(70 * GIB, 80 * GIB, False), need(), 10 * 1024),
        ({"max_total_tokens": 33}, FakeDevice(16 * GIB), need(), 3),
        ({"max_total_tokens": 32}, FakeDevice(16 * GIB), need(full=1), 2),
    ],
)
def test_pages(settings, device, wanted, pages, tmp_path):
    args = ServerArgs(**{"model_path": str(tmp_path), **settings})
    assert kv_pages(args, device, **wanted) == pages


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"max_total_tokens": 16 * 2000}, "needs 2000 MiB, 1024 MiB are available"),
        ({"mem_fraction_static": 0.1}, "no memory for a KV cache"),
    ],
)
def test_too_little_memory_is_said_with_numbers(settings, message, tmp_path):
    args = ServerArgs(model_path=str(tmp_path), **settings)
    with pytest.raises(ConfigError, match=message):
        kv_pages(args, FakeDevice(GIB), **need())
