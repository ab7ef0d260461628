"""Engine: the shapes of its answers, streams, scores and the cache behind them."""

from __future__ import annotations

import itertools
import math
import threading

import numpy as np
import pytest
import torch

from radix_runtime import Engine, SamplingParams
from radix_runtime.constraint import ConstrainedParams, StructuredOutputs
from radix_runtime.errors import ConfigError
from tests.runtime.parity import case, engine

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def demo():
    with engine(None) as e:
        yield e


@pytest.fixture(scope="module")
def plain():
    """A random model without a tokenizer, and the case it comes from."""
    c = case("qwen3_tied_odd")
    with engine(c.folder) as e:
        yield e, c


def test_one_prompt_gives_a_dict_and_several_a_list(demo):
    params = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    one = demo.generate("What is 3 + 4?", params)
    assert set(one) == {"text", "output_ids", "meta_info"}
    info = one["meta_info"]
    assert info["prompt_tokens"] == len(demo.tokenizer.encode("What is 3 + 4?"))
    assert info["completion_tokens"] == len(one["output_ids"]) == 6
    assert info["finish_reason"] == {"type": "length", "length": 6}
    assert info["cached_tokens"] == 0 < info["e2e_latency"]
    assert "output_token_logprobs" not in info
    assert one["text"] == demo.tokenizer.decode(one["output_ids"])

    [listed] = demo.generate(["What is 3 + 4?"], params)
    assert listed["output_ids"] == one["output_ids"]
    ids = demo.tokenizer.encode("What is 3 + 4?")
    assert demo.generate(input_ids=ids, sampling_params=params)["text"] == one["text"]
    assert demo.generate(input_ids=np.array(ids), sampling_params=params)["text"] == one["text"]
    several = demo.generate(["Hello", "What is 3 + 4?"], [{"max_new_tokens": 1}, params])
    assert len(several[0]["output_ids"]) == 1 and several[1]["output_ids"] == one["output_ids"]
    assert demo.generate([], params) == []


def test_choices_stand_side_by_side(demo):
    outputs = demo.generate(["a", "b"], {"n": 3, "max_new_tokens": 2, "ignore_eos": True})
    ids = [o["meta_info"]["id"] for o in outputs]
    assert len(outputs) == 6 and len(set(ids)) == 2 and ids == sorted(ids, key=ids.index)
    assert ids[0] == ids[2] != ids[3]


def test_stream_grows_to_the_plain_answer(demo):
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    want = demo.generate("Tell me a story", params)
    seen = list(demo.stream("Tell me a story", params))
    assert len(seen) > 1 and "index" not in seen[0]
    for before, after in itertools.pairwise(seen):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert before["meta_info"]["finish_reason"] is None
    assert seen[-1]["text"] == want["text"] and seen[-1]["output_ids"] == want["output_ids"]
    assert seen[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}

    prompts = ["one", "two"]
    last = {}
    for output in demo.generate(prompts, params, stream=True):
        last[output["index"]] = output["output_ids"]
    assert [last[0], last[1]] == [o["output_ids"] for o in demo.generate(prompts, params)]


def test_an_output_of_a_stream_is_the_callers(demo):
    """What is done to it is not seen in those that follow."""
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "n": 2}
    want = [output["output_ids"] for output in demo.generate("Tell me a story", params)]
    last = {}
    for output in demo.stream("Tell me a story", params):
        last[output["index"]] = list(output["output_ids"])
        output["output_ids"].clear()
        output["meta_info"].clear()
    assert [last[0], last[1]] == want


def test_a_stop_string_ends_the_text(demo):
    params = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    text = demo.generate("Tell me a story", params)["text"]
    stop = text[3:5]
    output = demo.generate("Tell me a story", {**params, "stop": stop})
    assert output["text"] == text[: text.index(stop)]
    assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert output["meta_info"]["completion_tokens"] == len(output["output_ids"]) < 20


def test_a_stream_that_is_closed_leaves_nothing(demo):
    stream = demo.stream(["x", "y"], {"max_new_tokens": 500, "ignore_eos": True})
    next(stream)
    stream.close()
    assert demo.flush_cache()
    figures = demo.get_server_info()["internal_states"][0]
    assert figures["num_running_reqs"] == figures["num_queue_reqs"] == 0
    assert figures["num_used_tokens"] == figures["cache_pages"] == 0
    assert figures["num_aborted_requests_total"] >= 2


