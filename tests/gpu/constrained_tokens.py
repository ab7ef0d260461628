"""Answers under a schema, beside free ones, from captured steps and from queued ones.

    python -m tests.gpu.constrained_tokens [--device cuda]

Greedy and drawn requests of the embedded model, a third of them under a schema: each of those is
valid, and every toggle gives the same tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from jsonschema import Draft202012Validator

from radix_runtime import Engine

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPTS = ["What is 17 + 25?", "Give me an object.", "Count the letters.", "Hello"]
REQUESTS = 32
TOGGLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"disable_cuda_graph": True},
    "overlap": {"disable_overlap_schedule": True},
    "page": {"page_size": 1},
}


def is_bound(number: int) -> bool:
    """Whether this request has the schema."""
    return number % 3 == 0


def params(number: int) -> dict[str, Any]:
    """Sampling parameters of a request."""
    given = {"temperature": 0.8 * (number % 2), "seed": number, "max_new_tokens": 100}
    return {**given, "json_schema": json.dumps(SCHEMA)} if is_bound(number) else given


def answers(device: str, **settings: Any) -> list[dict[str, Any]]:
    """Of all requests at once."""
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(REQUESTS)]
    with Engine(device=device, mem_fraction_static=0.3, **settings) as engine:
        return engine.generate(prompts, [params(number) for number in range(REQUESTS)])


def invalid_answers(outputs: list[dict[str, Any]]) -> list[str]:
    """Texts that break the schema, or have not ended within it."""
    validator = Draft202012Validator(SCHEMA)
    bad = []
    for number, output in enumerate(outputs):
        if not is_bound(number):
            continue
        ended = output["meta_info"]["finish_reason"]["type"] == "stop"
        if not ended or not validator.is_valid(json.loads(output["text"])):
            bad.append(f"request {number}: {output['text']!r}")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    wanted: list[list[int]] = []
    bad: list[str] = []
    for name, settings in TOGGLES.items():
        outputs = answers(device, **settings)
        bad += invalid_answers(outputs)
        found = [output["output_ids"] for output in outputs]
        wanted = wanted or found
        same = sum(1 for a, b in zip(found, wanted, strict=True) if a == b)
        print(f"{name}: {same} of {REQUESTS} answers are the first run's", flush=True)
        if same < REQUESTS:
            bad.append(f"{name}: other tokens")
    print("\n".join(bad) or "every answer is valid and the same under every toggle")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
