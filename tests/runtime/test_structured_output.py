"""Constrained answers of the demo model: every option gives the same tokens, each one obeys."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from radix_runtime import Engine, SamplingParams
from radix_runtime.grammar.step_masks import PromisedMasks
from radix_runtime.step_plan import Forward
from tests.torture.schemas import WEIGHTS, check, ids, questions, run, streamed

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TAG = {
    "structures": [
        {"begin": "<f>", "schema": {"type": "integer", "maximum": 99, "minimum": 0}, "end": "</f>"}
    ],
    "triggers": ["<f"],
}
PROMPTS = ["Write JSON about a person.", "Hello", "x", "Colors: red, green"]


def constrained(**fields: Any) -> dict[str, Any]:
    return {"max_new_tokens": 96, "seed": 7, **fields}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(dtype="float32", check_invariants="step", max_total_tokens=4096) as made:
        yield made


def texts(outputs: list[dict[str, Any]]) -> list[str]:
    return [output["text"] for output in outputs]


def reasons(outputs: list[dict[str, Any]]) -> set[str]:
    return {output["meta_info"]["finish_reason"]["type"] for output in outputs}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_schema(engine: Engine, temperature: float) -> None:
    params = constrained(json_schema=SCHEMA, temperature=temperature, max_new_tokens=400)
    outputs = engine.generate(PROMPTS, params)
    assert reasons(outputs) == {"stop"}
    for text in texts(outputs):
        Draft202012Validator(SCHEMA).validate(json.loads(text))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[a-f]{3}-[0-9]{4}"}, "[a-f]{3}-[0-9]{4}"),
        ({"regex": "(yes|no)( maybe)?"}, "(yes|no)( maybe)?"),
        ({"regex": "ä[öü]{2}\\n\"'/\\\\"}, "ä[öü]{2}\\n\"'/\\\\"),
        (
            {"structured_outputs": {"choice": ["red", 'a "b" \\ ü\n', "re"]}},
            'red|re|a "b" \\\\ ü\n',
        ),
        ({"ebnf": 'root ::= "a" [0-9]{2} tail\ntail ::= "." | "!"'}, "a[0-9]{2}[.!]"),
        ({"ebnf": 'start: WORD ("," WORD){2}\nWORD: /[a-z]{1,4}/'}, "[a-z]{1,4}(,[a-z]{1,4}){2}"),
        ({"structured_outputs": {"grammar": 'start: "x"{3}'}}, "xxx"),
    ],
)
def test_grammars_of_every_kind(engine: Engine, fields: dict[str, Any], pattern: str) -> None:
    outputs = engine.generate(PROMPTS, constrained(temperature=1.2, **fields))
    assert reasons(outputs) == {"stop"}
    for text in texts(outputs):
        assert re.fullmatch(pattern, text), text


def test_a_structural_tag(engine: Engine) -> None:
    """What follows the trigger is forced; the rest is the model's."""
    bias = {engine.tokenizer.encode("<", False)[0]: 20.0}  # type: ignore[union-attr]
    params = constrained(structural_tag=TAG, temperature=1.0, logit_bias=bias)
    for text in texts(engine.generate(PROMPTS, params)):
        for found in re.finditer("<f", text):
            rest = text[found.start() :]
            ended = re.match("<f>[0-9]{1,2}</f>", rest)
            assert ended or len(rest) < len("<f>99</f>"), text  # cut by its length
    only = {"format": {"type": "tag", "begin": "<a>", "content": {"type": "regex",
            "pattern": "[0-9]{2}"}, "end": "</a>"}}  # fmt: skip
    for text in texts(engine.generate(PROMPTS, constrained(structural_tag=only))):
        assert re.fullmatch("<a>[0-9]{2}</a>", text)


def test_json_object(engine: Engine) -> None:
    params = constrained(
        structured_outputs={"json_object": True, "disable_any_whitespace": True},
        temperature=1.0,
        seed=None,
        # "{" alone begins, not with the quote of a string that need not end.
        logit_bias=dict.fromkeys(engine.tokenizer.encode("{}", False), 100.0),  # type: ignore[union-attr]
    )
    ended = 0
    for output in engine.generate(PROMPTS * 4, params):
        assert output["text"].startswith("{")
        if output["meta_info"]["finish_reason"]["type"] == "stop":
            ended += 1
            assert isinstance(json.loads(output["text"]), dict)
    assert ended