def test_a_stream_that_others_bring_to_its_end_says_so(demo):
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    stream = demo.stream("What is 3 + 4?", params)
    next(stream)
    demo.generate("Hello", {**params, "max_new_tokens": 20})
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    assert last["output_ids"] == demo.generate("What is 3 + 4?", params)["output_ids"]


def test_cached_tokens_and_flush(plain):
    e, c = plain
    params = SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)
    prompt = c.prompts[4]

    def cached():
        return e.generate(input_ids=prompt, sampling_params=params)["meta_info"]["cached_tokens"]

    assert e.flush_cache()
    assert cached() == 0 and cached() == 64  # 73 tokens: four whole pages of 16
    assert e.flush_cache() and cached() == 0


def test_flush_is_refused_while_requests_run(plain):
    e, c = plain
    stream = e.stream(
        input_ids=c.prompts[1], sampling_params=SamplingParams(max_new_tokens=50, ignore_eos=True)
    )
    next(stream)
    assert not e.flush_cache()
    stream.close()
    assert e.flush_cache()


def test_end_ids(plain):
    """The id that ends a choice is counted and kept; ignore_eos goes over the model's own."""
    e, c = plain
    answer = c.answers[3]
    at = next(i for i in range(3, 32) if answer[i] not in answer[:i])
    params = SamplingParams(temperature=0, max_new_tokens=32, stop_token_ids=[answer[at]])
    output = e.generate(input_ids=c.prompts[3], sampling_params=params)
    eos = answer.index(2) if 2 in answer[:at] else at
    assert output["output_ids"] == answer[: eos + 1]
    assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": answer[eos]}


def test_score_gives_probabilities_of_labels_and_continuations(plain):
    e, c = plain
    query = c.prompts[1]
    items = [c.prompts[3][:5], c.prompts[5][:9]]
    labels = [3, 77, 5]
    plain_scores = e.score(query, items, labels)
    softmax = e.score(query, items, labels, apply_softmax=True)
    turned = e.score(query, items, labels, item_first=True)
    for row, item in enumerate(items):
        for got, ids in ((plain_scores, query + item), (turned, item + query)):
            with torch.no_grad():
                exact = c.model(torch.tensor([ids])).logits[0, -1].softmax(-1)[labels]
            assert np.allclose(got[row], exact, rtol=1e-3)
        total = sum(plain_scores[row])
        assert np.allclose(softmax[row], [p / total for p in plain_scores[row]], rtol=1e-4)
    [single] = e.score(query, items[1])
    with torch.no_grad():
        logits = c.model(torch.tensor([query + items[1]])).logits[0].log_softmax(-1)
    want = [float(logits[len(query) - 1 + i, t]) for i, t in enumerate(items[1])]
    assert np.allclose(single, want, atol=1e-4)


def test_ids_come_in_any_form_of_integers(plain):
    e, c = plain
    params = {"max_new_tokens": 3, "temperature": 0}
    ids = c.prompts[0]
    forms = [
        ids,
        tuple(ids),
        np.array(ids, np.int32),
        torch.tensor(ids),
        [np.int64(i) for i in ids],
    ]
    answers = [e.generate(input_ids=form, sampling_params=params)["output_ids"] for form in forms]
    assert all(answer == answers[0] for answer in answers)
    assert len(e.generate(input_ids=torch.tensor([ids, ids]), sampling_params=params)) == 2
    for fractions in ([1.5, 2.0], [[1.5, 2.0]], torch.tensor([1.5]), np.array([1.5])):
        with pytest.raises(TypeError, match="integer"):
            e.generate(input_ids=fractions)


def test_none_leaves_a_parameter_out(demo):
    """As null does over HTTP; `max_new_tokens` None is its own value."""
    params = {"max_new_tokens": 5, "seed": 3, "ignore_eos": True}
    nothing = dict.fromkeys(("stop", "temperature", "top_p", "n", "logit_bias", "stop_token_ids"))
    want = demo.generate("Hello", params)["output_ids"]
    assert demo.generate("Hello", {**params, **nothing})["output_ids"] == want
    longest = {"max_new_tokens": None, "ignore_eos": True}
    assert demo.generate("Hello " * 500, longest)["meta_info"]["completion_tokens"] > 128


