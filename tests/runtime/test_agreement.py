"""Ranks that would not do the same, and ranks that do not start: found at once, with the reason."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radix_runtime import Engine
from radix_runtime.config import ServerArgs
from radix_runtime.distributed import Communicator
from radix_runtime.engine import executor, worker, worker_group
from radix_runtime.engine.agreement import StepSeal, check_agreement
from radix_runtime.errors import ConfigError, EngineDeadError
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.step_plan import Profile, RowSampling, StepPlan, decode_plan, prefill_plan
from radix_runtime.step_shape import StepShapes
from tests.runtime.model_steps import ThreadCommunicator, run_ranks
from tests.runtime.rank_rig import use_on_all_ranks
from tests.runtime.tiny_models import reference_model, save

torch.set_num_threads(1)
SHAPES = StepShapes(decode_sizes=[1, 2, 8], token_sizes=[32, 64], max_batch=8)
LIMIT = 30.0  # seconds; a collective alone would wait for 60


def seal(rank: int, shapes: StepShapes | None = SHAPES, candidates: bool = True) -> StepSeal:
    runner: Any = SimpleNamespace(
        shapes=shapes, candidates=object() if candidates else None, max_rows=16
    )
    return StepSeal(runner, rank)


def plans(seed: int) -> list[StepPlan | Profile]:
    """Steps of all kinds, and a command among them."""
    rng = random.Random(seed)
    found: list[StepPlan | Profile] = []
    for step in range(20):
        rows = rng.sample(range(16), rng.randint(1, 8))
        if rng.random() < 0.5:
            found.append(decode_plan(rows, [5] * len(rows), step_id=step))
            continue
        params = SamplingParams(temperature=1, top_p=rng.choice([1.0, 0.9]))
        new_rows = [RowSampling(row=row, seed=row, params=params) for row in rows]
        prompts = [[1] * rng.randint(1, 9) for _ in rows]
        found.append(prefill_plan(rows, prompts, step_id=step, new_rows=new_rows))
    found.insert(11, Profile(action="start", directory="/tmp"))
    return found


def test_ranks_that_agree() -> None:
    first = seal(0)
    others = [seal(1), seal(2)]
    frames = [first.close(work) for work in plans(3)]
    for other in others:
        opened = [other.open(frame) for frame in frames]
        assert [type(work) for work in opened] == [type(work) for work in plans(3)]
        assert [w.step_id for w in opened if isinstance(w, StepPlan)] == list(range(20))


@pytest.mark.parametrize("place", [0, -5, -1])
def test_a_frame_that_has_changed(place: int) -> None:
    sealed = seal(0).close(decode_plan([1], [5], step_id=7))
    changed = bytearray(sealed)
    changed[sealed.rindex(b"\x05") if place == 0 else place] ^= 1
    with pytest.raises(RuntimeError, match="rank 2 would run step 7 otherwise than rank 0"):
        seal(2).open(bytes(changed))


def test_a_frame_that_is_missing() -> None:
    first = seal(0)
    other = seal(1)
    frames = [first.close(work) for work in plans(4)]
    for frame in frames[:5]:
        other.open(frame)
    with pytest.raises(RuntimeError, match="step 6 otherwise than rank 0, or has missed a step"):
        other.open(frames[6])


def test_a_command_that_is_no_command() -> None:
    with pytest.raises(RuntimeError, match="rank 1 would run a command otherwise"):
        other = seal(1)
        other.open(seal(0).close(Profile(action="start"))[:-1] + b"x")


@pytest.mark.parametrize(
    "other",
    [
        {"shapes": None},
        {"shapes": StepShapes(decode_sizes=[1, 8], token_sizes=[], max_batch=8)},
        {"candidates": False},
    ],
)
def test_a_rank_that_would_run_the_step_in_another_way(other: dict[str, Any]) -> None:
    frame = seal(0).close(decode_plan([1, 4], [5, 6], step_id=3))
    with pytest.raises(RuntimeError, match="rank 1 would run step 3 otherwise"):
        seal(1, **other).open(frame)


def test_what_is_drawn_from_is_sealed() -> None:
    """By a plan alone ranks could differ in what they know of the rows before it."""
    params = SamplingParams(temperature=1, top_p=0.9)
    admitted = prefill_plan([4], [[1]], new_rows=[RowSampling(row=4, seed=1, params=params)])
    first = seal(0)
    first._way(admitted)
    with pytest.raises(RuntimeError, match="otherwise"):
        seal(1).open(first.close(decode_plan([4], [3])))
    masked = decode_plan([3], [3])
    masked.has_masks = True
    assert seal(0)._way(masked) != seal(0)._way(decode_plan([3], [3]))


def test_facts_that_differ_are_named() -> None:
    def work(comm: ThreadCommunicator) -> str:
        facts = {"pages": 7, "shapes": (1, 2), "graphs": comm.rank // 2, "rows": 3 + comm.rank}
        try:
            check_agreement(facts, comm, torch.device("cpu"))
        except ConfigError as error:
            return str(error)
        return ""

    assert run_ranks(3, work) == ["tensor-parallel ranks differ in graphs, rows"] * 3
    assert run_ranks(1, work) == [""]


def test_facts_that_agree() -> None:
    def work(comm: ThreadCommunicator) -> None:
        check_agreement({"pages": 7, "shapes": (1, 2)}, comm, torch.device("cpu"))

    run_ranks(2, work)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference_model("qwen3_tied_odd"), tmp_path_factory.mktemp("model"))


def two_ranks(folder: Path, ranks: int = 2) -> Engine:
    return Engine(
        folder,
        device="cpu",
        attention_backend="torch_native",
        tp_size=ranks,
        num_threads=2,
        max_total_tokens=512,
        max_running_requests=8,
    )


@pytest.mark.parametrize(
    ("fault", "ranks", "kind", "text"),
    [
        ("graphs capture", 2, ConfigError, "failed: rank 1 has no room for graphs"),
        ("config", 2, ConfigError, r"rank 1 .* failed: model.safetensors: cannot be read here"),
        ("runtime", 4, EngineDeadError, r"rank [123] .* failed: no such device"),
        ("crash", 2, EngineDeadError, r"rank 1 .* failed: KeyError: 'a bug'"),
        ("facts", 2, ConfigError, "tensor-parallel ranks differ in rows"),
    ],
)
def test_a_rank_that_does_not_start_says_why(
    fault: str,
    ranks: int,
    kind: type[Exception],
    text: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    use_on_all_ranks(fault.split(), monkeypatch, tmp_path)
    start = time.monotonic()
    with pytest.raises(kind, match=text):
        two_ranks(folder, ranks)
    assert time.monotonic() - start < LIMIT
    assert ("Traceback" in capfd.readouterr().err) == (fault == "crash")


def test_ranks_that_load_do_not_keep_a_failed_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are killed: a load may take minutes, and an end by itself has five seconds."""

    def fail(*args: object, **options: object) -> None:
        raise ConfigError("no room on rank 0")

    monkeypatch.setattr(executor, "build_rank", fail)
    monkeypatch.setattr(worker_group, "_EXIT_SECONDS", 60.0)
    use_on_all_ranks(["loads"], monkeypatch, tmp_path)
    start = time.monotonic()
    with pytest.raises(ConfigError, match="no room on rank 0"):
        two_ranks(folder)
    assert time.monotonic() - start < LIMIT


