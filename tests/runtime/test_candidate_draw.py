"""Draws from what each rank lists of its part of the vocabulary: the ids of the whole logits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import radix_kernels
from radix_runtime import Engine, SamplingParams, ops
from radix_runtime.engine.candidate_draw import RECORD, CandidateDraw
from radix_runtime.engine.draw_settings import CANDIDATES, DrawSettings
from radix_runtime.engine.sampler import Sampler
from radix_runtime.step_plan import RowSampling, StepPlan, decode_plan, prefill_plan
from tests.runtime.model_steps import ThreadCommunicator, run_ranks
from tests.runtime.rank_rig import use_on_all_ranks
from tests.runtime.test_masks import allow, done
from tests.runtime.tiny_models import Driver, reference_model, save

torch.set_num_threads(1)
CPU = torch.device("cpu")
ROWS = 40


def row(number: int, params: SamplingParams, **more: Any) -> RowSampling:
    return RowSampling(row=number, seed=number * 7 - 3, params=params, **more)


@pytest.mark.parametrize(
    ("params", "more", "listed"),
    [
        ({"temperature": 0}, {}, True),
        ({"temperature": 0, "top_p": 0.5}, {}, True),
        ({"temperature": 1.0}, {}, True),
        ({"temperature": 1.0, "top_k": CANDIDATES}, {}, True),
        ({"temperature": 1.0, "top_k": CANDIDATES + 1}, {}, False),
        ({"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, {}, True),
        ({"temperature": 1.0, "top_p": 0.9}, {}, False),
        ({"temperature": 1.0, "min_p": 0.1}, {}, False),
        ({"temperature": 0, "frequency_penalty": 0.5}, {}, False),
        ({"temperature": 0, "logit_bias": {3: 1.0}}, {}, False),
        ({"temperature": 0}, {"return_logprob": True}, False),
        ({"temperature": 0}, {"min_end": 5, "stop_ids": [2]}, False),
        ({"temperature": 0}, {"min_end": 5}, True),  # nothing is held back
    ],
)
def test_which_rows_are_drawn_from_candidates(
    params: dict[str, Any], more: dict[str, Any], listed: bool
) -> None:
    settings = DrawSettings(3, vocab_size=1000, device=CPU, max_samples=4)
    settings.admit(row(1, SamplingParams(**params), **more))
    assert settings.listed.are_listed(np.array([0, 2], np.int32))
    assert settings.listed.are_listed(np.array([0, 1], np.int32)) == listed
    settings.admit(row(1, SamplingParams(temperature=0)))
    assert settings.listed.are_listed(np.array([0, 1], np.int32))


def mixed(seed: int) -> list[SamplingParams]:
    """Greedy rows, unfiltered ones and ones with top-k."""
    rng = random.Random(seed)
    made = []
    for _ in range(ROWS):
        params = SamplingParams(temperature=rng.choice([0, 0.7, 3.0]))
        params.top_k = rng.choice([-1, 1, 3, 50, 200])
        if params.top_k > 0:
            params.top_p = rng.choice([1.0, 0.9, 0.3])
            params.min_p = rng.choice([0.0, 0.05])
        made.append(params)
    return made


@pytest.fixture
def reference_ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models that are loaded within run the reference of what the CPU has no kernel for."""
    before = radix_kernels.get_fallback()

    def use_reference(*args: Any, **options: Any) -> None:
        radix_kernels.set_fallback("reference")

    monkeypatch.setattr(ops, "use_native", use_reference)
    yield
    radix_kernels.set_fallback(before)


@pytest.mark.usefixtures("reference_ops")
@pytest.mark.parametrize(("name", "ranks"), [("qwen3_tied_odd", 2), ("llama", 4)])
def test_the_ids_are_those_of_the_whole_logits(name: str, ranks: int, tmp_path: Path) -> None:
    """157 ids of two ranks are 80 and 77. One row has logits that are not finite."""
    folder = save(reference_model(name), tmp_path)
    hidden = torch.randn(ROWS, 128, generator=torch.Generator().manual_seed(5))
    hidden[3, 5] = torch.nan
    positions = torch.arange(11, 11 + ROWS)
    rows = np.random.default_rng(1).permutation(ROWS).astype(np.int32)
    records_of_rank: list[Any] = [None] * ranks

    def work(comm: ThreadCommunicator) -> tuple[list[int], list[int]] | None:
        driver = Driver(folder, communicator=comm)
        vocab = driver.config.vocab_size
        sampler = Sampler(ROWS, vocab_size=vocab, device=CPU, max_samples=ROWS + 3)
        for number, params in enumerate(mixed(ranks)):
            sampler.admit(row(number, params))
        candidates = CandidateDraw(
            driver.model, vocab_size=vocab, communicator=comm, settings=sampler.settings
        )
        plan = decode_plan(rows.tolist(), [9] * ROWS)
        assert candidates.begin(plan, rows)
        records = candidates.records(hidden, positions)
        records_of_rank[comm.rank] = records
        logits = driver.model.compute_logits(hidden)
        if records is None or logits is None:
            return None
        ids = torch.full((ROWS,), -7, dtype=torch.int32)
        candidates.draw(records, positions, out=ids)
        return ids.tolist(), sampler.sample(logits, rows, positions).ids.tolist()

    found = run_ranks(ranks, work)
    assert found[0][0] == found[0][1]
    assert found[0][0][3] == -1 and len(set(found[0][0])) > 10
    assert records_of_rank[0].shape == (ranks, ROWS, RECORD)
    assert found[1:] == records_of_rank[1:] == [None] * (ranks - 1)


