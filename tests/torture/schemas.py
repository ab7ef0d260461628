"""python -m tests.torture.schemas: answers under random schemas obey, and are the same whatever
the server does meanwhile. Exit status 1 if one does not or is not.

Every schema is asked of the demo model and of random weights, at a temperature of 0 to 1.5; each
whole answer is validated by jsonschema. Then everything is asked again as streams, without overlap,
in three choices, on two ranks, with pages of one token, and with requests that are retracted."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file

from radix_runtime import Engine
from radix_runtime.constraint import Constraint
from radix_runtime.errors import RequestError
from radix_runtime.grammar.llguidance_backend import LlguidanceBackend
from radix_runtime.hub import DEMO_MODEL_DIR
from tests.runtime.grammar_texts import VOCABULARY
from tests.torture.random_schemas import SchemaWriter

PROMPTS = ["Write JSON about a person.", "Hello", "x", "Colors: red, green"]
WEIGHTS = ("demo", "random")
# What ends a text, a list or an object, and a number, and how much it is favoured.
ENDS = {'"': 16.0, '"}': 16.0, '"]': 16.0, "]": 12.0, "}": 12.0, ",": 6.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "no overlap": {"disable_overlap_schedule": True},
    "two ranks": {"tp_size": 2, "num_threads": 2},
    "pages of one token": {"page_size": 1},
}
MAX_TOKENS = 300
RETRACT_EVERY = 40  # pieces of streams
Output = dict[str, Any]


@dataclass
class Questions:
    """What is asked of each model; `refused` counts the schemas that are not kept, by code."""

    schemas: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    params: list[dict[str, Any]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)


def questions(count: int, seed: int) -> Questions:
    """So many schemas that are kept. Every second one has no bounds: then what ends a text, a
    number or a list is favoured."""
    dice = random.Random(seed)
    compiler = LlguidanceBackend(VOCABULARY, 0)
    found = Questions()
    writers = {
        is_bounded: SchemaWriter(dice, is_bounded=is_bounded) for is_bounded in (True, False)
    }
    while len(found.schemas) < count:
        is_bounded = len(found.schemas) % 2 == 0
        schema = writers[is_bounded].write()
        try:
            compiler.compile(Constraint("json_schema", json.dumps(schema), whitespace=""))
        except RequestError as error:
            assert error.status == 400, error
            found.refused[error.code] += 1
            continue
        found.schemas.append(schema)
        found.prompts.append(dice.choice(PROMPTS))
        found.params.append(
            {
                "structured_outputs": {"json": schema, "disable_any_whitespace": True},
                "temperature": dice.choice([0, 0.4, 0.8, 1.2, 1.5]),
                "max_new_tokens": MAX_TOKENS,
                "seed": dice.randrange(1000),
                "logit_bias": {} if is_bounded else _favoured(),
            }
        )
    return found


def _favoured() -> dict[int, float]:
    texts = enumerate(text.decode("utf-8", "replace") for text in VOCABULARY.tokens)
    return {token: ENDS[text] for token, text in texts if text in ENDS}


def write_random_model(folder: Path) -> None:
    """The demo model with random weights."""
    shutil.copytree(DEMO_MODEL_DIR, folder)
    generator = torch.Generator().manual_seed(5)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            is_norm = tensor.dim() == 1
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = torch.ones_like(tensor) if is_norm else (0.05 * noise).to(tensor.dtype)
        save_file(tensors, file)


def ids(outputs: list[Output]) -> list[list[int]]:
    """The tokens of each answer."""
    return [output["output_ids"] for output in outputs]


def check(asked: Questions, outputs: list[Output], n: int = 1) -> tuple[int, list[str]]:
    """How many answers have ended by themselves, and which of these are wrong."""
    ended = 0
    wrong = []
    for number, output in enumerate(outputs):
        if output["meta_info"]["finish_reason"]["type"] != "stop":
            continue
        ended += 1
        schema = asked.schemas[number // n]
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        try:
            is_valid = validator.is_valid(json.loads(output["text"]))
        except ValueError:
            is_valid = False
        if not is_valid:
            wrong.append(f"{json.dumps(schema)} got {output['text']!r}")
    return ended, wrong


def streamed(engine: Engine, asked: Questions, *, retract: bool = False) -> list[list[int]]:
    """The tokens of the same answers, piece by piece; with `retract` the youngest of them gives its
    memory back again and again."""
    last: dict[int, list[int]] = {}
    for number, piece in enumerate(engine.stream(asked.prompts, asked.params)):
        last[piece["index"]] = piece["output_ids"]
        if retract and number % RETRACT_EVERY == 0:
            with engine._turn():
                engine._scheduler.retract_youngest()
    return [last[index] for index in range(len(asked.prompts))]


def same(name: str, expected: list[list[int]], found: list[list[int]]) -> list[str]:
    """A line for each answer that is another one."""
    lines = []
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one != other:
            equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))  # noqa: B905
            lines.append(f"{name}: answer {number} is another one from token {equal} on")
    return lines


def run(asked: Questions, weights: str, folder: Path, **settings: Any) -> list[str]:
    """Asks one model, whose random weights are written to `folder`, in every way. Prints a line for
    each; returns what is wrong."""
    broken: list[str] = []
    count = len(asked.schemas)
    settings["dtype"] = "float32"
    if weights == "random":
        settings["model_path"] = str(folder / "model")
        write_random_model(folder / "model")
    with Engine(**settings) as engine:
        began = time.monotonic()
        outputs = engine.generate(asked.prompts, asked.params)
        expected = ids(outputs)
        ended, wrong = check(asked, outputs)
        broken += wrong
        tokens = sum(map(len, expected))
        _tell(weights, f"{ended} of {count} ended, {len(wrong)} wrong, {tokens} tokens", began)
        if ended < 0.9 * count:
            broken.append(f"{weights}: {ended} of {count} answers have ended")
        broken += _of_one_engine(engine, asked, expected, weights)
    for name, options in OPTIONS.items():
        began = time.monotonic()
        with Engine(**{**settings, **options}) as engine:
            found = same(name, expected, ids(engine.generate(asked.prompts, asked.params)))
        _tell(weights, f"{name}: {len(found)} answers differ", began)
        broken += found
    return broken


def _of_one_engine(
    engine: Engine, asked: Questions, expected: list[list[int]], weights: str
) -> list[str]:
    """The ways that need no other engine."""
    began = time.monotonic()
    found = same("streamed", expected, streamed(engine, asked))
    _tell(weights, f"streamed: {len(found)} answers differ", began)
    began = time.monotonic()
    retracted = same("retracted", expected, streamed(engine, asked, retract=True))
    times = engine._scheduler.counters.num_retractions_total
    _tell(weights, f"retracted {times} times: {len(retracted)} answers differ", began)
    if times == 0:
        retracted.append("nothing was retracted")
    began = time.monotonic()
    several = engine.generate(asked.prompts, [{**params, "n": 3} for params in asked.params])
    ended, wrong = check(asked, several, n=3)
    choices = same("three choices", expected, ids(several[::3]))
    line = f"three choices: {ended} of {len(several)} ended, {len(wrong)} wrong, "
    _tell(weights, f"{line}{len(choices)} answers differ", began)
    return [*found, *retracted, *wrong, *choices]


def _tell(weights: str, text: str, began: float) -> None:
    print(f"{weights}: {text} ({time.monotonic() - began:.0f} s)", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.schemas", description=__doc__)
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--weights", choices=WEIGHTS, nargs="+", default=WEIGHTS)
    flags = parser.parse_args()
    asked = questions(flags.schemas, flags.seed)
    print(
        f"seed {flags.seed}: {len(asked.schemas)} schemas; refused: {dict(asked.refused)}",
        flush=True,
    )
    broken = []
    for weights in flags.weights:
        with TemporaryDirectory() as folder:
            broken += run(asked, weights, Path(folder))
    print("\n".join(broken or ["every answer that ended obeys, and all are the same"]))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