def test_whitespace_of_the_server() -> None:
    with Engine(dtype="float32", constrained_json_whitespace_pattern="[ ]?") as engine:
        text = engine.generate("x", constrained(json_schema=SCHEMA))["text"]
        assert not re.search("\\n|  ", text)
        fields = {"json": SCHEMA, "disable_any_whitespace": True}
        text = engine.generate("x", constrained(structured_outputs=fields))["text"]
        assert " " not in json.dumps(json.loads(text), separators=(",", ":"))
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


def batch(engine: Engine, n: int = 1) -> list[list[int]]:
    """The tokens of constrained answers beside free ones."""
    prompts, params = [], []
    for number, prompt in enumerate(PROMPTS * 2):
        prompts.append(prompt)
        given: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.8, "seed": number}
        if number % 2:
            given["regex"] = "([a-z]{1,5} ){4}end"
        if number == 5:
            given = {**given, "json_schema": SCHEMA, "n": n, "regex": None,
                     "repetition_penalty": 1.1}  # fmt: skip
        params.append(given)
    return [output["output_ids"] for output in engine.generate(prompts, params)]


def late_at_random(masks: PromisedMasks, samples: dict[int, int], forward: Forward) -> set[int]:
    """PromisedMasks._await: every second mask of a stream is late, whether it has come or not."""
    optional = [number for number, s in samples.items() if s < masks._num_optional]
    late = {number for number in optional if LATE.random() < 0.5}
    if len(late) == masks._size:
        late.pop()
    while any(masks._source.is_missing(number) for number in samples.keys() - late):
        masks._source.changed.wait()
    return late


LATE = random.Random(0)
VARIANTS: list[dict[str, Any]] = [
    {"disable_overlap_schedule": True},
    {"page_size": 1},
    {"chunked_prefill_size": 3, "max_running_requests": 3},
    {"disable_radix_cache": True},
    {"tp_size": 2, "num_threads": 2},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda settings: next(iter(settings)))
