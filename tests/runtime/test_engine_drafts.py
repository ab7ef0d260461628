"""The whole engine with drafts: whatever is drafted, requests get the tokens of single steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from radix_runtime import Engine
from radix_runtime.engine import executor
from radix_runtime.engine.model_runner import Forwarded, ModelRunner
from radix_runtime.step_plan import StepPlan, StepResult


def drafting_runner(max_samples: int, counts: list[int]) -> type[ModelRunner]:
    """A ModelRunner that drafts the last token again, or anything."""
    rng = random.Random(5)

    class DraftingRunner(ModelRunner):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, max_samples=max_samples, **options)

        def forward(self, plan: StepPlan) -> Forwarded:
            next_token = self._state.next_token
            for row in plan.rows[: plan.num_decode].tolist():
                last = int(next_token[row, 0])
                drafts = [last if rng.random() < 0.7 else rng.randrange(1000)] * (max_samples - 1)
                next_token[row, 1:] = torch.tensor(drafts, dtype=torch.int32)
            return super().forward(plan)

        def draw(self, *args: Any) -> StepResult:
            result = super().draw(*args)
            counts.extend(result.counts.tolist())
            return result

    return DraftingRunner


def answers(max_samples: int, counts: list[int], **settings: Any) -> list[list[int]]:
    rng = random.Random(1)
    prompts = [rng.choices(range(3, 1500), k=rng.randint(1, 120)) for _ in range(24)]
    params = []
    for i in range(len(prompts)):
        new = rng.randint(1, 50)
        params.append(
            {
                "max_new_tokens": new,
                "ignore_eos": i % 2 == 0,
                "temperature": 0.0 if i % 3 else 0.3,
                "seed": i,
                "frequency_penalty": 0.0 if i % 7 else 0.2,
                "min_new_tokens": 0 if i % 5 else min(5, new),
            }
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "ModelRunner", drafting_runner(max_samples, counts))
        options: dict[str, Any] = {
            "max_total_tokens": 1200,
            "max_running_requests": 8,
            "dtype": "float32",
            "num_threads": 1,
            "chunked_prefill_size": 48,
            "check_invariants": "step",
            **settings,
        }
        with Engine(**options) as engine:
            assert engine.executor.max_samples == max_samples
            outputs = engine.generate(input_ids=prompts, sampling_params=params)
    return [output["output_ids"] for output in outputs]


def test_drafts_change_no_token() -> None:
    plain: list[int] = []
    expected = answers(1, plain)
    assert set(plain) == {1}
    for settings in ({"page_size": 4}, {"page_size": 1, "disable_overlap_schedule": True}):
        counts: list[int] = []
        assert answers(4, counts, **settings) == expected
        assert {1, 2, 4} <= set(counts)
