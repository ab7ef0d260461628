"""The steps that a rank runs before it serves: what is slow once, or cannot run, shows then."""

import numpy as np

from ..batch import ForwardBatch
from ..sampling_params import SamplingParams
from ..step_plan import (
    LOGPROB_ROWS,
    LogprobSpan,
    RowSampling,
    StepPlan,
    decode_plan,
    prefill_plan,
)


def warm_up_plans(batch: ForwardBatch) -> list[StepPlan]:
    """A prefill and a decode step for `batch`, without page deltas: every page is the dummy page.

    On a GPU these are the largest steps that there can be, so that torch has their memory."""
    num_rows = batch.max_batch
    length = min(batch.max_context, batch.max_tokens)
    if batch.device.is_cpu:
        num_rows = 1
        length = min(length, batch.kv_pool.page_size)
    rows = range(num_rows)
    params = SamplingParams(top_p=0.9)
    targets = bytes(4 * min(length, LOGPROB_ROWS))
    prefill = prefill_plan(
        rows[:1],
        [np.zeros(length, np.int32)],
        new_rows=[RowSampling(row=row, seed=0, params=params) for row in rows],
        logprob_spans=[LogprobSpan(index=0, first=0, targets=targets, top_n=1, ranks=True)],
    )
    return [prefill, decode_plan(rows, [length] * num_rows)]
