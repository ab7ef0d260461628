"""ModelRunner: one rank's model, KV pool and sampler; runs one StepPlan at a time.

Everything here happens on the engine's stream, in the order of the plans: a step reads the tokens
and lengths that the one before has left in the RowState, and the host sees results only through
copies."""

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from .. import ops
from ..attention.registry import create_attention_backend
from ..batch import ForwardBatch
from ..config import ServerArgs
from ..device import Device, Memory, OutOfMemory, upload
from ..distributed import Communicator
from ..errors import ConfigError
from ..layers.base import BuildContext
from ..memory.kv_pool import KVPool
from ..messages import unpack_ids
from ..model_config import ModelConfig
from ..models.loader import load_model
from ..quantization.registry import linear_methods
from ..step_plan import LogprobSpan, StepPlan, StepResult
from .kv_budget import kv_pages
from .profiler import Profiler
from .row_state import RowState
from .sampler import Sampled, Sampler
from .warm_up import warm_up_plans

_LOAD_TIMEOUT = 3600.0  # how long ranks wait for each other's loading; a death ends it at once
# glibc keeps what packing has freed, a quarter of a small model, and what the first steps have:
# back to the system.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", int)


@dataclass(slots=True)
class Forwarded:
    """What `ModelRunner.forward` leaves for `draw`: `hidden` [S, hidden_size], on the device, the
    last hidden state before each sample; and `prompt_logprobs` as StepResult has them."""

    hidden: torch.Tensor
    prompt_logprobs: list[tuple[np.ndarray, np.ndarray, np.ndarray]]


