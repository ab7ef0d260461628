"""Messages about memory that ran out: for what, how much there is, and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from radix_runtime import Engine
from radix_runtime.config import ServerArgs
from radix_runtime.device import Device, Memory, OutOfMemory
from radix_runtime.engine.memory_advice import Stage, no_memory
from radix_runtime.engine.model_runner import ModelRunner
from radix_runtime.errors import EngineDeadError
from tests.runtime.tiny_models import reference_model, save

GIB = 1 << 30
WANTED = OutOfMemory("Tried to allocate 10.00 GiB")


class Gpu(Device):
    """One of 100 GiB, of which one is free."""

    def memory(self) -> Memory:
        return Memory(total=100 * GIB, available=GIB)


GPU = Gpu("cuda", torch.device("cuda", 0))
ARGS = ServerArgs(max_running_requests=256, chunked_prefill_size=16384, tp_size=2)
HEAD = "not enough memory on cuda:0 for "
FREE = "; 1.00 of 100.00 GiB are free; "


@pytest.mark.parametrize(
    ("stage", "settings", "text"),
    [
        (
            Stage.WEIGHTS,
            {},
            "raise --tp-size (now 2) or lower --max-running-requests (now 256) or quantize the "
            "weights (--quantization)",
        ),
        (
            Stage.STEPS,
            {},
            "lower --chunked-prefill-size (now 16384) or lower --max-running-requests (now 256) or "
            "raise --tp-size (now 2)",
        ),
        (
            Stage.GRAPHS,
            {"cuda_graph_max_bs": 64},
            "lower --cuda-graph-max-bs (now 64) or lower --mem-fraction-static (now 0.95) to 0.85 "
            "or set --disable-cuda-graph",
        ),
        (
            Stage.KV_CACHE,
            {"mem_fraction_static": 0.9},
            "lower --mem-fraction-static (now 0.9) to 0.80 or lower --max-running-requests "
            "(now 256)",
        ),
        (
            Stage.KV_CACHE,
            {"max_total_tokens": 999},
            "lower --max-total-tokens (now 999) or lower --max-running-requests (now 256)",
        ),
        (
            Stage.SERVING,
            {},
            "lower --mem-fraction-static (now 0.95) to 0.85 or lower --chunked-prefill-size "
            "(now 16384) or lower --max-running-requests (now 256)",
        ),
    ],
)
def test_flag_direction_and_amount(stage: Stage, settings: dict[str, Any], text: str) -> None:
    message = no_memory(replace(ARGS, **settings), GPU, stage, WANTED)
    assert message == f"{HEAD}{stage.value}: {WANTED.wanted}{FREE}{text}"


@pytest.mark.parametrize("wanted", ["", "Tried to allocate 95.00 GiB", "Tried to allocate 2 MiB"])
def test_no_share_is_advised_that_is_unknown_or_senseless(wanted: str) -> None:
    message = no_memory(ARGS, GPU, Stage.SERVING, OutOfMemory(wanted))
    assert "lower --mem-fraction-static (now 0.95) or lower --chunked" in message


def test_a_step_that_runs_out_of_memory_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(runner: ModelRunner, plan: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has")

    folder = save(reference_model("qwen3_tied_odd"), tmp_path)
    with Engine(folder, device="cpu", max_total_tokens=512) as engine:
        monkeypatch.setattr(ModelRunner, "forward", full)
        with pytest.raises(EngineDeadError, match=r"Tried to allocate 1.50 GiB; .*lower --mem-fra"):
            engine.generate(input_ids=[3, 4])
