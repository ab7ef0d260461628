"""Padded steps and their graphs, on a capture that runs the recorded work again on the CPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from radix_runtime import Engine, SamplingParams
from radix_runtime.batch import ForwardBatch
from radix_runtime.config import ServerArgs
from radix_runtime.engine.graph_sizes import choose_shapes
from radix_runtime.engine.graphs import StepGraphs
from radix_runtime.engine.model_runner import ModelRunner
from radix_runtime.errors import ConfigError
from radix_runtime.step_plan import Forward, RowSampling, StepPlan, decode_plan, prefill_plan
from radix_runtime.step_shape import StepShapes, default_decode_sizes, default_token_sizes
from tests.runtime.fake_graphs import FakeRecorder, install
from tests.runtime.family_models import random_model
from tests.runtime.tiny_models import reference_model, save

torch.set_num_threads(1)
T = TypeVar("T")
MAX_BATCH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference_model("qwen3_tied_odd"), tmp_path_factory.mktemp("model"))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    """Makes engines on the CPU pad their steps and capture them."""
    fake = FakeRecorder()
    install(fake, monkeypatch.setattr)
    return fake


def requests(seed: int) -> Iterator[tuple[list[int], SamplingParams, dict[str, Any]]]:
    """Prompts of one to many chunks, drawn and greedy, a few with edits and log-probabilities."""
    rng = random.Random(seed)
    for i in range(30):
        prompt = rng.choices(range(157), k=rng.choice([1, 2, 7, 30, 60, 100]))
        params = SamplingParams(
            temperature=rng.choice([0, 0.9]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([-1, 20]),
            frequency_penalty=rng.choice([0, 0, 0.5]),
            max_new_tokens=rng.randint(1, 12),
            ignore_eos=True,
            seed=i,
        )
        yield prompt, params


def answers(folder: Path, **settings: Any) -> list[Any]:
    options: dict[str, Any] = {
        "attention_backend": "torch_native",
        "max_running_requests": MAX_BATCH,
        "max_total_tokens": 1024,
        "chunked_prefill_size": 64,
        "page_size": 4,
        "check_invariants": "step",
    }
    with Engine(folder, device="cpu", **{**options, **settings}) as engine:
        found = []
        for logprobs in (False, True):
            prompts, params = zip(*requests(7), strict=True)
            found += engine.generate(
                input_ids=list(prompts), sampling_params=list(params), return_logprob=logprobs
            )
    return [(output["output_ids"], output["meta_info"]["finish_reason"]) for output in found]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"disable_overlap_schedule": True, "page_size": 1},
        {"cuda_graph_bs": [1, 4, 12], "chunked_prefill_size": 100},
        {"cuda_graph_max_bs": 3, "cuda_graph_max_tokens": 0},
        # Steps of more tokens than a row may have, and a bound beyond what a step may have.
        {"context_length": 120, "chunked_prefill_size": 250, "cuda_graph_max_tokens": 999},
        {"context_length": 120, "chunked_prefill_size": -1},
    ],
)
def test_captured_steps_give_the_same_tokens(
    folder: Path, recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    captured = answers(folder, **settings)
    assert recorder.recorded > 0 and recorder.replayed > 10
    with monkeypatch.context() as context:
        context.setattr(ModelRunner, "pads_steps", lambda runner, args: False)
        assert answers(folder, **settings) == captured


def test_captured_steps_with_sinks_windows_and_experts(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = save(random_model("gpt_oss"), tmp_path)
    captured = answers(folder)
    assert recorder.recorded > 0 and recorder.replayed > 10
    with monkeypatch.context() as context:
        context.setattr(ModelRunner, "pads_steps", lambda runner, args: False)
        assert answers(folder) == captured


class FreeMasks:
    """StepMasks that allow everything; the samples `late` have none."""

    def __init__(self, count: int, late: list[int]) -> None:
        self.words = np.full((count, 5), 0xFFFFFFFF, np.uint32)
        self.late = np.isin(np.arange(count), late)

    def take(self, forward: Forward) -> tuple[np.ndarray, np.ndarray]:
        return self.words, self.late


def test_late_masks_of_captured_steps(folder: Path, recorder: FakeRecorder) -> None:
    """A row without a mask stays where it was, beside padding and before a step that is replayed;
    the tokens are those of steps in which nobody was late."""

    def run(pattern: list[list[int]]) -> list[list[int]]:
        plan = prefill_plan([4, 1], [[3, 4, 5], [8, 9]], new_rows=new_rows)
        plan.page_rows = np.array([4, 4, 4, 1, 1, 1], np.int32)
        plan.page_index = np.array([0, 1, 2, 0, 1, 2], np.int32)
        plan.page_ids = np.arange(6, dtype=np.int32)
        found = [[int(token)] for token in engine.executor.launch(plan).result().ids]
        for step, late in enumerate(pattern):
            plan = decode_plan([4, 1], [4 + step, 3 + step])
            masks = FreeMasks(2, late) if late else None
            ids = engine.executor.launch(plan, masks).result().ids.tolist()
            for row in {0, 1} - set(late):
                found[row].append(ids[row])
        return found

    params = SamplingParams(temperature=0.9, frequency_penalty=0.5)
    new_rows = [RowSampling(row=row, seed=row, params=params) for row in (4, 1)]
    options: dict[str, Any] = {"max_running_requests": MAX_BATCH, "max_total_tokens": 1024}
    with Engine(
        folder, device="cpu", attention_backend="torch_native", page_size=4, **options
    ) as engine:
        expected = run([[], [], []])
        replayed = recorder.replayed
        first, second = run([[0], [], [1], [0], [], [1], []])
        assert recorder.replayed > replayed
    assert first[:4] == expected[0] and second[:4] == expected[1]


def test_disabled_graphs_pad_alike(folder: Path, recorder: FakeRecorder) -> None:
    padded = answers(folder, disable_cuda_graph=True)
    assert recorder.recorded == recorder.replayed == 0
    assert padded == answers(folder)


def test_a_model_that_cannot_be_captured(
    folder: Path, recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(self: FakeRecorder, work: Callable[[], T]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(FakeRecorder, "record", record)
    with pytest.raises(ConfigError, match="not permitted.*see --disable-cuda-graph"):
        answers(folder)


def test_graphs_run_what_was_not_captured() -> None:
    calls: list[int] = []
    fake = FakeRecorder()
    fake.batch = ForwardBatch.__new__(ForwardBatch)
    fake.batch.has_chunks = False
    graphs = StepGraphs(fake)
    assert graphs.run("a", lambda: calls.append(1)) is None and len(graphs) == 0
    graphs.capturing = True
    graphs.run("a", lambda: calls.append(2))
    graphs.capturing = False
    assert calls == [1, 2, 2] and len(graphs) == 1  # run, then recorded
    graphs.run("a", lambda: calls.append(3))
    graphs.run("b", lambda: calls.append(4))
    assert calls == [1, 2, 2, 2, 4] and len(graphs) == 1


def mixed_plan(decodes: int, chunk: int, samples: int) -> StepPlan:
    plan = prefill_plan(range(decodes + 1), [[0]] * decodes + [[0] * chunk])
    plan.num_decode = decodes
    plan.num_samples[:] = [1] * (samples - 1) + [0] * (decodes + 2 - samples)
    return plan


def test_shapes() -> None:
    shapes = StepShapes(decode_sizes=[8, 1, 2], token_sizes=[64, 32], max_batch=10)
    for rows, size in ((1, 1), (2, 2), (3, 8), (8, 8)):
        shape = shapes.of(decode_plan(range(rows), [1] * rows))
        assert shape is not None and not shape.has_chunks
        assert (shape.tokens, shape.entries, shape.samples) == (size, size, size)
    assert shapes.of(decode_plan(range(9), [1] * 9)) is None
    assert shapes.of(decode_plan([1], [5], query_len=2)) is None
    assert shapes.of(decode_plan([], [])) is None
    for chunk, tokens in ((2, 32), (32, 32), (33, 64), (64, 64)):
        shape = shapes.of(prefill_plan([0], [[0] * chunk]))
        assert shape is not None and shape.has_chunks
        assert (shape.tokens, shape.entries, shape.samples) == (tokens, 10, 1)
    assert shapes.of(prefill_plan([0], [[0] * 65])) is None
    middle = prefill_plan([0], [[0] * 9])
    middle.num_samples[:] = 0
    shape = shapes.of(middle)
    assert shape is not None and shape.samples == 0


@pytest.mark.parametrize(
    "max_batch, sizes",
    [(1, [1]), (6, [1, 2, 3, 4, 5, 6]), (8, [*range(1, 9)]), (20, [*range(1, 9), 16, 20])],
)
def test_decode_sizes(max_batch: int, sizes: list[int]) -> None:
    assert default_decode_sizes(max_batch) == sizes


def test_token_sizes() -> None:
    sizes = default_token_sizes(2048)
    assert sizes[0] == 32 and sizes[-1] == 2048 and len(sizes) < 40
    assert all(b - a <= max(32, a / 8) for a, b in itertools.pairwise(sizes))
    assert default_token_sizes(0) == []


def test_chosen_sizes() -> None:
    args = ServerArgs(max_running_requests=20, chunked_prefill_size=1000)
    assert choose_shapes(args, 10**9, most_tokens=1000, with_chunks=True).decode_sizes == (
        *range(1, 9),
        16,
        20,
    )
    assert choose_shapes(args, 10**11, most_tokens=1000, with_chunks=True).token_sizes[-1] == 512
    assert choose_shapes(args, 10**6, most_tokens=1000, with_chunks=True).token_sizes[-1] == 960
    args.cuda_graph_bs = [16, 4]
    args.cuda_graph_max_tokens = 40
    shapes = choose_shapes(args, 10**9, most_tokens=1000, with_chunks=True)
    assert (shapes.decode_sizes, shapes.token_sizes) == ((4, 16), (32,))
    args.cuda_graph_bs = [21]
    with pytest.raises(ConfigError, match="--cuda-graph-bs 21 exceeds --max-running-requests 20"):
        choose_shapes(args, 10**9, most_tokens=1000, with_chunks=True)
