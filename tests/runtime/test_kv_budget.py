from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

import pytest
import torch

from radix_runtime.batch import ForwardBatch
from radix_runtime.config import ServerArgs
from radix_runtime.device import Device, Memory
from radix_runtime.distributed import Communicator
from radix_runtime.engine.kv_budget import kv_pages
from radix_runtime.engine.model_runner import ModelRunner
from radix_runtime.errors import ConfigError
from radix_runtime.layers.attention import Attention
from radix_runtime.memory.kv_layout import KvLayout
from radix_runtime.memory.kv_pool import KVPool
from radix_runtime.model_config import ModelConfig

GIB, MIB = 1 << 30, 1 << 20


@dataclass
class FakeDevice:
    available: int
    total: int = 64 * GIB
    is_cpu: bool = True

    def memory(self):
        return Memory(self.total, self.available)


def need(page=MIB, ranks=1, full=10**9, before=20 * GIB):
    return {
        "page_bytes": page,
        "ranks": ranks,
        "full_pages": full,
        "before": Memory(64 * GIB, before),
    }


@pytest.mark.parametrize(
    "settings, device, wanted, pages",
    [
        ({}, FakeDevice(16 * GIB), need(), 4096),  # a quarter of what is available
        ({}, FakeDevice(16 * GIB), need(ranks=2), 2048),  # the ranks share it
        (
            {},
            FakeDevice(16 * GIB),
            need(full=100),
            400,
        ),  # prefixes are cached beside what requests can fill
        ({}, FakeDevice(16 * GIB), need(full=100, ranks=2), 400),
        (
            {"disable_radix_cache": True},
            FakeDevice(16 * GIB),
            need(full=100),
            100,
        ),  # no more than can be used
        ({"mem_fraction_static": 0.5}, FakeDevice(16 * GIB), need(full=100), 6 * 1024),  # asked for
        (
            {"mem_fraction_static": 0.5, "disable_radix_cache": True},
            FakeDevice(16 * GIB),
            need(full=100),
            100,
        ),
        (
            {"mem_fraction_static": 0.5},
            FakeDevice(24 * GIB),
            need(before=20 * GIB),
            10 * 1024,
        ),  # others gave some back
        (
            {},
            FakeDevice(70 * GIB, total=80 * GIB, is_cpu=False),
            need(full=100),
            (80 - 5) * 1024 - 10 * 1024,
        ),
        ({"model_path": None}, FakeDevice(70 * GIB, total=80 * GIB, is_cpu=False), need(), 512),
        ({"model_path": None}, FakeDevice(16 * GIB), need(), 512),  # the demo model
        # Half of the 20 GiB that were there, 4 of them weights.
        ({"mem_fraction_static": 0.5}, FakeDevice(16 * GIB), need(), 6 * 1024),
        ({"mem_fraction_static": 0.5}, FakeDevice(16 * GIB), need(ranks=2), 3 * 1024),
        # A GPU: a share of all its memory, 10 of 80 GiB are in use.
        (
            {},
            FakeDevice(70 * GIB, total=80 * GIB, is_cpu=False),
            need(),
            (80 - 5) * 1024 - 10 * 1024,
        ),
        (
            {"mem_fraction_static": 0.25},
            FakeDevice(70 * GIB, total=80 * GIB, is_cpu=False),
            need(),
            10 * 1024,
        ),
        ({"max_total_tokens": 33}, FakeDevice(16 * GIB), need(), 3),
        ({"max_total_tokens": 32}, FakeDevice(16 * GIB), need(full=1), 2),
    ],
)
def test_pages(settings, device, wanted, pages, tmp_path):
    args = ServerArgs(**{"model_path": str(tmp_path), **settings})
    assert kv_pages(args, device, **wanted) == pages


@dataclass(frozen=True)
class FakeGpu(Device):
    """The CPU, called a GPU: each step takes memory by its tokens, rows and scored rows, and keeps
    the most it took."""

    left: list[int] = field(default_factory=lambda: [16 * GIB])

    def memory(self):
        return Memory(20 * GIB, self.left[-1])

    def host_empty(self, *shape, dtype):
        return torch.empty(shape, dtype=dtype)

    def synchronize(self):
        pass