def test_the_same_tokens_under_every_option(
    engine: Engine, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With masks that are late at random too."""
    expected = batch(engine)
    with Engine(dtype="float32", check_invariants="step", **settings) as other:
        assert batch(other) == expected
        monkeypatch.setattr(PromisedMasks, "_await", late_at_random)
        assert batch(other) == expected
        assert other._scheduler.counters.late_masks_total > 0


def test_choices_and_streams_give_the_same(engine: Engine) -> None:
    params = constrained(regex="([a-z]{1,5} ){4}end", temperature=1.0)
    single = engine.generate(PROMPTS[0], params)
    several = engine.generate(PROMPTS[0], {**params, "n": 3})
    assert len({tuple(output["output_ids"]) for output in several}) == 3
    for output in [single, *several]:
        assert re.fullmatch("([a-z]{1,5} ){4}end", output["text"])
    last = None
    for piece in engine.stream(PROMPTS[0], params):
        last = piece
    assert last is not None and last["output_ids"] == single["output_ids"]


def test_retraction_keeps_the_grammar(engine: Engine) -> None:
    """A request that gives its pages back in the middle of its answer goes on where it was."""
    params = constrained(regex="([a-z]{1,5} ){9}end", temperature=0)
    expected = engine.generate(PROMPTS, params)
    last: dict[int, list[int]] = {}
    for number, piece in enumerate(engine.stream(PROMPTS, params)):
        last[piece["index"]] = piece["output_ids"]
        if number in (9, 14, 30):
            with engine._turn():
                engine._scheduler.retract_youngest()
    assert engine._scheduler.counters.num_retractions_total >= 3
    assert [last[index] for index in range(len(PROMPTS))] == [o["output_ids"] for o in expected]


def test_what_else_ends_an_answer(engine: Engine) -> None:
    found = engine.generate("x", constrained(regex="[a-c]{200}", max_new_tokens=5))
    assert found["meta_info"]["finish_reason"]["type"] == "length"
    found = engine.generate("x", constrained(regex="(ab){20}", stop="bab"))
    assert found["text"] == "a"
    assert found["meta_info"]["finish_reason"]["matched"] == "bab"


def test_the_grammar_wins_over_min_tokens(engine: Engine) -> None:
    found = engine.generate("x", constrained(regex="yes|no", min_new_tokens=50))
    assert found["text"] in ("yes", "no")
    assert found["meta_info"]["finish_reason"]["type"] == "stop"
    found = engine.generate("x", constrained(regex="a*", min_new_tokens=9, max_new_tokens=9))
    assert found["meta_info"]["completion_tokens"] == 9


def test_logprobs_are_those_of_the_raw_logits(engine: Engine) -> None:
    params = constrained(regex="zq[0-9]", temperature=0)
    found = engine.generate("Hello", params, return_logprob=True)
    ids = found["output_ids"]
    prompt = engine.tokenizer.encode("Hello")  # type: ignore[union-attr]
    scored = engine.generate(
        input_ids=[*prompt, *ids],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=len(prompt),
    )
    given = [entry[0] for entry in found["meta_info"]["output_token_logprobs"]]
    raw = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"]]
    assert given == pytest.approx(raw, abs=1e-3)


def test_a_penalised_and_biased_answer_obeys(engine: Engine) -> None:
    eos = engine.tokenizer.eos_token_id  # type: ignore[union-attr]
    params = constrained(
        regex="[ab]{30}", frequency_penalty=2.0, logit_bias={eos: 100.0}, temperature=1.0
    )
    for text in texts(engine.generate(PROMPTS, params)):
        assert re.fullmatch("[ab]{30}", text)


BAD = [
    {"regex": "(?=a)b"},
    {"regex": "a" * 2049},
    {"json_schema": "{"},
    {"json_schema": {"not": {"pattern": "a"}}},
    {"json_schema": [1]},
    {"ebnf": "((("},
    {"ebnf": 'root ::= "a" b'},
    {"ebnf": "start: " + '"a" ' * 20_000},
    {"structural_tag": "{}"},
    {"structural_tag": {"structures": [{"begin": "x"}], "triggers": ["y"]}},
    {"structured_outputs": {"choice": []}},
    {"regex": "a", "ebnf": "b"},
    {"regex": "a", "ignore_eos": True},
]


@pytest.mark.parametrize("fields", BAD)
def test_bad_constraints_raise_and_hurt_nobody(engine: Engine, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="."):
        engine.generate("x", constrained(**fields))
    assert engine.generate("x", constrained(regex="ok"))["text"] == "ok"


def test_without_grammars() -> None:
    with Engine(dtype="float32", grammar_backend="none") as engine:
        with pytest.raises(ValueError, match="--grammar-backend none"):
            engine.generate("x", {"regex": "a"})
        assert engine.generate("x", SamplingParams(max_new_tokens=2))["output_ids"]


def test_kills_lose_nothing(engine: Engine) -> None:
    """The masker dies in the middle of many answers: the same tokens come, a little later."""
    expected = batch(engine, n=2)
    masker = engine._grammars.masker
    assert masker is not None
    stream = engine.stream(PROMPTS[1], constrained(regex="([a-z]{1,5} ){9}end", temperature=0.8))
    whole = engine.generate(PROMPTS[1], constrained(regex="([a-z]{1,5} ){9}end", temperature=0.8))
    last: dict[str, Any] = {}
    for number, piece in enumerate(stream):
        last = piece
        if number == 3:
            os.kill(masker.pid or 0, signal.SIGKILL)
    assert last["output_ids"] == whole["output_ids"]
    assert batch(engine, n=2) == expected


FULL = bool(os.environ.get("RADIX_TEST_FULL"))


def test_random_schemas(engine: Engine) -> None:
    """A sample of `python -m tests.torture.schemas`."""
    asked = questions(60, seed=7)
    outputs = engine.generate(asked.prompts, asked.params)
    ended, wrong = check(asked, outputs)
    assert not wrong and ended >= 54
    counters = engine._scheduler.counters
    before = counters.num_retractions_total
    assert streamed(engine, asked, retract=True) == ids(outputs)
    assert counters.num_retractions_total > before


@pytest.mark.skipif(not FULL, reason="the long form")
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_thousand_random_schemas(weights: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    assert run(questions(1_000, seed), weights, tmp_path) == [], seed


def test_an_idle_engine_has_forgotten_every_answer(engine: Engine) -> None:
    engine.generate(PROMPTS, constrained(regex="[a-z]{5}", n=2))
    engine.flush_cache()
    constraints = engine._scheduler.constraints
    deadline = time.monotonic() + 30
    while constraints._by_request and time.monotonic() < deadline:
        engine.get_server_info()
    assert not constraints._by_request and not constraints._known and not constraints._awaited
    assert engine._grammars.masker is not None
    assert not engine._grammars.masker._answers and not engine._grammars.masker._sent
