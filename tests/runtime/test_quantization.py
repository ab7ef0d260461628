"""`--quantization int8|int4` on the demo model: what it costs in exact answers, and what it saves
in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import radix_kernels
from radix_runtime.errors import ConfigError
from radix_runtime.offline import Engine

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "runtime" / "radix_runtime" / "demo_model"
QUESTIONS = 10  # of each family and kind of unseen, of which there are 34
# Exact answers that may be lost of those that bfloat16 gives, of all questions and of one row.
LOST = {"int8": (0.01, 2), "int4": (0.02, 3)}

pytestmark = pytest.mark.skipif(
    radix_kernels.capabilities()["backend"] != "cpu", reason="quantization is for the CPU"
)


@pytest.fixture(scope="module")
def evaluation() -> Iterator[ModuleType]:
    """examples/demo_model/evaluate.py, imported the way it is run; its modules leave no trace."""
    before = set(sys.modules)
    folder = str(ROOT / "examples" / "demo_model")
    sys.path.insert(0, folder)
    try:
        import evaluate

        yield evaluate
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]


@pytest.fixture(scope="module")
def right(evaluation: ModuleType) -> dict[str | None, list[int]]:
    """By format: right answers in each row of the model card's table."""
    tokenizer = evaluation.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    asked = [
        evaluation.unseen(family, split, QUESTIONS)
        for family, (_, _, splits) in evaluation.FAMILIES.items()
        for split in splits
    ]
    found: dict[str | None, list[int]] = {}
    for quantization in (None, *LOST):
        generate = evaluation.radix_generate(
            FOLDER, dtype="bfloat16", quantization=quantization, device="cpu"
        )
        answers = iter(
            evaluation.answers(tokenizer, generate, [question for row in asked for question in row])
        )
        found[quantization] = [
            sum(evaluation.correct(question.items[-1], next(answers)) for question in row)
            for row in asked
        ]
    return found


def test_bfloat16_is_the_model_of_the_card(right: dict[str | None, list[int]]) -> None:
    assert sum(right[None]) >= 0.96 * QUESTIONS * len(right[None])


@pytest.mark.parametrize("quantization", LOST)
def test_exact_answers_are_kept(quantization: str, right: dict[str | None, list[int]]) -> None:
    of_all, of_a_row = LOST[quantization]
    lost = [
        dense - quantized for dense, quantized in zip(right[None], right[quantization], strict=True)
    ]
    print(quantization, "lost", sum(lost), "of", QUESTIONS * len(lost), lost)
    assert sum(lost) <= of_all * QUESTIONS * len(lost)
    assert max(lost) <= of_a_row


def _weight_bytes(engine: Engine) -> int:
    model = engine.executor.runner.model
    weights = [getattr(module, "weight", None) for module in model.modules()]
    packed = {id(w): w for w in weights if isinstance(w, radix_kernels.PackedWeight)}
    assert packed
    assert not [p for p in model.parameters() if p.dim() > 1], "a source was kept"
    return sum(w.nbytes for w in packed.values())


def test_weights_are_held_once_and_small() -> None:
    sizes = {}
    for quantization in (None, "int8", "int4"):
        with Engine(FOLDER, quantization=quantization, dtype="bfloat16", device="cpu") as engine:
            sizes[quantization] = _weight_bytes(engine)
    assert sizes["int8"] < 0.52 * sizes[None]
    assert sizes["int4"] < 0.33 * sizes[None]  # the vocabulary matrix has 8 bits


def test_every_compute_type(evaluation: ModuleType) -> None:
    tokenizer = evaluation.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    split = evaluation.FAMILIES["addition"][2][0]
    asked = evaluation.unseen("addition", split, 4)
    for dtype in ("float16", "float32"):
        generate = evaluation.radix_generate(FOLDER, dtype=dtype, quantization="int8", device="cpu")
        answers = evaluation.answers(tokenizer, generate, asked)
        assert all(
            evaluation.correct(q.items[-1], a) for q, a in zip(asked, answers, strict=True)
        ), (dtype, answers)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="int8"):
        Engine(FOLDER, quantization="int3", device="cpu")
