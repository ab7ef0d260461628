"""Greedy answers of the demo model, recorded from the CPU wheel and compared on other devices.

    python -m tests.runtime.demo_tokens record
    python -m tests.runtime.demo_tokens check --device cuda

The recording names the weights it was made with. In float32 the tokens must be equal; in bfloat16
an answer may part from the recorded one only where the two best float32 logits are close.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

from radix_runtime import Engine, SamplingParams
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.text.tokenizer import load_tokenizer

RECORDED = Path(__file__).parent / "data/demo_tokens.json"
PROMPTS = 200
NEW_TOKENS = 32
CLEAR = 1e-3  # between the two best logits of every recorded step
CLOSE = 0.05  # bfloat16 may decide otherwise below


def weights_hash() -> str:
    return hashlib.sha256((DEMO_MODEL_DIR / "model.safetensors").read_bytes()).hexdigest()


def load() -> list[dict[str, Any]]:
    """Rows of `prompt` ids, `tokens`, and `gaps` (of the two best logprobs at each token)."""
    data = json.loads(RECORDED.read_text())
    if data["weights"] != weights_hash():
        raise RuntimeError(f"{RECORDED.name} was made with other weights: record it again")
    rows: list[dict[str, Any]] = data["rows"]
    return rows


def answers(prompts: list[list[int]], **settings: Any) -> list[dict[str, Any]]:
    """Rows as in the recording, by an engine with these settings."""
    params = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS)
    with Engine(None, max_running_requests=64, **settings) as engine:
        outputs = engine.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=2
        )
    rows = []
    for prompt, output in zip(prompts, outputs, strict=True):
        tops = output["meta_info"]["output_top_logprobs"]
        gaps = [round(best[0] - second[0], 4) for best, second in tops]
        rows.append({"prompt": prompt, "tokens": output["output_ids"], "gaps": gaps})
    return rows


def differences(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """Where answers differ first, with the recorded gap there; it is infinite where one is only
    longer."""
    texts = []
    for i, (want, got) in enumerate(zip(expected, found, strict=True)):
        if want["tokens"] == got["tokens"]:
            continue
        shared = min(len(want["tokens"]), len(got["tokens"]))
        at = next((k for k in range(shared) if want["tokens"][k] != got["tokens"][k]), None)
        gap = float("inf") if at is None else want["gaps"][at]
        texts.append(f"prompt {i} parts at token {at}, where the gap is {gap}")
    return texts


def _questions(count: int) -> list[str]:
    rng = random.Random(11)
    places = ["France", "Japan", "Peru", "Kenya", "Norway", "Italy", "Egypt", "Canada"]
    words = ["stone", "river", "cloud", "lamp", "garden", "window", "silver"]
    made: dict[str, None] = {}
    while len(made) < count:
        a = rng.randrange(1000)
        b = rng.randrange(1000)
        word, other = rng.sample(words, 2)
        kinds = [
            f"What is {a} + {b}?",
            f"What is {max(a, b)} - {min(a, b)}?",
            f"What is {a % 13} times {b % 13}?",
            f"What is the capital of {rng.choice(places)}?",
            f"Spell the word {word}.",
            f"Reverse the word {word}.",
            f"Sort these numbers: {a}, {b}, {a % 13}",
            f"Tell me a short story about a {word} and a {other}.",
            f"Repeat this text: {word} {other} {b}",
            f"Hello, I am number {a}!",
        ]
        made[kinds[rng.randrange(len(kinds))]] = None
    return list(made)


def record() -> None:
    tokenizer = load_tokenizer(DEMO_MODEL_DIR)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}])
        for question in _questions(2 * PROMPTS)
    ]
    rows = answers(prompts, device="cpu", dtype="float32", num_threads=2)
    clear = [row for row in rows if min(row["gaps"]) > CLEAR][:PROMPTS]
    assert len(clear) == PROMPTS, f"only {len(clear)} answers keep clear of ties"
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in clear)
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(f'{{"weights": "{weights_hash()}",\n"rows": [\n{lines}\n]}}\n')
    print(f"{len(clear)} prompts, {sum(len(r['tokens']) for r in clear)} tokens")


def check(device: str) -> int:
    """0 when both types hold; prints what was found."""
    expected = load()
    prompts = [row["prompt"] for row in expected]
    failed = 0
    for dtype in ("float32", "bfloat16"):
        found = differences(expected, answers(prompts, device=device, dtype=dtype))
        allowed = CLOSE if dtype == "bfloat16" else 0
        wrong = [text for text in found if float(text.rpartition(" ")[2]) >= allowed]
        print(f"{device} {dtype}: {len(expected) - len(found)} of {len(expected)} answers equal")
        for text in found:
            print("  WRONG" if text in wrong else "  close", text)
        failed += len(wrong)
    return 1 if failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.action == "record":
        record()
    else:
        sys.exit(check(args.device))


if __name__ == "__main__":
    main()
