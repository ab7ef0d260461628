"""ModelRunner: one rank's model, KV pool and sampler; runs one StepPlan at a time.

Everything here happens on the engine's stream, in the order of the plans: a step reads the token
that the one before has written to `next_token`, and the host sees results only through copies."""

import ctypes
import re
from typing import Any

import numpy as np
import torch

from .. import ops
from ..attention.registry import create_attention_backend
from ..batch import ForwardBatch
from ..config import ServerArgs
from ..device import Device, Memory, upload
from ..distributed import Communicator
from ..errors import ConfigError
from ..hub import DEMO_MODEL_DIR, resolve_model_path
from ..layers.base import BuildContext
from ..memory.kv_pool import KVPool
from ..messages import unpack_ids
from ..model_config import ModelConfig
from ..models.loader import load_model
from ..quantization.registry import linear_methods
from ..sampling_params import SamplingParams
from ..step_plan import FROM_PROMPT, LOGPROB_ROWS, LogprobSpan, RowSampling, StepPlan, StepResult
from .sampler import Sampled, Sampler

_CPU_SHARE = 0.25  # of what is available after loading, without --mem-fraction-static
_CPU_FULL = 4  # times what running requests can fill is enough on a CPU, with cached prefixes
_GPU_FRACTION = 0.88
_DEMO_LIMIT = 512 << 20
_LOAD_TIMEOUT = 3600.0  # how long ranks wait for each other's loading; a death ends it at once
_MIB = 1 << 20
# glibc keeps what packing has freed, a quarter of a small model, and what the first steps have:
# back to the system.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", int)


