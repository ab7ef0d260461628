"""Draws, penalties and log-probabilities through the whole engine: the same tokens over batches,
overlap, ranks and retraction; the same numbers as transformers."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch

from radix_runtime import SamplingParams, ops
from radix_runtime.engine.span_scores import token_ranks
from radix_runtime.offline_loop import Call
from radix_runtime.offline_requests import LogprobOptions, RequestBatch
from radix_runtime.text.choices import scored
from tests.runtime.parity import case, engine, ids_of
from tests.runtime.tiny_models import TINY, reference_logits, reference_model, save

torch.set_num_threads(1)
MODEL = "qwen3_untied_odd"


def mixed_params(count):
    """Seeded draws with every parameter that acts on logits; some greedy, some ended by an id."""
    rng = random.Random(9)
    variants = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05, "frequency_penalty": 0.6, "presence_penalty": 0.3},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 0.7, "logit_bias": {5: 3.0, 6: -100.0}, "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_new_tokens": 12, "stop_token_ids": list(range(60))},
    ]
    return [
        SamplingParams(**variants[i % 6], seed=rng.randrange(2**62), max_new_tokens=30 + i % 5)
        for i in range(count)
    ]


@functools.cache
def requests():
    c = case(MODEL)
    prompts = c.prompts + [p[::-1] for p in c.prompts[1:]]
    return c, prompts, mixed_params(len(prompts))


@functools.cache
def one_by_one():
    """Each request alone, without any of the machinery that could mix rows up."""
    c, prompts, params = requests()
    with engine(c.folder, disable_overlap_schedule=True, disable_radix_cache=True) as e:
        return [
            e.generate(input_ids=ids, sampling_params=p)["output_ids"]
            for ids, p in zip(prompts, params, strict=True)
        ]


def test_the_reference_run_is_worth_comparing():
    outputs = one_by_one()
    _, _, params = requests()
    assert len({tuple(o) for o in outputs}) == len(outputs)
    assert any(len(o) < p.max_new_tokens for o, p in zip(outputs, params, strict=True))
    for output, p in zip(outputs, params, strict=True):
        assert not set(output[: p.min_new_tokens]) & set(p.stop_token_ids)
        assert 6 not in output or 6 not in p.logit_bias


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"disable_overlap_schedule": True},
        {"chunked_prefill_size": 24, "page_size": 1},
        {"max_running_requests": 3},
        {"tp_size": 2, "num_threads": 2},
    ],
    ids=str,
)
def test_draws_depend_on_seed_and_position_only(changes):
    c, prompts, params = requests()
    with engine(c.folder, **changes) as e:
        assert ids_of(e.generate(input_ids=prompts, sampling_params=params)) == one_by_one()


def test_choices_of_one_request_differ_and_repeat():
    c, prompts, _ = requests()
    params = SamplingParams(n=4, seed=11, temperature=1.0, max_new_tokens=20)
    with engine(c.folder) as e:
        first = ids_of(e.generate(input_ids=prompts[3], sampling_params=params))
        again = ids_of(e.generate(input_ids=prompts[3], sampling_params=params))
        other, second = (
            e.generate(
                input_ids=prompts[3],
                sampling_params=SamplingParams(seed=seed, temperature=1.0, max_new_tokens=20),
            )["output_ids"]
            for seed in (99, 12)
        )
    assert first == again and len({tuple(o) for o in first}) == 4
    assert other not in first
    assert second == first[1]  # choice i uses seed + i


@pytest.mark.parametrize("no_radix", [False, True])
@pytest.mark.parametrize("no_overlap", [False, True])
def test_retraction_changes_nothing(no_radix, no_overlap):
    """A pool far too small for what is admitted: requests are thrown out and come back."""
    c, prompts, params = requests()
    prompts = [p[:12] for p in prompts]
    options = {"return_logprob": True, "top_logprobs_num": 2}
    with engine(c.folder) as e:
        want = e.generate(input_ids=prompts, sampling_params=params, **options)
    small = {
        "max_total_tokens": 192, "schedule_conservativeness": 0, "page_size": 8,
        "chunked_prefill_size": 64, "disable_radix_cache": no_radix,
        "disable_overlap_schedule": no_overlap,
    }  # fmt: skip
    with engine(c.folder, **small) as e:
        got = [{}] * len(prompts)
        stream = e.stream(input_ids=prompts, sampling_params=params, **options)
        for number, output in enumerate(stream):
            got[output["index"]] = output
            if number % 20 == 0:  # besides those that the lack of pages brings
                e._scheduler.retract_youngest()
        figures = e.get_server_info()["internal_states"][0]
    assert figures["num_retractions_total"] >= 10
    assert ids_of(got) == ids_of(want)
    for a, b in zip(got, want, strict=True):
        for name in ("output_token_logprobs", "output_top_logprobs"):
            ours, theirs = a["meta_info"][name], b["meta_info"][name]
            assert np.shape(ours) == np.shape(theirs)
            assert np.allclose(numbers(ours), numbers(theirs), atol=1e-4)
        assert a["meta_info"]["finish_reason"] == b["meta_info"]["finish_reason"]


def numbers(entries):
    """Logprobs and ids of [logprob, id, None] entries, whatever their nesting."""
    return np.array(entries, dtype=object)[..., :2].astype(float)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_output_logprobs_are_transformers(tp_size, temperature):
    c, prompts, _ = requests()
    params = SamplingParams(
        temperature=temperature, seed=3, max_new_tokens=12, ignore_eos=True, top_p=0.9,
        frequency_penalty=0.5,
    )  # fmt: skip
    with engine(c.folder, tp_size=tp_size, num_threads=tp_size) as e:
        outputs = e.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=5
        )
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = output["output_ids"]
        exact = reference_logits(c.model, prompt + ids).log_softmax(-1)[len(prompt) - 1 : -1]
        entries = output["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in entries] == ids
        want = exact.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert np.allclose([value for value, _, _ in entries], want, atol=1e-4)
        top = numbers(output["meta_info"]["output_top_logprobs"])
        assert np.allclose(top[..., 0], exact.topk(5).values, atol=1e-4)


@pytest.mark.parametrize("chunk", [-1, 24])
@pytest.mark.parametrize("start", [0, 5, 33])
def test_prompt_logprobs_are_transformers(start, chunk):
    """Also where the prefix is cached and where a chunk ends in the scored part."""
    c, prompts, _ = requests()
    prompts = [p for p in prompts if len(p) >= start]
    params = SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)
    with engine(c.folder, chunked_prefill_size=chunk) as e:
        for _ in range(2):
            outputs = e.generate(
                input_ids=prompts, sampling_params=params, return_logprob=True,
                logprob_start_len=start, top_logprobs_num=3,
            )  # fmt: skip
            for prompt, output in zip(prompts, outputs, strict=True):
                entries = output["meta_info"]["input_token_logprobs"]
                assert [token for _, token, _ in entries] == prompt[start:]
                exact = reference_logits(c.model, prompt).log_softmax(-1)
                first = max(start, 1)
                if start == 0:
                    assert entries.pop(0)[0] is None
                want = [float(exact[t - 1, prompt[t]]) for t in range(first, len(prompt))]
                assert np.allclose([value for value, _, _ in entries], want, atol=1e-4)
                top = output["meta_info"]["input_top_logprobs"]
                top = [row for row in top if row]
                assert len(top) == len(want)
                if want:
                    best = exact[first - 1 : -1].topk(3).values
                    assert np.allclose(numbers(top)[..., 0], best, atol=1e-4)


def test_prompt_logprobs_of_more_than_one_block(tmp_path, monkeypatch):
    """Longer than the 1,024 rows whose logits exist at once."""
    long = {"max_position_embeddings": 4096, "num_hidden_layers": 1}
    monkeypatch.setitem(TINY, "long", ("Qwen3", long))
    model = reference_model("long")
    save(model, tmp_path)
    prompt = random.Random(2).choices(range(160), k=2500)
    with engine(tmp_path, max_total_tokens=4096) as e:
        output = e.generate(
            input_ids=prompt, sampling_params=SamplingParams(max_new_tokens=0),
            return_logprob=True, logprob_start_len=0,
        )  # fmt: skip
    assert output["output_ids"] == []
    exact = reference_logits(model, prompt).log_softmax(-1)
    want = exact[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    got = [value for value, _, _ in output["meta_info"]["input_token_logprobs"]]
    assert got[0] is None and np.allclose(got[1:], want, atol=1e-4)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_ranks_of_a_prompt_are_transformers(tp_size):
    """Over chunks, on one rank of the engine and two; what rounding may swap counts either way."""
    c, prompts, _ = requests()
    params = SamplingParams(max_new_tokens=0)
    with engine(c.folder, tp_size=tp_size, num_threads=tp_size, chunked_prefill_size=24) as e:
        for prompt in prompts:
            request = e._requests.build(prompt, params, LogprobOptions(logprob_start_len=0))
            request.prompt_logprobs = 3
            call = Call(RequestBatch([request]))
            e._complete(call)
            entries = list(scored(call.prompt_logprobs[0]))
            assert [entry.token for entry in entries] == prompt
            first = entries.pop(0)
            assert (first.logprob, first.rank) == (None, 0)
            exact = reference_logits(c.model, prompt).log_softmax(-1)
            for entry, row in zip(entries, exact, strict=False):
                own = row[entry.token]
                assert abs(entry.logprob - own) < 1e-4
                assert (row > own + 1e-4).sum() < entry.rank <= (row > own - 1e-4).sum()
                top = [token for token, _ in entry.top]
                assert (entry.token in top) == (entry.rank <= 3)
                assert entry.rank > 3 or top[entry.rank - 1] == entry.token


def test_ranks_are_places_in_the_list_of_the_likeliest():
    """Of logits with many ties, in more rows than are compared at once."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randint(-9, 9, (150, 71), generator=generator).float()
    _, _, order = ops.token_logprobs(logits, torch.zeros(150, dtype=torch.int32), 71)
    for ids in (order[:, 0], order[:, 35], order[:, 70]):
        ranks = token_ranks(logits, ids.contiguous())
        assert ranks.dtype == torch.int32
        assert torch.equal(order.gather(1, ranks[:, None].long() - 1)[:, 0], ids)
    assert token_ranks(logits[:0], order[:0, 0]).tolist() == []
