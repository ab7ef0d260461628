"""Our model's logits against transformers', through every way a step can be cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radix_runtime.errors import ConfigError
from radix_runtime.families import families
from tests.runtime.model_steps import ThreadCommunicator, mixed_schedule, run_ranks
from tests.runtime.tiny_models import (
    TINY,
    Driver,
    Sequence,
    random_ids,
    reference_logits,
    reference_model,
    relative_error,
    save,
)

torch.set_num_threads(1)
TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """name -> (directory, transformers model), made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            model = reference_model(name)
            made[name] = save(model, tmp_path_factory.mktemp(name)), model
        return made[name]

    return make


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", TINY)
def test_mixed_steps_equal_transformers(checkpoint: Any, name: str, page_size: int) -> None:
    folder, reference = checkpoint(name)
    driver = Driver(folder, page_size=page_size)
    lengths = [37, 21, 66]
    prompts = [30, 1, 40]
    ids = [random_ids(driver.config, n, seed) for seed, n in enumerate(lengths)]
    expected = [reference_logits(reference, x) for x in ids]
    sequences = [Sequence(row, x) for row, x in zip([4, 0, 7], ids, strict=True)]
    for work in mixed_schedule(lengths, prompts, seed=page_size):
        spans = [(i, sequences[i].computed, count) for i, count in work]
        decoding = tuple(sequences[i] for i, at, count in spans if at >= prompts[i])
        logits = driver.step([(sequences[i], n) for i, n in work], from_device=decoding)
        assert logits is not None and logits.dtype == torch.float32
        wanted = torch.cat([expected[i][at : at + count] for i, at, count in spans])
        assert logits.shape == wanted.shape
        assert relative_error(logits, wanted) < TOLERANCE


@pytest.mark.parametrize("name", TINY)
def test_a_whole_prompt_equals_transformers(checkpoint: Any, name: str) -> None:
    folder, reference = checkpoint(name)
    driver = Driver(folder)
    ids = random_ids(driver.config, 120, seed=5)
    logits = driver.step([(Sequence(1, ids), len(ids))])
    assert relative_error(logits, reference_logits(reference, ids)) < TOLERANCE


def test_the_window_matters(checkpoint: Any) -> None:
    """A model that ignored its window would fail the tests above."""
    folder, _ = checkpoint("mistral_window")
    driver = Driver(folder)
    ids = random_ids(driver.config, 40, seed=5)
    changed = [(ids[0] + 1) % driver.config.vocab_size, *ids[1:]]
    layers = driver.config.num_layers
    window = 7
    a = driver.step([(Sequence(0, ids), 40)])
    b = driver.step([(Sequence(1, changed), 40)])
    reach = layers * (window - 1) + 1
    assert torch.equal(a[reach:], b[reach:])
    assert not torch.equal(a[reach - 1], b[reach - 1])


def test_a_failed_draw_is_read_as_id_0(checkpoint: Any) -> None:
    folder, reference = checkpoint("llama")
    driver = Driver(folder)
    seq = Sequence(3, [5, 6, 7, 0])
    driver.step([(seq, 3)])
    plan = driver.plan([(seq, 1)], from_device=(seq,))
    driver.next_token[seq.row] = -1
    assert relative_error(driver.run(plan), reference_logits(reference, seq.ids)[3:]) < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2_bias", "qwen3_untied_odd"])
def test_bfloat16_is_close(checkpoint: Any, name: str) -> None:
    folder, reference = checkpoint(name)
    driver = Driver(folder, dtype=torch.bfloat16)
    ids = random_ids(driver.config, 50, seed=2)
    seq = Sequence(0, ids)
    logits = torch.cat([driver.step([(seq, n)]) for n in (20, 29, 1)])
    assert 1e-5 < relative_error(logits, reference_logits(reference, ids)) < 0.05


# qwen2_bias has one KV head, which both ranks then hold; the odd ones pad their vocabulary.
@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in TINY), ("qwen3_tied_odd", 4), ("qwen2_bias", 4)]
)
def test_tensor_parallel_equals_transformers(checkpoint: Any, name: str, size: int) -> None:
    folder, reference = checkpoint(name)
    ids = list(range(2, 42))

    def work(comm: ThreadCommunicator) -> list[Any]:
        driver = Driver(folder, communicator=comm)
        seq = Sequence(1, ids)
        return [driver.step([(seq, n)]) for n in (25, 14, 1)]

    results = run_ranks(size, work)
    logits = torch.cat(results[0])
    assert relative_error(logits, reference_logits(reference, ids)) < TOLERANCE
    assert all(output is None for outputs in results[1:] for output in outputs)


def test_tp_that_does_not_fit_is_refused(checkpoint: Any) -> None:
    folder, _ = checkpoint("llama")
    with pytest.raises(ConfigError, match="--tp-size 3 does not divide the 4 attention heads"):
        run_ranks(3, lambda comm: Driver(folder, communicator=comm))


def test_a_narrower_kv_cache(checkpoint: Any) -> None:
    folder, reference = checkpoint("qwen3_tied")
    driver = Driver(folder, kv_dtype=torch.bfloat16)
    ids = random_ids(driver.config, 30, seed=3)
    logits = driver.step([(Sequence(0, ids), 30)])
    assert driver.pool.k[0].dtype == torch.bfloat16
    assert 1e-5 < relative_error(logits, reference_logits(reference, ids)) < 0.02


def test_nothing_is_read_or_written_outside_of_the_rows(checkpoint: Any) -> None:
    """The pool is NaN where nothing was stored (the driver does that); here: what a step writes."""
    folder, _ = checkpoint("llama")
    driver = Driver(folder, page_size=4)
    seq = Sequence(2, random_ids(driver.config, 11, seed=1))
    driver.step([(seq, 11)])
    written = ~driver.pool.k[1].isnan().any(-1).any(-1)
    expected = np.zeros(tuple(written.shape), bool)
    expected[seq.pages[:2]] = True
    expected[seq.pages[2], :3] = True
    expected[-1] = True  # the dummy page is zero
    assert np.array_equal(written.numpy(), expected)


def test_unknown_architecture() -> None:
    with pytest.raises(
        ConfigError, match="architecture 'Nobody' is unknown; there are: .*LlamaFor"
    ):
        families.get("Nobody")
