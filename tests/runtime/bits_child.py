"""`python -m tests.runtime.bits_child`: the same requests on engines that cut their work
differently; prints, one JSON list a weight format, what each engine gave: token ids and
log-probabilities."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import radix_kernels
from radix_runtime.offline import Engine

ROOT = Path(__file__).resolve().parents[2]
# Large enough that every op is cut between threads.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 992,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4099,
}
# The first two have a chunk of one token.
LENGTHS = [1, 33, *(3 + 37 * i % 90 for i in range(9))]
PROMPTS = [random.Random(i).choices(range(4000), k=length) for i, length in enumerate(LENGTHS)]
PARAMS = [
    {"temperature": 0.8 * (i % 2), "seed": i, "max_new_tokens": 6, "ignore_eos": True}
    for i in range(len(PROMPTS))
]
FINE = {"chunked_prefill_size": 32, "page_size": 1}


def answers(together: int, threads: int, **settings: Any) -> list[Any]:
    """(log-probability, token) of every token of every request; `together`: requests in a batch."""
    engine = Engine(
        ROOT / "bench/serving/models/qwen3-0.6b",
        device="cpu",
        dtype="bfloat16",
        load_format="dummy",
        json_model_override_args=json.dumps(SIZES),
        max_total_tokens=2048,
        disable_radix_cache=True,
        num_threads=threads,
        **settings,
    )
    with engine:
        radix_kernels.set_num_threads(threads)  # the engine takes no more than there are CPUs
        outputs = []
        for at in range(0, len(PROMPTS), together):
            part = slice(at, at + together)
            outputs += engine.generate(
                input_ids=PROMPTS[part], sampling_params=PARAMS[part], return_logprob=True
            )
        assert radix_kernels.get_num_threads() == threads
    return [
        [entry[:2] for entry in output["meta_info"]["output_token_logprobs"]] for output in outputs
    ]


def main() -> None:
    everybody = len(PROMPTS)
    print(json.dumps([answers(everybody, 1), answers(1, 2), answers(4, 5, **FINE)]))
    for quantization in ("int8", "int4"):
        given = {"quantization": quantization}
        print(json.dumps([answers(everybody, 1, **given), answers(4, 5, **given, **FINE)]))


if __name__ == "__main__":
    main()
