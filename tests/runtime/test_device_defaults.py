"""Rows and tokens of a step follow the device where nobody has said them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from radix_runtime import Engine
from radix_runtime.config import ServerArgs
from radix_runtime.device import Device, Memory
from radix_runtime.engine.device_defaults import with_device_defaults
from radix_runtime.errors import ConfigError

GIB = 1 << 30


@dataclass
class Gpu:
    gib: float
    is_cpu: bool = False

    def memory(self) -> Memory:
        return Memory(total=int(self.gib * GIB), available=GIB)  # what is free does not count


@pytest.mark.parametrize(
    ("gib", "rows", "tokens"),
    [
        (139.8, 256, 16384),  # H200
        (79.1, 256, 8192),  # H100, A100 of 80 GB
        (39.4, 256, 4096),  # A100 of 40 GB
        (23.6, 256, 2048),  # RTX 4090
        (15.7, 128, 2048),
        (0.5, 128, 2048),
    ],
)
@pytest.mark.parametrize(
    "given", [{}, {"max_running_requests": 3}, {"chunked_prefill_size": -1}], ids=str
)
def test_a_gpu(
    gib: float, rows: int, tokens: int, given: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "resolve", lambda name, count: Gpu(gib))
    args = with_device_defaults(ServerArgs(**given))
    found = {
        "max_running_requests": args.max_running_requests,
        "chunked_prefill_size": args.chunked_prefill_size,
    }
    wanted: dict[str, Any] = {"max_running_requests": rows, "chunked_prefill_size": tokens}
    assert found == wanted | given
    assert (args.running_limit, args.step_tokens) == tuple(found.values())


def test_a_cpu() -> None:
    args = with_device_defaults(ServerArgs(device="cpu"))
    assert (args.max_running_requests, args.chunked_prefill_size) == (64, 512)
    settings = {"max_running_requests": 2, "max_total_tokens": 256, "num_threads": 1}
    with Engine(device="cpu", **settings) as engine:
        info = engine.get_server_info()
    assert (info["max_running_requests"], info["chunked_prefill_size"]) == (2, 512)


@pytest.mark.parametrize("size", [0, 1, 2, -2])
def test_a_step_is_never_as_small(size: int) -> None:
    with pytest.raises(ConfigError, match="--chunked-prefill-size must be -1 or at least 3"):
        ServerArgs(chunked_prefill_size=size).validate()
