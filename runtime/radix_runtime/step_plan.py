"""What scheduler and engine tell each other: StepPlan and StepResult of a step, EngineCommand.

Plain numpy, no torch. The entries of a step are decode entries first, then prefill chunks; every
array of the plan has this order. A row is an index into the request table."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from .cache_spec import GroupSpec
from .sampling_params import SamplingParams

LOGPROB_ROWS = 1024  # of a LogprobSpan at most: so many rows of prompt logits are alive at once
NO_STEP = -1  # step_id of plans that no scheduler has numbered: warm-up, graph capture


class RowSampling(msgspec.Struct, forbid_unknown_fields=True):
    """Sampling state of a row that was just (re)admitted.

    `seed` is the 64-bit seed of the choice as a signed integer. Ids of `stop_ids` are masked while
    the sampled position is below `min_end`. `prompt_ids` and `output_ids` (int32 bytes; output is
    not empty after a retraction) seed the penalty counts; both are empty without penalties."""

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
    """Prompt logprobs: tokens [first, first + len(targets)) of entry `index` score `targets`, int32
    bytes; with their `ranks` in the vocabulary, if asked for."""

    index: int
    first: int
    targets: bytes
    top_n: int = 0
    ranks: bool = False


class SpanScores(NamedTuple):
    """What a LogprobSpan of n tokens has given: float32 [n], the likeliest ids [n, top_n] and their
    values, and int32 [n], 1 for the likeliest; None where no ranks were asked for."""

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    ranks: np.ndarray | None


_NONE = np.zeros(0, np.int32)


class PageDeltas(msgspec.Struct, array_like=True, forbid_unknown_fields=True, eq=False):
    """Changes of the page table of one window group: table[row, index] = page."""

    rows: np.ndarray
    index: np.ndarray
    ids: np.ndarray


class SnapshotCopy(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A copy between the recurrent state of `row` and snapshot `slot` of a group of snapshots.
    `position`: tokens that the state has seen."""

    group: int  # index in Executor.cache_groups
    row: int
    slot: int
    position: int


class StepPlan(msgspec.Struct, tag="step", array_like=True, forbid_unknown_fields=True, eq=False):
    """One step of B entries, the same for every rank. All arrays are int32.

    A decode entry runs the tokens that the device holds for its row: the last accepted one and its
    drafts. It samples after each of them. A chunk runs tokens of a prompt, given in `input_ids`; it
    samples after its last one if that ends the prompt.

    The engine runs what the plan says in this order: page copies between device and host one after
    the other, page deltas, restored states, the entries, snapshots."""

    step_id: int
    num_decode: int  # entries 0 .. num_decode-1 are decode entries, the others chunks
    rows: np.ndarray  # [B]
    query_len: np.ndarray  # [B] tokens to run: 1 .. max_samples of a decode entry, a chunk's length
    # [B] with the new tokens. Of a decode entry it is an upper bound while an earlier step is in
    # flight that may accept fewer tokens than it samples; the device knows the length itself.
    kv_len: np.ndarray
    num_samples: np.ndarray  # [B] tokens sampled: query_len of a decode entry; 0 or 1 of a chunk
    input_ids: np.ndarray  # [sum of the chunks' query_len]
    page_rows: np.ndarray = _NONE  # page deltas: table[row, index] = page
    page_index: np.ndarray = _NONE
    page_ids: np.ndarray = _NONE
    new_rows: list[RowSampling] = []
    logprob_spans: list[LogprobSpan] = []
    # Only with more cache groups than full pages, or a host tier.
    window_pages: list[PageDeltas] = []  # of the window groups, in the order of cache_groups
    restores: list[SnapshotCopy] = []  # state[row] = snapshot[slot]; other new rows start anew
    # snapshot[slot] = the row's state after `position` tokens, if the step commits so many.
    snapshots: list[SnapshotCopy] = []
    copy_source: np.ndarray = _NONE  # page copies: of the device to the host or back
    copy_target: np.ndarray = _NONE
    copy_to_host: np.ndarray = _NONE  # 1: `source` is on the device; 0: `target` is
    # Set by the executor: rank 0 draws under masks, which the other ranks do not see.
    has_masks: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs."""
        return int(self.query_len.sum())


def prefill_plan(
    rows: Sequence[int],
    prompts: Sequence[Sequence[int] | np.ndarray],
    *,
    step_id: int = NO_STEP,
    new_rows: Sequence[RowSampling] = (),
    logprob_spans: Sequence[LogprobSpan] = (),
) -> StepPlan:
    """Whole prompts, one a row, each of which samples one token. Page deltas are the caller's."""
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    return StepPlan(
        step_id=step_id,
        num_decode=0,
        rows=np.array(rows, np.int32),
        query_len=length,
        kv_len=length.copy(),
        num_samples=np.ones(len(rows), np.int32),
        input_ids=np.concatenate([_NONE, *prompts]).astype(np.int32),
        new_rows=list(new_rows),
        logprob_spans=list(logprob_spans),
    )


