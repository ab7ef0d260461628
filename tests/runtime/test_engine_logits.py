"""Engine: when logits are computed, and where they lie."""

from __future__ import annotations

import pytest
import torch

import radix_kernels
from tests.runtime.parity import engine

torch.set_num_threads(1)


@pytest.mark.skipif(
    radix_kernels.capabilities()["backend"] != "cpu", reason="a GPU's allocator keeps its memory"
)
def test_logits_of_steps_lie_in_the_same_memory(monkeypatch):
    with engine(None) as e:
        model = e.executor.runner.model
        places = set()
        compute_logits = model.compute_logits

        def noted(*given):
            logits = compute_logits(*given)
            places.add(logits.data_ptr())
            return logits

        monkeypatch.setattr(model, "compute_logits", noted)
        e.generate(["Hello", "What is 3 + 4?"], [{"max_new_tokens": 4}, {"max_new_tokens": 9}])
        assert len(places) == 1


@pytest.mark.skipif(
    radix_kernels.capabilities()["backend"] != "cpu", reason="the kernel is the CPU library's"
)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_greedy_rows_need_no_logits(quantization, monkeypatch):
    """Rows that ask for the largest logit alone are drawn without logits; one row that asks for
    more brings them."""
    prompts = ["What is 3 + 4?", "Hello", "Spell stone."]
    plain = {"temperature": 0, "max_new_tokens": 8}
    with engine(None, quantization=quantization) as e:
        model = e.executor.runner.model
        steps = []
        compute_logits = model.compute_logits

        def noted(*given):
            steps.append(1)
            return compute_logits(*given)

        monkeypatch.setattr(model, "compute_logits", noted)
        want = [output["output_ids"] for output in e.generate(prompts, plain)]
        assert not steps
        more = (
            {"min_new_tokens": 1},
            {"logit_bias": {"5": -100}},
            {"presence_penalty": 1e-6},
            {"temperature": 1e-6},
        )
        for extra in more:
            steps.clear()
            got = e.generate(prompts, [plain, {**plain, **extra}, plain])
            assert [output["output_ids"] for output in got] == want and steps, extra
        steps.clear()
        got = e.generate(prompts, plain, return_logprob=True)
        assert [output["output_ids"] for output in got] == want and steps


def test_logits_of_a_subclass_decide(monkeypatch):
    """A model that changes the logits is asked for them: the fused draw knows the weight alone."""
    prompt = "What is 3 + 4?"
    plain = {"temperature": 0, "max_new_tokens": 1}
    with engine(None) as e:
        model = e.executor.runner.model
        usual = e.generate(prompt, plain)["output_ids"][0]

        class Masked(type(model)):
            def compute_logits(self, hidden, out=None):
                logits = super().compute_logits(hidden, out)
                logits[:, usual] = -torch.inf
                return logits

        monkeypatch.setattr(model, "__class__", Masked)
        assert e.generate(prompt, plain)["output_ids"][0] != usual