class ModelRunner:
    """Loads the model; raises ConfigError. All ranks construct it together: their pools get the
    smallest's size."""

    def __init__(
        self, args: ServerArgs, config: ModelConfig, device: Device, communicator: Communicator
    ) -> None:
        self.config, self.device, self._comm = config, device, communicator
        self.max_context = args.context_length or config.max_context
        if self.max_context > config.max_context:
            raise ConfigError(
                f"--context-length {self.max_context} exceeds the model's {config.max_context} positions"
            )
        self.max_rows = 2 * args.max_running_requests  # released rows wait for their last step
        chunk, running = args.chunked_prefill_size, args.max_running_requests
        max_tokens = self.max_context + self.max_rows if chunk == -1 else max(chunk, running)
        dtype = getattr(torch, config.dtype if args.dtype == "auto" else args.dtype)
        kv_dtype = dtype if args.kv_cache_dtype == "auto" else getattr(torch, args.kv_cache_dtype)
        self.backend = create_attention_backend(
            args.attention_backend, config, device, kv_dtype, args.page_size
        )
        communicator.barrier(_LOAD_TIMEOUT)  # no rank has loaded yet
        before, where = device.memory(), device.torch_device
        communicator.barrier(_LOAD_TIMEOUT)
        method = linear_methods.get(args.quantization or "dense")()
        # On a CPU no row is longer than the pool, on a GPU a step of the warm-up may be.
        room = -(-(args.max_total_tokens or self.max_context) // args.page_size) * args.page_size
        positions = min(self.max_context, room) if device.is_cpu else self.max_context
        ctx = BuildContext(communicator, self.backend, method, dtype, where, positions)
        self._limits = {"max_tokens": max_tokens, "max_batch": running, "max_rows": self.max_rows}
        try:
            self.model = load_model(config, args, ctx)
            _trim(0)
            kept = device.is_cpu and communicator.world_size == 1
            self._logits = torch.empty(running, config.vocab_size) if kept else None
            self._next_token = torch.zeros(self.max_rows, dtype=torch.int32, device=where)
            self._sampler = (
                None if communicator.rank else Sampler(self.max_rows, config.vocab_size, where)
            )
            self._make_pool(args, kv_dtype, before)
        except (
            RuntimeError
        ) as error:  # torch has a class of its own for a GPU's memory, none for the host's
            if not (wanted := re.search(r"tried to allocate [\d.]+ \w+", str(error), re.I)):
                raise
            flags = "--mem-fraction-static, --chunked-prefill-size, --max-running-requests and --tp-size"
            raise ConfigError(
                f"not enough memory on {device.torch_device}: {wanted[0]}; see {flags}"
            ) from None
        _trim(0)

    def _make_pool(self, args: ServerArgs, dtype: torch.dtype, before: Memory) -> None:
        config, world = self.config, self._comm.world_size
        shape = (
            config.num_layers,
            args.page_size,
            config.kv_heads_per_rank(world),
            config.head_dim,
        )
        page_bytes = KVPool.page_bytes(*shape, dtype)
        kind: dict[str, Any] = {"dtype": dtype, "device": self.device}
        if (
            not self.device.is_cpu
        ):  # the memory of the largest steps, which torch keeps, is not there for the pool
            self._warm_up(KVPool(*shape, num_pages=1, **kind))
        self._comm.barrier(_LOAD_TIMEOUT)  # every rank has its weights
        full = args.max_running_requests * -(-self.max_context // args.page_size)
        sharers = world if self.device.is_cpu else 1
        pages = kv_pages(
            args, self.device, page_bytes, ranks=sharers, full_pages=full, before=before
        )
        mine = torch.tensor([pages], device=self.device.torch_device)
        self._warm_up(KVPool(*shape, num_pages=int(self._comm.all_gather(mine).min()), **kind))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Queues one step, on all ranks; results are rank 0's, on a GPU filled when the stream has
        passed."""
        if self._sampler is not None:
            for state in plan.new_rows:
                self._sampler.admit(state)
        self.batch.load(plan, self._next_token)
        self.backend.plan(self.batch)
        hidden = self.model(self.batch)
        result = StepResult(plan.step_id, *map(self._to_host, self._sample(plan, hidden)))
        for span in plan.logprob_spans:
            targets = upload(unpack_ids(span.targets).copy(), hidden.device)
            start = int(plan.query_len[: span.index].sum()) + span.first
            logits = self.model.compute_logits(hidden[start : start + len(targets)])
            if logits is not None:
                logprobs, top, top_ids = ops.token_logprobs(logits, targets, span.top_n)
                result.prompt_logprobs.append(tuple(map(self._to_host, (logprobs, top_ids, top))))
        return result

    # Samples on rank 0, tells the others, leaves the ids where the next step reads them.
    def _sample(self, plan: StepPlan, hidden: torch.Tensor) -> Sampled:
        rows = plan.rows[plan.sample_index]
        sampled = Sampled(torch.empty(len(rows), dtype=torch.int32, device=hidden.device))
        if len(rows) == 0:
            return sampled
        hidden, sampler = hidden.index_select(0, self.batch.logit_rows), self._sampler
        # Fresh memory of more than 32 MiB is the system's: every step would be the first to touch
        # its pages.
        kept = () if self._logits is None else (self._logits[: len(rows)],)
        if (
            sampler is not None
            and sampler.is_greedy(rows)
            and (ids := self.model.greedy_tokens(hidden)) is not None
        ):
            sampled = Sampled(ids)
        elif (
            logits := self.model.compute_logits(hidden, *kept)
        ) is not None and sampler is not None:
            sampled = sampler.sample(logits, rows, plan.kv_len[plan.sample_index])
        self._comm.broadcast(sampled.ids)
        self._next_token.index_copy_(0, self.batch.sample_rows.long(), sampled.ids)
        return sampled

    def _to_host(self, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        host = self.device.host_empty(*tensor.shape, dtype=tensor.dtype)
        return host.copy_(tensor, non_blocking=True).numpy()

    # From now on `pool` is used: first by a prefill and a decode step into its dummy page, so that
    # what is slow once, or cannot run, shows now. On a GPU these are the largest that there can be.
    def _warm_up(self, pool: KVPool) -> None:
        self.kv_pool, self.batch = (
            pool,
            ForwardBatch(self.device, pool, max_context=self.max_context, **self._limits),
        )
        small = self.device.is_cpu
        length = min(
            self.max_context, self.batch.max_tokens, pool.page_size if small else self.max_context
        )
        rows = np.arange(1 if small else self.batch.max_batch, dtype=np.int32)
        kv_len, source = (
            np.full(len(rows), length, np.int32),
            np.full(length, FROM_PROMPT, np.int32),
        )
        drawn = [RowSampling(row, 0, SamplingParams(top_p=0.9)) for row in rows.tolist()]
        scored = [LogprobSpan(0, 0, bytes(4 * min(length, LOGPROB_ROWS)), 1)]
        first = rows[:1], kv_len[:1], kv_len[:1], np.zeros(length, np.int32), source
        self.run(
            StepPlan(-1, 0, *first, sample_index=rows[:1], new_rows=drawn, logprob_spans=scored)
        )
        self.run(
            StepPlan(-1, len(rows), rows, rows * 0 + 1, kv_len, source[:0], rows, sample_index=rows)
        )
        self.device.synchronize()


def kv_pages(
    args: ServerArgs,
    device: Device,
    page_bytes: int,
    *,
    ranks: int,
    full_pages: int,
    before: Memory,
) -> int:
    """Pages of this rank's pool, measured after the weights were loaded: `--max-total-tokens`, or
    what the memory gives (on a GPU, what the largest steps have left). Raises ConfigError with the
    numbers. `ranks` share the memory; `full_pages`: every running request at its longest; `before`:
    memory before any weights were loaded."""
    memory = device.memory()
    room = memory.available // ranks
    if args.max_total_tokens is not None:
        pages = -(-args.max_total_tokens // args.page_size)
        if pages * page_bytes > room:
            needs = f"needs {pages * page_bytes // _MIB} MiB, {room // _MIB} MiB are available"
            raise ConfigError(f"--max-total-tokens {args.max_total_tokens} {needs}")
        return pages
    fraction = args.mem_fraction_static
    if not device.is_cpu:
        used = memory.total - memory.available
        budget = int(memory.total * (fraction or _GPU_FRACTION)) - used
    elif fraction is not None:
        budget = int(before.available * fraction) - max(0, before.available - memory.available)
    else:
        budget = min(
            int(memory.available * _CPU_SHARE), _CPU_FULL * full_pages * page_bytes * ranks
        )
    if fraction is None and resolve_model_path(args.model_path, weights=False) == DEMO_MODEL_DIR:
        budget = min(budget, _DEMO_LIMIT)
    budget = min(room, budget // ranks)
    if budget < page_bytes:
        needs = f"{budget // _MIB} MiB are left after the weights, a page takes {page_bytes / _MIB:.1f} MiB"
        raise ConfigError(
            f"no memory for a KV cache: {needs}; see --mem-fraction-static and --page-size"
        )
    pages = budget // page_bytes
    return min(full_pages, pages) if args.disable_radix_cache else pages
