"""Everything native that a decode step calls, captured as HIP graphs by the runtime's own runner
and replayed on other inputs in the same buffers, on the executor of AMD's machine code.

What this cannot show: torch's allocator and streams for ROCm (`torch.cuda.graph`), and Triton's
launches, for no torch here is built for ROCm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import radix_kernels
from radix_kernels import LogitEdits, _loader, reference
from radix_runtime.engine.graphs import StepGraphs
from tests.gcn import arrays, graphs
from tests.gcn.graphs import Recorder, StreamArray
from tests.kernel.helpers import assert_same_bits

# As imported: what the tests of single ops patch closes the memory after each call.
OPS = {name: getattr(radix_kernels, name) for name in radix_kernels.capabilities()["ops"]}

pytestmark = pytest.mark.timeout(600)
BF16 = torch.bfloat16
ROWS = 5
VOCABULARY = 1000
SLOTS = 32
PAGES = 8  # of a row


@pytest.fixture(autouse=True)
def _on_the_executor(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") != "rocm-sim":
        pytest.skip("of --device rocm-sim")


@pytest.fixture
def stream() -> Iterator[Any]:
    with graphs.streams() as current:
        yield current


class Inputs:
    """Fresh values for the arguments of a call."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random).to(dtype)

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self._random)

    def below(self, end: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(0, end, shape, generator=self._random).to(dtype)

    def slots(self, count: int = ROWS, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Of the cache or of counts, no two the same, the last a padding row's."""
        found = torch.randperm(SLOTS, generator=self._random)[:count].to(dtype)
        found[-1] = -1
        return found

    def caches(self, heads: int, head: int) -> list[torch.Tensor]:
        return [self.randn(SLOTS // 4, 4, heads, head) for _ in range(2)]

    def draws(self) -> list[torch.Tensor]:
        temperature = 0.5 + self.rand(ROWS)
        temperature[0] = 0
        top_p = 0.5 + self.rand(ROWS) / 2
        seed = self.below(1 << 30, ROWS, dtype=torch.int64)
        position = self.below(999, ROWS, dtype=torch.int64)
        return [temperature, self.below(50, ROWS), top_p, self.rand(ROWS) / 10, seed, position]

    def logits(self) -> torch.Tensor:
        return 3 * self.randn(ROWS, VOCABULARY, dtype=torch.float32)

    def penalties(self) -> list[torch.Tensor]:
        counts = self.below(3, SLOTS, VOCABULARY)
        factors = [1 + self.rand(ROWS), self.rand(ROWS), self.rand(ROWS)]
        return [counts, self.slots(dtype=torch.int32), *factors]


@dataclass(frozen=True)
class Case:
    """make: the tensors of a call; call: makes it with arrays of these, and gives its results."""

    make: Callable[[Inputs], list[torch.Tensor]]
    call: Callable[..., Any]


def _rope(i: Inputs) -> list[torch.Tensor]:
    table = reference.rope_cos_sin_cache(64, 40, 10000.0)
    return [i.below(40, ROWS, dtype=torch.int64), i.randn(ROWS, 4, 64), i.randn(ROWS, 2, 64), table]


def _fused_rope(i: Inputs) -> list[torch.Tensor]:
    positions, q, k, table = _rope(i)
    norms = [i.randn(64), i.randn(64)]
    tail = [table, positions, *i.caches(2, 64), i.slots()]
    return [q, k, i.randn(ROWS, 2, 64), *norms, *tail]


def _edited(logits: Any, *rest: Any) -> Any:
    settings = rest[:6]
    counts, slots, repetition, frequency, presence, ids, values = rest[6:]
    edits = LogitEdits(
        bias=(ids, values), penalties=(counts, slots, repetition, frequency, presence)
    )
    return OPS["top_k_top_p_sampling"](logits, *settings, edits=edits)


def _shards(logits: Any, *settings: Any) -> Any:
    return OPS["sampling_candidates"](logits, *settings, first_id=0, vocab_size=VOCABULARY)


def _records(i: Inputs) -> list[torch.Tensor]:
    settings = i.draws()
    settings[1].fill_(20)
    given = {"first_id": 0, "vocab_size": VOCABULARY, "num_candidates": 64}
    return [reference.sampling_candidates(i.logits(), *settings, **given)[None], *settings]


def _step(i: Inputs) -> list[torch.Tensor]:
    """A decode step of ROWS - 1 rows and one of padding, the dummy row; the last is the scratch
    row."""
    rows = torch.arange(ROWS, dtype=torch.int32)
    one = torch.ones_like(rows)
    starts = torch.where(rows < ROWS - 1, rows * PAGES, -1)
    entries = torch.stack([rows, rows, one, one * ROWS])
    tokens = torch.stack([rows, one - 1, starts, ~rows])
    lengths = torch.cat([i.below(PAGES * 4 - 1, ROWS), torch.zeros(1, dtype=torch.int32)])
    lengths[ROWS - 1] = 0
    next_token = i.below(VOCABULARY, ROWS + 1, 1)
    given = [entries, tokens, rows, next_token, lengths, i.below(SLOTS, ROWS, PAGES)]
    lists = [torch.zeros(ROWS, dtype=torch.int32) for _ in range(3)]
    wide = [torch.zeros(ROWS, dtype=torch.int64) for _ in range(2)]
    return [*given, *lists, *wide, torch.zeros(ROWS, PAGES, dtype=torch.int32)]


def _fill_step(*given: Any) -> Any:
    names = ("kv_lens", "input_ids", "positions", "slot_mapping", "sample_positions", "page_table")
    made = dict(zip(names, given[6:], strict=True))
    return OPS["fill_step_tensors"](*given[:6], 4, **made)


def _samples(i: Inputs) -> list[torch.Tensor]:
    rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(ROWS)).int()
    ids = i.below(VOCABULARY, ROWS) - 1
    return [ids, rows, rows.clone(), i.below(VOCABULARY, ROWS, 1), i.below(999, ROWS)]


CASES = {
    "fill_step_tensors": Case(_step, _fill_step),
    "accept_tokens": Case(_samples, OPS["accept_tokens"]),
    "rmsnorm": Case(lambda i: [i.randn(ROWS, 256), i.randn(256)], OPS["rmsnorm"]),
    "fused_add_rmsnorm": Case(
        lambda i: [i.randn(ROWS, 256), i.randn(ROWS, 256), i.randn(256)], OPS["fused_add_rmsnorm"]
    ),
    "apply_rope_inplace": Case(
        _rope, lambda p, q, k, table: OPS["apply_rope_inplace"](p, q, k, 64, table)
    ),
    "fused_qk_norm_rope_store": Case(_fused_rope, OPS["fused_qk_norm_rope_store"]),
    "silu_and_mul": Case(lambda i: [i.randn(ROWS, 512)], OPS["silu_and_mul"]),
    "gelu_and_mul": Case(lambda i: [i.randn(ROWS, 512)], OPS["gelu_and_mul"]),
    "gelu_tanh_and_mul": Case(lambda i: [i.randn(ROWS, 512)], OPS["gelu_tanh_and_mul"]),
    "store_kv_cache": Case(
        lambda i: [i.randn(ROWS, 2, 64), i.randn(ROWS, 2, 64), *i.caches(2, 64), i.slots()],
        OPS["store_kv_cache"],
    ),
    "store_mla_kv": Case(
        lambda i: [i.randn(ROWS, 512), i.randn(ROWS, 64), i.randn(SLOTS // 4, 4, 576), i.slots()],
        OPS["store_mla_kv"],
    ),
    "merge_state": Case(
        lambda i: [
            i.randn(ROWS, 4, 64),
            i.randn(ROWS, 4, dtype=torch.float32),
            i.randn(ROWS, 4, 64),
            i.randn(ROWS, 4, dtype=torch.float32),
        ],
        OPS["merge_state"],
    ),
    "topk_softmax": Case(lambda i: [i.randn(ROWS, 64)], lambda x: OPS["topk_softmax"](x, 4)),
    "topk_sigmoid": Case(lambda i: [i.randn(ROWS, 64)], lambda x: OPS["topk_sigmoid"](x, 4)),
    "moe_fused_gate": Case(
        lambda i: [i.randn(ROWS, 64), i.randn(64, dtype=torch.float32)],
        lambda x, bias: OPS["moe_fused_gate"](x, bias, 4, 2, 4),
    ),
    "moe_align_block_size": Case(
        lambda i: [i.below(8, ROWS, 2)], lambda ids: OPS["moe_align_block_size"](ids, 8, 16)
    ),
    "moe_sum": Case(lambda i: [i.randn(ROWS, 4, 256)], OPS["moe_sum"]),
    "per_tensor_quant_fp8": Case(lambda i: [i.randn(ROWS, 256)], OPS["per_tensor_quant_fp8"]),
    "per_token_quant_fp8": Case(lambda i: [i.randn(ROWS, 256)], OPS["per_token_quant_fp8"]),
    "per_token_group_quant": Case(lambda i: [i.randn(ROWS, 256)], OPS["per_token_group_quant"]),
    "silu_and_mul_quant_fp8": Case(lambda i: [i.randn(ROWS, 512)], OPS["silu_and_mul_quant_fp8"]),
    "rmsnorm_quant_fp8": Case(
        lambda i: [i.randn(ROWS, 256), i.randn(256)], OPS["rmsnorm_quant_fp8"]
    ),
    "per_token_quant_int8": Case(lambda i: [i.randn(ROWS, 256)], OPS["per_token_quant_int8"]),
    "silu_and_mul_quant_int8": Case(lambda i: [i.randn(ROWS, 512)], OPS["silu_and_mul_quant_int8"]),
    "rmsnorm_quant_int8": Case(
        lambda i: [i.randn(ROWS, 256), i.randn(256)], OPS["rmsnorm_quant_int8"]
    ),
    "apply_penalties_inplace": Case(
        lambda i: [i.logits(), *i.penalties()], OPS["apply_penalties_inplace"]
    ),
    "count_tokens_inplace": Case(
        lambda i: [
            i.below(3, SLOTS, VOCABULARY),
            i.slots(dtype=torch.int32),
            i.below(VOCABULARY, ROWS),
        ],
        OPS["count_tokens_inplace"],
    ),
    "top_k_top_p_sampling": Case(lambda i: [i.logits(), *i.draws()], OPS["top_k_top_p_sampling"]),
    "sampling of edited logits": Case(
        lambda i: [
            i.logits(),
            *i.draws(),
            *i.penalties(),
            i.below(VOCABULARY, ROWS, 3),
            i.randn(ROWS, 3, dtype=torch.float32),
        ],
        _edited,
    ),
    "top_k_top_p_sampling_with_logprobs": Case(
        lambda i: [i.logits(), *i.draws()],
        lambda *given: OPS["top_k_top_p_sampling_with_logprobs"](*given, 5),
    ),
    "token_logprobs": Case(
        lambda i: [i.logits(), i.below(VOCABULARY, ROWS)],
        lambda logits, ids: OPS["token_logprobs"](logits, ids, 5),
    ),
    "sampling_candidates": Case(lambda i: [i.logits(), *i.draws()], _shards),
    "sample_candidates": Case(
        _records, lambda *given: OPS["sample_candidates"](*given, vocab_size=VOCABULARY)
    ),
}
# Of prompts alone, or not native on ROCm.
NOT_IN_A_DECODE_STEP = {"gather_mla_kv", "concat_mla_k"}


def as_list(result: Any) -> list[Any]:
    if result is None:
        return []
    return list(result) if isinstance(result, tuple) else [result]


def eager(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Arguments and results after the call as it is."""
    mine = [x.clone() for x in tensors]
    results = as_list(case.call(*(StreamArray(x) for x in mine)))
    return [*mine, *(x.tensor for x in results)]


def poison(tensors: list[torch.Tensor]) -> None:
    for x in tensors:
        x.view(torch.uint8).fill_(0xFF) if x.ndim else x.fill_(-1)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8) if x.ndim else x


def test_all_native_ops_of_a_decode_step_are_here():
    said = radix_kernels.capabilities()["ops"]
    native = {
        name
        for name, dtypes in said.items()
        if any(entry["impl"].startswith("rocm") for entry in dtypes.values())
    }
    assert native - NOT_IN_A_DECODE_STEP <= set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_graph_of_the_op_serves_other_inputs(name, stream):
    case = CASES[name]
    step_graphs = StepGraphs(Recorder(stream))
    held = case.make(Inputs(0))
    given = [StreamArray(x) for x in held]

    def work() -> list[Any]:
        return as_list(case.call(*given))

    step_graphs.run(name, work)  # what the first call of a kernel does happens here
    for x, values in zip(held, case.make(Inputs(1)), strict=True):
        x.copy_(values)
    step_graphs.capturing = True
    before = [x.clone() for x in held]
    step_graphs.run(name, work)
    assert len(step_graphs) == 1
    # It ran once before it was captured, and the capture itself executed nothing.
    first = eager(case, before)
    for got, want in zip(held, first, strict=False):
        assert torch.equal(bits(got), bits(want))
    step_graphs.capturing = False
    results = step_graphs.run(name, work)  # the graph's own, from now on
    for seed in (2, 3):
        fresh = case.make(Inputs(seed))
        for x, values in zip(held, fresh, strict=True):
            x.copy_(values)
        poison([x.tensor for x in results])
        assert step_graphs.run(name, work) is results
        expected = eager(case, fresh)
        for got, want in zip([*held, *(x.tensor for x in results)], expected, strict=True):
            assert torch.equal(bits(got), bits(want)), name


def test_two_ops_in_one_graph(stream):
    """The second reads what the first wrote; the results' memory is the graph's own."""
    x, residual, weight = (Inputs(0).randn(ROWS, 256) for _ in range(3))
    weight = weight[0].contiguous()
    given = [StreamArray(t) for t in (x, residual, weight)]

    def work() -> Any:
        OPS["fused_add_rmsnorm"](*given)
        return OPS["silu_and_mul"](given[0])

    step_graphs = StepGraphs(Recorder(stream))
    step_graphs.run("layer", work)
    step_graphs.capturing = True
    step_graphs.run("layer", work)
    result = step_graphs.run("layer", work)
    for seed in (4, 5):
        x.copy_(Inputs(seed).randn(ROWS, 256))
        residual.copy_(Inputs(seed + 10).randn(ROWS, 256))
        exact = [x.clone(), residual.clone()]
        step_graphs.run("layer", work)
        reference.fused_add_rmsnorm(*exact, weight)
        assert_same_bits(residual, exact[1])
        assert torch.allclose(x.double(), exact[0].double(), rtol=1e-2, atol=1e-2)
        gated = reference.silu_and_mul(x.double())
        assert torch.allclose(result.tensor.double(), gated, rtol=1e-2, atol=1e-2)


def test_a_call_on_the_legacy_stream_ends_the_capture(stream):
    """Arrays that name no stream: what torch would do without `with torch.cuda.stream`."""
    x = arrays.Array(Inputs(0).randn(ROWS, 512))
    out = arrays.Array(torch.zeros(ROWS, 256, dtype=BF16))
    step_graphs = StepGraphs(Recorder(stream))
    step_graphs.run("step", lambda: OPS["silu_and_mul"](x, out=out))
    step_graphs.capturing = True
    out.tensor.zero_()
    runs = []

    def work() -> None:
        runs.append(len(runs))
        OPS["silu_and_mul"](x, out=out)

    with pytest.raises(RuntimeError, match="legacy stream"):
        step_graphs.run("step", work)
    assert len(runs) == 2 and len(step_graphs) == 0
    step_graphs.capturing = False
    out.tensor.zero_()
    step_graphs.run("step", work)  # as it is, as before
    assert_same_bits(out.tensor, reference.silu_and_mul(x.tensor))
    assert _loader.backend == "rocm"