def run_on(gpu, folder, monkeypatch, step_bytes, **settings):
    """A runner on the fake GPU, and the (tokens, sampled rows, scored rows) of its steps before and
    after the pool."""
    steps, run = [], ModelRunner.run

    def counted(runner, plan):
        scored = sum(len(span.targets) // 4 for span in plan.logprob_spans)
        steps.append((plan.num_tokens, int(plan.num_samples.sum()), scored))
        if isinstance(gpu, FakeGpu):
            gpu.left.append(16 * GIB - max(map(step_bytes, steps)))
        return run(runner, plan)

    monkeypatch.setattr(ModelRunner, "run", counted)
    options = {
        "attention_backend": "torch_native",
        "load_format": "dummy",
        "mem_fraction_static": 0.5,
        **settings,
    }
    args = ServerArgs(model_path=str(folder), **options)
    config = ModelConfig.from_dir(folder)
    runner = ModelRunner(args, config, device=gpu, communicator=Communicator())
    return runner, steps


def make_gpu():
    return FakeGpu("cuda", torch.device("cpu"))


@pytest.fixture
def folder(tmp_path):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "max_position_embeddings": 1 << 15,
        **sizes,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_pool_of_a_gpu_leaves_room_for_the_largest_step(folder, monkeypatch):
    monkeypatch.setattr(KvLayout, "page_bytes", 64 * MIB)  # a small model, as if it were large
    runner, steps = run_on(
        make_gpu(),
        folder,
        monkeypatch,
        lambda s: s[0] * MIB,
        max_running_requests=8,
        chunked_prefill_size=2048,
    )
    assert steps == [(2048, 1, 1024), (8, 8, 0)] * 2  # the second pair with the pool there
    assert runner.kv_pool.num_pages == (10 - 4 - 2) * GIB // (64 * MIB)
    short, steps = run_on(make_gpu(), folder, monkeypatch, lambda s: s[0] * MIB, context_length=100)
    assert steps == [(100, 1, 100), (64, 64, 0)] * 2
    assert short.kv_pool.num_pages == (6 * GIB - 100 * MIB) // (64 * MIB)


@pytest.mark.parametrize(
    "chunk, context, page, tokens", [(32, 512, 64, 32), (64, 512, 16, 16), (64, 5, 16, 5)]
)
def test_on_a_cpu_small_steps_are_enough(chunk, context, page, tokens, folder, monkeypatch):
    sizes = {
        "chunked_prefill_size": chunk,
        "context_length": context,
        "page_size": page,
        "max_running_requests": 8,
    }
    _, steps = run_on(
        Device.resolve("cpu"), folder, monkeypatch, None, max_total_tokens=2048, **sizes
    )
    assert steps == [(tokens, 1, tokens), (1, 1, 0)]


@pytest.mark.parametrize("fails", [KVPool, ForwardBatch])
def test_a_gpu_without_room_is_told_with_the_flags(fails, folder, monkeypatch):
    def full(*args, **kwargs):
        raise torch.cuda.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 9 GiB. Process 7 has 70 GiB"
        )

    monkeypatch.setattr(fails, "__init__", full)
    with pytest.raises(
        ConfigError,
        match=r"not enough memory on cpu for the largest steps: Tried to allocate 9 GiB; "
        r"16.00 of 20.00 GiB are free; lower --chunked-prefill-size \(now 512\) or "
        r"lower --max-running-requests \(now \d+\) or raise --tp-size \(now 1\)",
    ):
        run_on(make_gpu(), folder, monkeypatch, lambda s: 0)


def test_a_cpu_without_room_is_told_with_the_flags(folder, monkeypatch):
    with pytest.raises(
        ConfigError,
        match=r"memory on cpu for the weights: tried to allocate \d+ bytes; .* are free; raise "
        r"--tp-size \(now 1\) or lower --max-running-requests \(now 1099511627776\)",
    ):
        run_on(Device.resolve("cpu"), folder, monkeypatch, None, max_running_requests=1 << 40)


def test_other_errors_stay_what_they_are(folder, monkeypatch):
    monkeypatch.setattr(KVPool, "__init__", lambda *_, **__: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        run_on(Device.resolve("cpu"), folder, monkeypatch, None)


@pytest.mark.parametrize(
    ("device", "tokens", "rows"), [("cpu", 100, 112), ("cpu", None, 512), ("cuda", 100, 512)]
)
def test_rotary_tables_reach_as_far_as_a_row_can(device, tokens, rows, folder, monkeypatch):
    """On a CPU no further than the pool; a GPU's first step is as long as the context."""
    where = make_gpu() if device == "cuda" else Device.resolve("cpu")
    monkeypatch.setattr(
        "radix_runtime.engine.model_runner.kv_pages", lambda *_, **__: 7
    )  # not half of the memory
    settings = {"context_length": 512, "max_total_tokens": tokens, "page_size": 16}
    runner, _ = run_on(where, folder, monkeypatch, lambda s: 0, **settings)
    tables = {tuple(m.rotary.shape) for m in runner.model.modules() if isinstance(m, Attention)}
    assert tables == {(rows, 16)}


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


def test_a_full_gpu_is_told_with_who_holds_it(tmp_path):
    """70 of 80 GiB were taken before the model, which took 6 more."""
    args = ServerArgs(model_path=str(tmp_path), mem_fraction_static=0.9)
    gpu = FakeDevice(4 * GIB, total=80 * GIB, is_cpu=False)
    wanted = {**need(page=2 * MIB), "before": Memory(80 * GIB, 10 * GIB)}
    with pytest.raises(ConfigError) as error:
        kv_pages(args, gpu, **wanted)
    said = str(error.value)
    assert "0.9 of the GPU's 80.00 GiB is 72.00 GiB" in said
    assert "70.00 GiB were in use before the model was loaded" in said
    assert "the model and its largest steps take 6.00 GiB; a page takes 2.0 MiB" in said
    assert not re.search(r"-\d", said) and "graphs" not in said
    with pytest.raises(ConfigError, match=r"CUDA graphs 3.00 GiB \(--cuda-graph-max-bs\)"):
        kv_pages(args, gpu, **wanted, reserved=3 * GIB)
    asked = ServerArgs(model_path=str(tmp_path), max_total_tokens=32)
    with pytest.raises(ConfigError, match="needs 4 MiB, 0 MiB are available"):
        kv_pages(asked, gpu, **wanted, reserved=5 * GIB)


def test_a_full_host_is_told_with_what_the_model_takes(tmp_path):
    args = ServerArgs(model_path=str(tmp_path), mem_fraction_static=0.1)
    with pytest.raises(ConfigError) as error:
        kv_pages(args, FakeDevice(16 * GIB), **need())
    said = str(error.value)
    assert "0.1 of 20.00 GiB of available memory is 2.00 GiB; the model takes 4.00 GiB" in said
    assert not re.search(r"-\d", said)