def test_a_model_without_tokenizer_takes_ids_only(plain):
    e, c = plain
    assert e.generate(input_ids=c.prompts[0], sampling_params={"max_new_tokens": 3})["text"] == ""
    with pytest.raises(ValueError, match="no tokenizer"):
        e.generate("hello")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "either prompt or input_ids"),
        ({"prompt": "a", "input_ids": [1]}, "either prompt or input_ids"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [5, 99999]}, "position 1 is outside"),
        ({"input_ids": [5, -1]}, "position 1 is outside"),
        ({"input_ids": [5], "sampling_params": {"temperature": -1}}, "temperature must be"),
        ({"input_ids": [5], "sampling_params": {"temperature": math.nan}}, "temperature must be"),
        ({"input_ids": [5], "sampling_params": {"heat": 1}}, "heat"),
        ({"input_ids": [5], "sampling_params": {"max_tokens": 1}}, "did you mean max_new_tokens"),
        ({"input_ids": [5], "sampling_params": 5}, "a dict, not int"),
        ({"input_ids": [5], "sampling_params": "x"}, "a dict, not str"),
        ({"input_ids": [5], "sampling_params": SamplingParams(seed=1.5)}, "seed"),
        ({"input_ids": [5], "sampling_params": SamplingParams(max_new_tokens=5.0)}, "max_new"),
        ({"input_ids": [5], "sampling_params": SamplingParams(logit_bias="a")}, "logit_bias"),
        ({"input_ids": [5], "sampling_params": SamplingParams(temperature="0")}, "temperature"),
        ({"input_ids": [5], "sampling_params": SamplingParams(ignore_eos="no")}, "ignore_eos"),
        ({"prompt": {"prompt_token_ids": [1]}}, r"of type dict; .*\(input_ids\)"),
        ({"prompt": ["a", {"prompt": "b"}]}, "prompt 1 is of type dict"),
        ({"prompt": 5}, "of type int"),
        ({"prompt": b"abc"}, "of type bytes"),
        ({"input_ids": [[1, 2], 3]}, "input_ids 1 is of type int"),
        ({"input_ids": np.array(5)}, "of type ndarray"),
        ({"input_ids": [5], "return_logprob": True, "top_logprobs_num": 1.5}, "top_logprobs_num"),
        ({"input_ids": [5], "return_logprob": "no"}, "return_logprob"),
        ({"input_ids": [5], "sampling_params": {"logit_bias": {(1, 2): 1.0}}}, "sampling_params"),
        (
            {
                "input_ids": [5],
                "sampling_params": ConstrainedParams(
                    structured_outputs=StructuredOutputs(regex="a", whitespace_pattern=5)
                ),
            },
            "whitespace_pattern",
        ),
        ({"input_ids": [5], "sampling_params": {"top_k": "many"}}, "top_k"),
        ({"input_ids": [[5], [6]], "sampling_params": [{}]}, "1 sampling_params for 2 prompts"),
        ({"input_ids": [[5], []]}, "prompt 1: the prompt is empty"),
        ({"input_ids": [[5], [6]], "sampling_params": [{}, {"heat": 1}]}, "prompt 1: .*heat"),
        ({"input_ids": [5] * 3000}, "requested 3001 tokens"),
        (
            {"input_ids": [5], "sampling_params": {"max_new_tokens": 10**6}},
            "requested 1000001 tokens",
        ),
        ({"input_ids": [5], "top_logprobs_num": 3}, "need return_logprob"),
        ({"input_ids": [5], "return_logprob": True, "logprob_start_len": 2}, r"in \[-1, 1\]"),
        ({"input_ids": [5], "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
    ],
)
def test_bad_requests_are_value_errors_and_hurt_nobody(demo, arguments, message):
    with pytest.raises(ValueError, match=message):
        demo.generate(**arguments)
    assert len(demo.generate("fine", {"max_new_tokens": 1, "ignore_eos": True})["output_ids"]) == 1


def test_parameters_may_be_an_object_or_a_dict(demo):
    """Also with a text where a list may stand, None and NumPy's numbers."""
    for stop in (" 7", [" 7"], None):
        values = {
            "temperature": 0,
            "max_new_tokens": np.int64(8),
            "seed": np.random.default_rng(1).integers(100),
            "stop": stop,
            "stop_token_ids": np.array([5]),
            "ignore_eos": True,
        }
        from_dict = demo.generate("What is 3 + 4?", values)
        from_object = demo.generate("What is 3 + 4?", SamplingParams(**values))
        assert from_dict["output_ids"] == from_object["output_ids"]
        assert from_dict["text"] == from_object["text"]
    choices = {"structured_outputs": StructuredOutputs(choice=np.array(["seven", "eight"]))}
    assert demo.generate("What is 3 + 4?", choices)["text"] in ("seven", "eight")
    assert demo.generate("What is 3 + 4?", ConstrainedParams(**choices))["text"] in (
        "seven",
        "eight",
    )
    texts = (text for text in ("a", "b"))
    assert len(demo.generate(texts, {"max_new_tokens": 1, "ignore_eos": True})) == 2
    ids = demo.tokenizer.encode("What is 3 + 4?")
    params = {"temperature": 0, "max_new_tokens": 4}
    assert demo.generate(ids, params)["text"] == demo.generate([ids], params)[0]["text"]