def test_a_rank_says_why_before_it_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for the reason of an abort, but only a moment."""
    seen: list[str] = []

    class Group(Communicator):
        def abort(self) -> None:
            seen.append("abort")

    def fail(*args: object) -> None:
        raise ConfigError("no room here")

    monkeypatch.setattr(worker, "connect", lambda *args: Group())
    monkeypatch.setattr(worker, "_run_steps", fail)
    monkeypatch.setattr(worker, "say_last_words", lambda spec, words: seen.append(words.text))
    spec: Any = SimpleNamespace(args=ServerArgs(device="cpu"), rank=1, memory_fd=0)
    with pytest.raises(ConfigError):
        worker._serve(spec)
    assert seen == ["no room here", "abort"]


@pytest.mark.parametrize(
    "ways",
    [["lost"], ["graphs", "shape"]],
)
def test_a_rank_that_goes_astray_ends_the_engine(
    ways: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_on_all_ranks(ways, monkeypatch, tmp_path)
    params = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
    start = time.monotonic()
    with two_ranks(folder) as engine:
        with pytest.raises(
            EngineDeadError, match=r"rank 1 would run step \d+ otherwise than rank 0"
        ):
            engine.generate(input_ids=[[3, 4], [5], [6, 7, 8]], sampling_params=params)
    assert time.monotonic() - start < LIMIT