def test_which_steps_are_drawn_from_candidates(tmp_path: Path) -> None:
    folder = save(reference_model("llama"), tmp_path)
    both = np.array([0, 1], np.int32)

    def work(comm: ThreadCommunicator) -> list[bool]:
        model = Driver(folder, communicator=comm).model
        settings = DrawSettings(2, vocab_size=160, device=CPU, max_samples=2)
        made = CandidateDraw(model, vocab_size=160, communicator=comm, settings=settings)
        masked = decode_plan([0, 1], [3, 3])
        masked.has_masks = True
        plain = decode_plan([0, 1], [3, 3])
        found = [made.begin(plan, both) for plan in (plain, masked)]
        found.append(made.begin(plain, both[:0]))  # nothing is sampled
        settings.admit(row(1, SamplingParams(temperature=1, top_p=0.5)))
        return [*found, made.begin(plain, both[:1]), made.begin(plain, both)]

    assert run_ranks(2, work) == [[True, False, False, True, False]] * 2


@pytest.mark.parametrize(
    ("vocab_size", "ranks", "shards"),
    [
        (157, 1, [None]),
        (157, 2, [range(80), range(80, 157)]),
        (160, 2, [range(80), range(80, 160)]),
        (13, 4, [range(4), range(4, 8), range(8, 12), range(12, 13)]),
        (12, 4, [None] * 4),  # the last rank has no id
    ],
)
def test_parts_of_the_vocabulary(
    vocab_size: int, ranks: int, shards: list[range | None], tmp_path: Path
) -> None:
    model = reference_model("llama")
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    folder = save(model, tmp_path)
    ids = torch.arange(vocab_size, dtype=torch.int32)

    def work(comm: ThreadCommunicator) -> tuple[range | None, Any, Any]:
        driver = Driver(folder, communicator=comm)
        shard = driver.model.vocabulary_shard()
        embedded = driver.model.model.embed_tokens(ids)
        return shard, embedded, driver.model.compute_logits(embedded)

    found = run_ranks(ranks, work)
    assert [shard for shard, _, _ in found] == shards
    embedding = model.get_input_embeddings().weight.detach()
    for _, embedded, _ in found:
        assert torch.equal(embedded, embedding)
    torch.testing.assert_close(found[0][2], model.lm_head(embedding).detach())


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Drawn and greedy ones, of which some need whole logits."""
    rng = random.Random(3)
    prompts = []
    params = []
    for i in range(20):
        prompts.append(rng.choices(range(157), k=rng.choice([1, 2, 7, 30, 60])))
        made = SamplingParams(
            temperature=rng.choice([0, 0.9]),
            top_p=rng.choice([1.0, 1.0, 1.0, 0.9]),
            top_k=rng.choice([-1, 20]),
            frequency_penalty=0.5 if i == 7 else 0,
            max_new_tokens=rng.randint(1, 12),
            ignore_eos=True,
            seed=i,
        )
        params.append(made)
    return prompts, params


def masked_prompts() -> StepPlan:
    plan = prefill_plan(
        [4, 1],
        [[3, 4, 5], [8, 9]],
        new_rows=[row(number, SamplingParams(temperature=0)) for number in (4, 1)],
    )
    plan.page_rows = np.array([4, 1], np.int32)
    plan.page_index = np.zeros(2, np.int32)
    plan.page_ids = np.array([0, 1], np.int32)
    return plan


def answers(folder: Path, home: Path, ways: list[str]) -> list[list[int]]:
    """All answers of two ranks, and the ids of steps with masks between steps without."""
    with pytest.MonkeyPatch.context() as patch:
        use_on_all_ranks(ways, patch, home)
        with Engine(
            folder,
            device="cpu",
            attention_backend="torch_native",
            tp_size=2,
            num_threads=2,
            max_running_requests=12,
            max_total_tokens=1024,
            chunked_prefill_size=64,
        ) as engine:
            prompts, params = requests()
            one_by_one = [
                engine.generate(input_ids=prompt, sampling_params=each)
                for prompt, each in zip(prompts[:5], params[:5], strict=True)
            ]
            together = engine.generate(input_ids=prompts, sampling_params=params)
            launch = engine.executor.launch
            steps = [
                launch(masked_prompts(), done(allow({31}, {150}))),
                launch(decode_plan([4, 1], [4, 3])),
                launch(decode_plan([4, 1], [5, 4]), done(allow({7}, {8, 9}), late=[1])),
                launch(decode_plan([4, 1], [6, 4])),
            ]
            masked = [step.result().ids.tolist() for step in steps]
    assert masked[0] == [31, 150] and masked[2] == [7, -1]
    return [output["output_ids"] for output in [*one_by_one, *together]] + masked


@pytest.mark.usefixtures("reference_ops")
def test_engines_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are processes: with and without candidates, padded and captured or not."""
    listed = 0
    sample = ops.sample_candidates

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal listed
        listed += 1
        return sample(*args, **options)

    monkeypatch.setattr(ops, "sample_candidates", counted)
    folder = save(reference_model("qwen3_tied_odd"), tmp_path / "model")
    home = tmp_path / "home"
    home.mkdir()
    expected = answers(folder, home, [])
    assert listed == 0
    for ways in (["candidates"], ["candidates", "graphs"]):
        before = listed
        assert answers(folder, home, ways) == expected
        assert listed > before + 20