def test_a_bad_request_is_refused_before_its_stream_is_read(demo):
    with pytest.raises(ValueError, match="empty"):
        demo.stream(input_ids=[])
    with pytest.raises(ValueError, match="prompt 1: .*heat"):
        demo.generate(["a", "b"], [{}, {"heat": 1}], stream=True)


def test_bad_settings():
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_modell_len'"):
        Engine(max_modell_len=3)
    with pytest.raises(ConfigError, match="--page-size must be at least 1"):
        Engine(page_size=0)
    with pytest.raises(ConfigError, match="--context-length 999999 exceeds"):
        engine(None, context_length=999999)
    for name, value in (("max_total_tokens", 100.5), ("disable_radix_cache", "no")):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: expected"):
            Engine(**{name: value})
    with pytest.raises(ConfigError, match="a path is tokenizer_path"):
        Engine(tokenizer="gpt2")
    with pytest.raises(TypeError, match="context_length was given twice"):
        Engine(context_length=64, max_model_len=64)
    with pytest.raises(ConfigError, match="there is no directory"):
        Engine("/nowhere/at/all")
    with pytest.raises(ConfigError, match="--max-total-tokens .* MiB are available"):
        engine(None, max_total_tokens=10**10)
    with pytest.raises(ConfigError, match="no memory for a KV cache"):
        engine(None, max_total_tokens=None, mem_fraction_static=1e-6)


def test_settings_under_other_names():
    others = {"tensor_parallel_size": 1, "max_model_len": np.int64(64)}
    with Engine(max_total_tokens=256, num_threads=1, max_num_seqs=2, **others) as e:
        assert (e.args.context_length, e.args.max_running_requests) == (64, 2)


def test_the_pool_without_a_size():
    """A quarter of the memory, 512 MiB for the demo model, 4 times what its requests can fill; so
    conversations stay in the cache that follow each other."""
    with engine(None, max_total_tokens=None, max_running_requests=2, context_length=100) as e:
        assert e.get_server_info()["max_total_num_tokens"] == 4 * 2 * 112  # whole pages of 16
        assert e.get_server_info()["max_context"] == 100
    sizes = {"max_total_tokens": None, "max_running_requests": 1, "context_length": 112}
    with engine(None, **sizes) as e:
        conversations = [list(range(3 + 100 * i, 99 + 100 * i)) for i in range(3)]
        cached = []
        for ids in conversations + conversations:
            output = e.generate(input_ids=ids, sampling_params={"max_new_tokens": 1})
            cached.append(output["meta_info"]["cached_tokens"])
        assert cached == [0, 0, 0, 80, 80, 80]
    with engine(None, **sizes, disable_radix_cache=True) as e:
        assert e.get_server_info()["max_total_num_tokens"] == 112


def test_threads_share_an_engine(plain):
    e, c = plain
    results = {}

    def work(i):
        params = SamplingParams(temperature=0, max_new_tokens=32, ignore_eos=True)
        results[i] = e.generate(input_ids=c.prompts[i], sampling_params=params)["output_ids"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(c.prompts))]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert [results[i] for i in range(len(c.prompts))] == c.answers


def test_a_large_batch_waits_in_its_own_queue(plain):
    """More prompts than a server would queue."""
    e, _ = plain
    outputs = e.generate(
        input_ids=[[i % 150, 7] for i in range(400)],
        sampling_params=SamplingParams(max_new_tokens=1, ignore_eos=True),
    )
    assert len(outputs) == 400 and all(len(o["output_ids"]) == 1 for o in outputs)


def test_mistakes_in_prompts_are_value_errors(demo):
    with pytest.raises(ValueError, match="no valid text"):
        demo.generate("a\ud800b")
    for ids in (["a"], [[5], "a"], "57"):
        with pytest.raises(ValueError, match="token ids"):
            demo.generate(input_ids=ids)
