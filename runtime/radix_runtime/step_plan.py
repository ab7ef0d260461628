"""StepPlan: what the scheduler tells every rank about one step, as plain numpy.

Arrays and ranks have one order of rows: decode rows, then prefill chunks. A row is an index into
the request table."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from .sampling_params import SamplingParams

# batch index      0 .. num_decode-1        num_decode .. B-1
# query_len        1                        length of the chunk
# source[t]        row of next_token        FROM_PROMPT: token comes from `input_ids`
FROM_PROMPT = -1

LOGPROB_ROWS = 1024  # of a LogprobSpan at most: so many rows of prompt logits are alive at once


class RowSampling(msgspec.Struct, forbid_unknown_fields=True):
    """Sampling state of a row that was just (re)admitted. `seed` is the 64-bit seed of the choice
    as a signed integer. `output_ids` (int32 bytes) is not empty after a retraction; with
    `prompt_ids` it seeds the penalty counts, so both are empty without penalties. `min_end`: ids of
    `stop_ids` are masked while the sampled position is below it."""

    row: int
    seed: int
    params: SamplingParams
    min_end: int = 0
    stop_ids: list[int] = []
    prompt_ids: bytes = b""
    output_ids: bytes = b""
    return_logprob: bool = False
    top_logprobs: int = 0


class LogprobSpan(msgspec.Struct, forbid_unknown_fields=True):
    """Prompt logprobs: rows [first, first + len(targets)) of entry `index` score `targets`, int32
    bytes."""

    index: int
    first: int
    targets: bytes
    top_n: int = 0


_NONE = np.zeros(0, np.int32)


class StepPlan(msgspec.Struct, array_like=True, forbid_unknown_fields=True, eq=False):
    step_id: int
    num_decode: int
    rows: np.ndarray  # int32 [B]
    query_len: np.ndarray  # int32 [B]
    kv_len: np.ndarray  # int32 [B], includes the new tokens
    input_ids: np.ndarray  # int32 [number of FROM_PROMPT entries in source]
    source: np.ndarray  # int32 [T]
    page_rows: np.ndarray = _NONE  # page deltas: table[row, index] = page
    page_index: np.ndarray = _NONE
    page_ids: np.ndarray = _NONE
    sample_index: np.ndarray = _NONE  # batch entries that sample a token
    new_rows: list[RowSampling] = []
    logprob_spans: list[LogprobSpan] = []


encode_plan = msgspec.msgpack.Encoder(
    enc_hook=lambda array: array.astype("<i4", copy=False).tobytes()
).encode
decode_plan = msgspec.msgpack.Decoder(
    StepPlan, dec_hook=lambda kind, data: np.frombuffer(data, "<i4")
).decode


@dataclass(slots=True)
class StepResult:
    """What a step gave the host. Entry i belongs to `plan.sample_index[i]`.

    `ids` int32 [S]: the sampled token; -1 where the logits were not finite. `logprobs` float32 [S]
    (NaN where not asked for), `top_ids`/`top_logprobs` [S, top_n of the step]. `prompt_logprobs`
    runs parallel to `plan.logprob_spans`: (logprobs [n], top_ids [n, top_n], top_logprobs)."""

    step_id: int
    ids: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    prompt_logprobs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)


class Executor(Protocol):
    """The engine as the scheduler sees it: steps are executed in the order of their launch."""

    num_pages: int  # pages that requests may own; the dummy page is beyond them
    page_size: int
    max_rows: int  # request-table rows
    max_context: int  # tokens a request may have in all
    vocab_size: int

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        """Does not wait. Here or in the result EngineDeadError is raised when the engine cannot go
        on."""

    def close(self) -> None: ...