class ModelRunner:
    """Loads the model; raises ConfigError. All ranks construct it together: their pools get the
    smallest's size.

    `max_samples` is how many tokens a decode entry may run and sample in one step."""

    def __init__(
        self,
        args: ServerArgs,
        config: ModelConfig,
        device: Device,
        communicator: Communicator,
        *,
        max_samples: int = 1,
    ) -> None:
        self.config = config
        self.device = device
        self.max_samples = max_samples
        self._comm = communicator
        self.profiler = Profiler(communicator.rank, device)
        self.max_context = args.context_length or config.max_context
        if self.max_context > config.max_context:
            limit = f"the model's {config.max_context} positions"
            raise ConfigError(f"--context-length {self.max_context} exceeds {limit}")
        self._max_batch = args.max_running_requests
        self.max_rows = 2 * args.max_running_requests  # released rows wait for their last step
        dtype = getattr(torch, config.dtype if args.dtype == "auto" else args.dtype)
        kv_dtype = dtype if args.kv_cache_dtype == "auto" else getattr(torch, args.kv_cache_dtype)
        self.backend = create_attention_backend(
            args.attention_backend, config, device, kv_dtype, args.page_size
        )
        communicator.barrier(_LOAD_TIMEOUT)  # no rank has loaded yet
        before = device.memory()
        communicator.barrier(_LOAD_TIMEOUT)
        try:
            self._load(args, dtype)
            self._make_pool(args, kv_dtype, before)
        except (RuntimeError, MemoryError) as error:
            out_of_memory = OutOfMemory.of(error)
            if out_of_memory is None:
                raise
            raise ConfigError(_no_memory(device, out_of_memory)) from None
        _trim(0)

    def _load(self, args: ServerArgs, dtype: torch.dtype) -> None:
        where = self.device.torch_device
        positions = self.max_context
        if self.device.is_cpu:  # no row is longer than the pool; on a GPU the warm-up's may be
            pages = -(-(args.max_total_tokens or self.max_context) // args.page_size)
            positions = min(positions, pages * args.page_size)
        method = linear_methods.get(args.quantization or "dense")()
        ctx = BuildContext(
            communicator=self._comm,
            backend=self.backend,
            linear_method=method,
            dtype=dtype,
            device=where,
            max_positions=positions,
        )
        self.model = load_model(self.config, args, ctx)
        _trim(0)
        # Fresh memory of more than 32 MiB is the system's: every step would be the first to touch
        # its pages.
        self._logits = None
        if self.device.is_cpu and self._comm.world_size == 1:
            self._logits = torch.empty(self._max_batch * self.max_samples, self.config.vocab_size)
        self._state = RowState(self.max_rows, max_samples=self.max_samples, device=self.device)
        self._sampler = None
        if self._comm.rank == 0:
            self._sampler = Sampler(self.max_rows, vocab_size=self.config.vocab_size, device=where)

    def _make_pool(self, args: ServerArgs, dtype: torch.dtype, before: Memory) -> None:
        world = self._comm.world_size
        shape = {
            "num_layers": self.config.num_layers,
            "page_size": args.page_size,
            "num_kv_heads": self.config.kv_heads_per_rank(world),
            "head_dim": self.config.head_dim,
        }
        make_pool = partial(KVPool, **shape, dtype=dtype, device=self.device)
        if not self.device.is_cpu:
            # torch keeps the memory of the largest steps: the pool cannot have it.
            self._use_pool(make_pool(num_pages=1), args)
        self._comm.barrier(_LOAD_TIMEOUT)  # every rank has its weights
        pages = kv_pages(
            args,
            self.device,
            KVPool.page_bytes(**shape, dtype=dtype),
            ranks=world if self.device.is_cpu else 1,
            full_pages=args.max_running_requests * -(-self.max_context // args.page_size),
            before=before,
        )
        mine = torch.tensor([pages], device=self.device.torch_device)
        self._use_pool(make_pool(num_pages=int(self._comm.all_gather(mine).min())), args)

    def _use_pool(self, pool: KVPool, args: ServerArgs) -> None:
        """From now on steps run on `pool`: first those of the warm-up, into its dummy page."""
        max_tokens = max(args.chunked_prefill_size, self._max_batch)
        if args.chunked_prefill_size == -1:
            max_tokens = self.max_context + self.max_rows
        max_tokens += self._max_batch * (self.max_samples - 1)  # drafts come on top
        self.kv_pool = pool
        self.batch = ForwardBatch(
            self.device,
            pool,
            max_tokens=max_tokens,
            max_batch=self._max_batch,
            max_rows=self.max_rows,
            max_context=self.max_context,
            max_samples=self.max_samples,
            expands_decode=self.backend.expands_decode,
        )
        for plan in warm_up_plans(self.batch):
            self._state.reset(committed_len=int(plan.kv_len[0]) - 1)
            self.run(plan)
        self._state.reset()
        self.device.synchronize()

    def run(self, plan: StepPlan) -> StepResult:
        """`forward` and `draw`."""
        return self.draw(plan, self.forward(plan))

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Forwarded:
        """Queues the model's part of a step, on all ranks: it stores the keys and values of the
        plan's tokens. `draw` or `skip_draw` of the same plan must follow before another step."""
        if self._sampler is not None:
            for state in plan.new_rows:
                self._sampler.admit(state)
        self.batch.load(plan, self._state.next_token, self._state.committed_len)
        self.backend.plan(self.batch)
        with self.profiler.span(f"forward {self.batch.num_tokens} tokens"):
            hidden = self.model(self.batch)
        scores = [self._score(plan, span, hidden) for span in plan.logprob_spans]
        return Forwarded(
            hidden=hidden.index_select(0, self.batch.logit_rows),
            prompt_logprobs=[score for score in scores if score is not None],
        )

    def _score(
        self, plan: StepPlan, span: LogprobSpan, hidden: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """A span's entry in StepResult.prompt_logprobs; None on ranks other than 0."""
        targets = upload(unpack_ids(span.targets).copy(), hidden.device)
        start = self.batch.first_token(plan, span.index) + span.first
        logits = self.model.compute_logits(hidden[start : start + len(targets)])
        if logits is None:
            return None
        logprobs, top_logprobs, top_ids = ops.token_logprobs(logits, targets, span.top_n)
        return self._to_host(logprobs), self._to_host(top_ids), self._to_host(top_logprobs)

    @torch.inference_mode()
    def draw(
        self, plan: StepPlan, forwarded: Forwarded, masks: np.ndarray | None = None
    ) -> StepResult:
        """Queues the rest of the step, on all ranks: samples, and moves the rows past what they
        accept. Results are rank 0's, on a GPU filled when the stream has passed. `masks`, rank 0's
        alone, have passed `check_masks`."""
        bitmask = None
        if masks is not None:
            words = np.ascontiguousarray(masks).view(np.int32)
            bitmask = upload(words, self.device.torch_device)
        with self.profiler.span("draw"):
            sampled = self._sample(plan, forwarded.hidden, bitmask)
            return self._finish(plan, forwarded, sampled)

    @torch.inference_mode()
    def skip_draw(self, plan: StepPlan, forwarded: Forwarded) -> StepResult:
        """Instead of `draw`, on rank 0: every sample is -1, as for logits that are not finite. A
        later step finds valid state."""
        count = len(forwarded.hidden)
        if count:
            self._compute_logits(forwarded.hidden)  # the other ranks draw: it is a collective
        ids = torch.full((count,), -1, dtype=torch.int32, device=self.device.torch_device)
        return self._finish(plan, forwarded, Sampled(ids))

    def check_masks(self, plan: StepPlan, masks: np.ndarray) -> None:
        """Raises ValueError unless `masks` are uint32 [S, ceil(V / 32)]."""
        wanted = (int(plan.num_samples.sum()), -(-self.config.vocab_size // 32))
        if masks.dtype != np.uint32 or masks.shape != wanted:
            found = f"{masks.dtype} {list(masks.shape)}"
            raise ValueError(f"they are {found}, the step needs uint32 {list(wanted)}")

    def _sample(
        self, plan: StepPlan, hidden: torch.Tensor, bitmask: torch.Tensor | None
    ) -> Sampled:
        """Rank 0's samples; on the others memory for the ids, which are to be received."""
        count = len(hidden)
        rows = np.repeat(plan.rows, plan.num_samples)
        sampler = self._sampler
        if sampler is not None and bitmask is None and count and sampler.is_greedy(rows):
            ids = self.model.greedy_tokens(hidden)
            if ids is not None:
                return Sampled(ids)
        if count:
            logits = self._compute_logits(hidden)
            if logits is not None and sampler is not None:
                before = self.batch.positions.index_select(0, self.batch.logit_rows)
                return sampler.sample(logits, rows, before.long() + 1, bitmask)
        return Sampled(torch.empty(count, dtype=torch.int32, device=hidden.device))

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        out = None if self._logits is None else self._logits[: len(hidden)]
        return self.model.compute_logits(hidden, out)

    def _finish(self, plan: StepPlan, forwarded: Forwarded, sampled: Sampled) -> StepResult:
        """Tells the other ranks the ids and moves the rows on."""
        counts = np.ones(self.batch.num_sampling, np.int32)
        if len(sampled.ids):
            self._comm.broadcast(sampled.ids)
            accepted = self._state.accept(self.batch, sampled.ids)
            if self.batch.num_samples > self.batch.num_sampling:
                counts = self._to_host(accepted)
        return StepResult(
            step_id=plan.step_id,
            ids=self._to_host(sampled.ids),
            counts=counts,
            logprobs=self._to_host(sampled.logprobs),
            top_ids=self._to_host(sampled.top_ids),
            top_logprobs=self._to_host(sampled.top_logprobs),
            prompt_logprobs=forwarded.prompt_logprobs,
        )

    def _to_host(self, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        host = self.device.host_empty(*tensor.shape, dtype=tensor.dtype)
        return host.copy_(tensor, non_blocking=True).numpy()


def _no_memory(device: Device, error: OutOfMemory) -> str:
    wanted = f": {error.wanted}" if error.wanted else ""
    flags = "--mem-fraction-static, --chunked-prefill-size, --max-running-requests and --tp-size"
    return f"not enough memory on {device.torch_device}{wanted}; see {flags}"
