"""ModelRunner: one rank's model, KV pool and sampler; runs one StepPlan at a time.

Everything here happens on the engine's stream, in the order of the plans: a step reads the token that the one before
has written to `next_token`, and the host sees results only through copies."""

import logging
from typing import Any

import numpy as np
import torch

from ..attention.registry import create_attention_backend
from ..batch import ForwardBatch
from ..config import ServerArgs
from ..device import Device, Memory, upload
from ..distributed import Communicator
from ..errors import ConfigError
from ..hf import DEMO_MODEL_DIR, resolve_model_path
from ..layers.base import BuildContext
from ..memory.kv_pool import KVPool
from ..messages import unpack_ids
from ..model_config import ModelConfig
from ..models.loader import load_model
from ..quantization.registry import linear_methods
from ..step_plan import FROM_PROMPT, StepPlan, StepResult
from .sampler import Sampled, Sampler, score_in_blocks

logger = logging.getLogger(__name__)

_CPU_SHARE = 0.25  # of what is available after loading, without --mem-fraction-static
_GPU_FRACTION = 0.88
_DEMO_LIMIT = 512 << 20
_LOAD_TIMEOUT = 3600.0  # how long ranks wait for each other's loading; a death ends it at once
_MIB = 1 << 20


class ModelRunner:
    """Loads the model; raises ConfigError. All ranks construct it together: their pools get the smallest's size."""

    def __init__(self, args: ServerArgs, config: ModelConfig, device: Device, communicator: Communicator) -> None:
        self.config, self.device, self._comm = config, device, communicator
        self.max_context = args.context_length or config.max_context
        if self.max_context > config.max_context:
            positions = f"the {config.max_context} positions of the model"
            raise ConfigError(f"--context-length {self.max_context} exceeds {positions}")
        self.max_rows = 2 * args.max_running_requests  # released rows wait for their last step
        max_tokens = max(args.chunked_prefill_size, args.max_running_requests)
        if args.chunked_prefill_size == -1:
            max_tokens = self.max_context + self.max_rows
        dtype = getattr(torch, config.dtype if args.dtype == "auto" else args.dtype)
        kv_dtype = dtype if args.kv_cache_dtype == "auto" else getattr(torch, args.kv_cache_dtype)
        self.backend = create_attention_backend(args.attention_backend, config, device, kv_dtype, args.page_size)
        communicator.barrier(_LOAD_TIMEOUT)  # no rank has loaded yet
        before, where = device.memory(), device.torch_device
        communicator.barrier(_LOAD_TIMEOUT)
        method = linear_methods.get(args.quantization or "dense")()
        ctx = BuildContext(communicator, self.backend, method, dtype, where, self.max_context)
        self.model = load_model(config, args, ctx)
        self.kv_pool = self._make_pool(args, kv_dtype, before)
        limits = {"max_tokens": max_tokens, "max_rows": self.max_rows, "max_context": self.max_context}
        self.batch = ForwardBatch(device, self.kv_pool, max_batch=args.max_running_requests, **limits)
        self._next_token = torch.zeros(self.max_rows + 1, dtype=torch.int32, device=where)
        self._sampler = None if communicator.rank else Sampler(self.max_rows, config.vocab_size, where)
        self._warm_up(min(args.page_size, self.max_context, max_tokens))

    def _make_pool(self, args: ServerArgs, dtype: torch.dtype, before: Memory) -> KVPool:
        config, world = self.config, self._comm.world_size
        shape = (config.num_layers, args.page_size, config.kv_heads_per_rank(world), config.head_dim)
        page_bytes = KVPool.page_bytes(*shape, dtype)
        self._comm.barrier(_LOAD_TIMEOUT)  # every rank has its weights
        full = args.max_running_requests * -(-self.max_context // args.page_size)
        sharers = world if self.device.is_cpu else 1
        pages = kv_pages(args, self.device, page_bytes, ranks_here=sharers, full_pages=full, before=before)
        mine = torch.tensor([pages], device=self.device.torch_device)
        num_pages = int(self._comm.all_gather(mine).min())
        logger.debug("KV cache: %d pages, %.1f MiB", num_pages, num_pages * page_bytes / 2**20)
        return KVPool(*shape, num_pages=num_pages, dtype=dtype, device=self.device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Queues one step, on all ranks; results are rank 0's, on a GPU filled when the stream has passed."""
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
            rows = hidden[start : start + len(targets)]
            if found := score_in_blocks(rows, targets, span.top_n, self.model.compute_logits):
                result.prompt_logprobs.append(tuple(map(self._to_host, found)))
        return result

    def _sample(self, plan: StepPlan, hidden: torch.Tensor) -> Sampled:
        """Samples on rank 0, tells the others, leaves the ids where the next step reads them."""
        rows = plan.rows[plan.sample_index]
        sampled = Sampled(torch.empty(len(rows), dtype=torch.int32, device=hidden.device))
        if len(rows) == 0:
            return sampled
        logits = self.model.compute_logits(hidden.index_select(0, self.batch.logit_rows))
        if self._sampler is not None and logits is not None:
            sampled = self._sampler.sample(logits, rows, plan.kv_len[plan.sample_index])
        self._comm.broadcast(sampled.ids)
        self._next_token.index_copy_(0, self.batch.sample_rows.long(), sampled.ids)
        return sampled

    def _to_host(self, tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        host = self.device.host_empty(*tensor.shape, dtype=tensor.dtype)
        return host.copy_(tensor, non_blocking=True).numpy()

    def _warm_up(self, length: int) -> None:
        """One prefill and one decode step into the dummy page: what is slow once, or cannot run, shows now."""
        zero, kv_len = np.zeros(1, np.int32), np.array([length], np.int32)
        prompt, source = np.zeros(length, np.int32), np.full(length, FROM_PROMPT, np.int32)
        self.run(StepPlan(-1, 0, zero, kv_len, kv_len, prompt, source, sample_index=zero))
        self.run(StepPlan(-1, 1, zero, zero + 1, kv_len, prompt[:0], zero, sample_index=zero))
        self.device.synchronize()


def kv_pages(
    args: ServerArgs, device: Device, page_bytes: int, *, ranks_here: int, full_pages: int, before: Memory
) -> int:
    """Pages of this rank's pool, measured after the weights were loaded: `--max-total-tokens`, or what the memory
    gives, but no more than can be used. Raises ConfigError with the numbers. `ranks_here` share the memory;
    `full_pages`: every running request at its longest; `before`: memory before any weights were loaded."""
    memory = device.memory()
    room = memory.available // ranks_here
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
        budget = int(before.available * fraction) - (before.available - memory.available)
    else:
        budget = int(memory.available * _CPU_SHARE)
        if resolve_model_path(args.model_path, weights=False) == DEMO_MODEL_DIR:
            budget = min(budget, _DEMO_LIMIT)
    budget = min(room, budget // ranks_here)
    if budget < page_bytes:
        needs = f"{budget // _MIB} MiB are left after the weights, a page takes {page_bytes / _MIB:.1f} MiB"
        raise ConfigError(f"no memory for a KV cache: {needs}; see --mem-fraction-static and --page-size")
    return min(full_pages, budget // page_bytes)