def decode_plan(
    rows: Sequence[int],
    kv_len: Sequence[int],
    *,
    query_len: int = 1,
    step_id: int = NO_STEP,
) -> StepPlan:
    """Decode entries of `query_len` tokens each; `kv_len` counts them. Page deltas are the
    caller's."""
    per_entry = np.full(len(rows), query_len, np.int32)
    return StepPlan(
        step_id=step_id,
        num_decode=len(rows),
        rows=np.array(rows, np.int32),
        query_len=per_entry,
        kv_len=np.array(kv_len, np.int32),
        num_samples=per_entry.copy(),
        input_ids=_NONE,
    )


class Profile(msgspec.Struct, tag="profile", array_like=True, forbid_unknown_fields=True):
    """Starts torch's profiler on every rank, or stops it. Each rank answers with the file in
    `directory` that holds its trace once profiling has stopped."""

    action: Literal["start", "stop"]
    directory: str = ""


EngineCommand = Profile  # a union, once there are more: what every rank does between two steps


def _array_to_bytes(array: np.ndarray) -> bytes:
    if array.dtype != np.int32:
        raise TypeError(f"an array of a StepPlan is {array.dtype}, not int32")
    return array.astype("<i4", copy=False).tobytes()


def _array_from_bytes(kind: type, data: bytes) -> Any:
    return np.frombuffer(data, "<i4")


_encoder = msgspec.msgpack.Encoder(enc_hook=_array_to_bytes)
_decoder = msgspec.msgpack.Decoder(StepPlan | EngineCommand, dec_hook=_array_from_bytes)


def serialize_plan(plan: StepPlan | EngineCommand) -> bytes:
    """`plan`, or a command in its place, as msgpack. Raises TypeError for an array that is not
    int32."""
    return _encoder.encode(plan)


def deserialize_plan(data: bytes) -> StepPlan | EngineCommand:
    """What `serialize_plan` wrote; arrays are read-only."""
    return _decoder.decode(data)


class DeviceSpan(Protocol):
    """When the device began with a step, and when it had done it."""

    def seconds(self) -> tuple[float, float]:
        """Both, on the clock of time.monotonic(). The device has passed them."""


@dataclass(slots=True)
class StepResult:
    """What a step gave the host, for the entries that sample (`plan.num_samples` > 0) in their
    order.

    `ids` int32 [sum of num_samples] are the sampled tokens, entry after entry; -1 where the logits
    were not finite. `counts` int32 [entries that sample] is how many of an entry's ids are
    accepted: 1 .. num_samples; the ids past it mean nothing. It may be read-only. `logprobs`
    float32 (NaN where not asked for) and `top_ids`, `top_logprobs` [.., top_n of the step] run
    parallel to `ids`.
    `late` bool [entries that sample], None without masks: decode entries whose mask had not come.
    They have drawn nothing, their rows are where they were, and a later step draws for them.
    `prompt_logprobs` runs parallel to `plan.logprob_spans`. `device_span` may be asked once the
    result is complete; None where the engine does not tell."""

    step_id: int
    ids: np.ndarray
    counts: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    late: np.ndarray | None = None
    prompt_logprobs: list[SpanScores] = field(default_factory=list)
    device_span: DeviceSpan | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """The model's part of a step, while its masks are awaited: when it was queued, in seconds of
    `time.monotonic`, and whether it still runs."""

    queued_at: float
    is_running: Callable[[], bool]


class StepMasks(Protocol):
    """The masks of a launched step, on their way to its draw."""

    def take(self, forward: Forward) -> tuple[np.ndarray, np.ndarray]:
        """Waits for the masks, once, on the engine's thread: while the model runs, and a little
        longer. Returns uint32 [S, ceil(vocab_size / 32)], in which bit `id % 32` of word `id // 32`
        allows an id to be sampled, and bool [S]: the samples of decode entries whose mask has not
        come, where the words may be anything. Never are all samples late. Raises whatever makes the
        masks fail."""


class Executor(Protocol):
    """The engine as the scheduler sees it: steps and commands are executed in the order of their
    `launch` and `call`. Used by one thread."""

    num_pages: int  # pages that requests may own; the dummy page is beyond them
    page_size: int
    max_rows: int  # request-table rows
    max_context: int  # tokens a request may have in all
    vocab_size: int
    max_samples: int  # tokens that a decode entry may run and sample in one step; 1: no drafts
    cache_groups: tuple[GroupSpec, ...]  # what the model keeps of a request; full pages come first
    host_pages: int  # pages of host memory for what the full pages have no room for; 0: none

    def launch(self, plan: StepPlan, masks: StepMasks | None = None) -> Future[StepResult]:
        """Does not wait. Here or in the result EngineDeadError is raised when the engine cannot go
        on.

        The model runs at once, the draw when `masks` gives them. A row whose mask is late draws
        nothing: a step launched behind this one, or the next, runs its last token again. If the
        masks fail, or do not fit the plan, the result raises MaskError: the step has sampled -1
        everywhere, a step launched behind it finds the rows where they were, and the engine goes
        on."""

    def call(self, command: EngineCommand) -> Future[list[str]]:
        """Has every rank execute `command` behind the steps launched so far. The result is the
        answer of each rank; it raises EngineCommandError if one fails, and the engine goes on."""

    def close(self) -> None:
        """Waits for the launched steps and gives the device back. Idempotent."""
