"""No step of the engine makes the host wait for the GPU: torch reports every wait it makes.

    python -m tests.gpu.no_sync

Samples with every kind of state: penalties, bias, masked stops, logprobs of prompt and output. The
one wait that belongs, for the results of the step before, is an event of which torch says nothing.
"""

from __future__ import annotations

import sys
import warnings

import torch

from radix_runtime import Engine, SamplingParams
from tests.kernel.on_device import no_library_for

PARAMS = [
    SamplingParams(temperature=0, max_new_tokens=20),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.02, max_new_tokens=24),
    SamplingParams(frequency_penalty=0.4, repetition_penalty=1.1, max_new_tokens=18),
    SamplingParams(logit_bias={5: -2.0, 9: 1.0}, min_new_tokens=8, max_new_tokens=16),
]


def run(engine: Engine, first_id: int) -> None:
    """A few requests with every kind of sampling, from prompts that begin at `first_id`."""
    prompts = [[first_id + i, *range(20, 40 + 13 * i)] for i in range(len(PARAMS))]
    outputs = engine.generate(
        input_ids=prompts,
        sampling_params=PARAMS,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
    )
    assert all(output["output_ids"] for output in outputs)


def main() -> None:
    if why := no_library_for("cuda"):
        sys.exit(f"nothing to check: {why}")
    with Engine(None, device="cuda", chunked_prefill_size=64) as engine:
        run(engine, 100)  # first calls compile and allocate
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run(engine, 200)
            found = {f"{w.filename}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)}
        torch.cuda.set_sync_debug_mode("default")
    print("\n".join(sorted(found)))
    print(f"{len(found)} places where the host waits")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
