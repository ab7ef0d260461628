"""ModelRunner: one rank's model, KV pool and sampler; runs one StepPlan at a time.

Everything here happens on the engine's stream, in the order of the plans: a step reads the token
that the one before has written to `next_token`, and the host sees results only through copies.
"""

from __future__ import annotations

import logging

import numpy as np
import torch

from .. import ops
from ..attention.registry import create_attention_backend
from ..batch import ForwardBatch
from ..config import ServerArgs
from ..device import Device, Memory, upload
from ..distributed import Communicator
from ..errors import ConfigError
from ..memory.kv_pool import KVPool
from ..messages import unpack_ids
from ..model_config import ModelConfig
from ..models.loader import load_model
from ..step_plan import LogprobSpan, StepPlan, StepResult
from .kv_budget import kv_pages
from .sampler import Sampled, Sampler, score_in_blocks

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT = 3600.0  # how long ranks wait for each other's loading; a death ends it at once
_Scores = tuple[np.ndarray, np.ndarray, np.ndarray]


class ModelRunner:
    """Loads the model on construction; raises ConfigError for what cannot work. All ranks of a
    group construct it together (their pools get the size of the smallest)."""

    def __init__(self, args: ServerArgs, config: ModelConfig, device: Device, communicator: Communicator) -> None:
        self.args = args
        self.config = config
        self.device = device
        self._comm = communicator
        self.max_context = _max_context(args, config)
        self.max_rows = 2 * args.max_running_requests  # released rows wait for their last step
        self.max_step_tokens = max(args.chunked_prefill_size, args.max_running_requests)
        if args.chunked_prefill_size == -1:
            self.max_step_tokens = self.max_context + self.max_rows
        dtype = _dtype(args.dtype, config.dtype)
        kv_dtype = _dtype(args.kv_cache_dtype, str(dtype).removeprefix("torch."))
        self.backend = create_attention_backend(args.attention_backend, config, device, kv_dtype, args.page_size)
        communicator.barrier(_LOAD_TIMEOUT)  # no rank has loaded yet
        before = device.memory()
        communicator.barrier(_LOAD_TIMEOUT)
        self.model = load_model(
            config,
            args,
            communicator=communicator,
            backend=self.backend,
            device=device,
            dtype=dtype,
            max_positions=self.max_context,
        )
        self.kv_pool = self._make_pool(kv_dtype, before)
        self.batch = ForwardBatch(
            device,
            self.kv_pool,
            max_tokens=self.max_step_tokens,
            max_batch=args.max_running_requests,
            max_rows=self.max_rows,
            max_context=self.max_context,
        )
        tensors = device.torch_device
        self._next_token = torch.zeros(self.max_rows + 1, dtype=torch.int32, device=tensors)
        self._sampler = None
        if communicator.rank == 0:
            self._sampler = Sampler(self.max_rows, config.vocab_size, tensors)
        self._warm_up()

    def _make_pool(self, kv_dtype: torch.dtype, before: Memory) -> KVPool:
        args, config, world = self.args, self.config, self._comm.world_size
        heads = config.kv_heads_per_rank(world)
        shape = (config.num_layers, args.page_size, heads, config.head_dim)
        page_bytes = KVPool.page_bytes(*shape, kv_dtype)
        self._comm.barrier(_LOAD_TIMEOUT)  # every rank has its weights
        pages = kv_pages(
            args,
            self.device,
            page_bytes=page_bytes,
            ranks_here=world if self.device.is_cpu else 1,
            full_pages=args.max_running_requests * -(-self.max_context // args.page_size),
            before=before,
        )
        mine = torch.tensor([pages], device=self.device.torch_device)
        num_pages = int(self._comm.all_gather(mine).min())
        logger.debug("KV cache: %d pages, %.1f MiB", num_pages, num_pages * page_bytes / 2**20)
        return KVPool(*shape, num_pages=num_pages, dtype=kv_dtype, device=self.device)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Queues one step on the stream. A collective of all ranks; results are rank 0's. On a GPU
        the arrays are filled when the stream has passed."""
        if self._sampler is not None:
            for state in plan.new_rows:
                self._sampler.admit(state)
        self.batch.load(plan, self._next_token)
        self.backend.plan(self.batch)
        hidden = self.model(self.batch)
        sampled = self._sample(plan, hidden)
        result = StepResult(plan.step_id, self._to_host(sampled.ids))
        if sampled.logprobs is not None:
            result.logprobs = self._to_host(sampled.logprobs)
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            result.top_ids = self._to_host(sampled.top_ids)
            result.top_logprobs = self._to_host(sampled.top_logprobs)
        for span in plan.logprob_spans:
            result.prompt_logprobs += self._score(plan, span, hidden)
        return result

    def _sample(self, plan: StepPlan, hidden: torch.Tensor) -> Sampled:
        """Samples on rank 0, tells the others, leaves the ids where the next step reads them."""
        batch = self.batch
        ids = torch.empty(batch.num_samples, dtype=torch.int32, device=hidden.device)
        sampled = Sampled(ids)
        if batch.num_samples == 0:
            return sampled
        logits = self.model.compute_logits(hidden.index_select(0, batch.logit_rows))
        if self._sampler is not None and logits is not None:
            positions = plan.kv_len[plan.sample_index]
            sampled = self._sampler.sample(logits, plan.rows[plan.sample_index], positions)
        self._comm.broadcast(sampled.ids)
        self._next_token.index_copy_(0, batch.sample_rows.long(), sampled.ids)
        return sampled

    def _score(self, plan: StepPlan, span: LogprobSpan, hidden: torch.Tensor) -> list[_Scores]:
        """Prompt logprobs of one span on rank 0 (a list of one), nothing elsewhere."""
        host_ids = unpack_ids(span.targets)
        start = int(plan.query_len[: span.index].sum()) + span.first
        rows = hidden[start : start + len(host_ids)]
        targets = upload(np.array(host_ids, np.int32), hidden.device)
        blocks = list(score_in_blocks(rows, targets, span.top_n, self.model.compute_logits))
        if self._sampler is None:
            return []
        logprobs, top_ids, top_logprobs = (self._to_host(torch.cat(parts)) for parts in zip(*blocks, strict=True))
        return [(logprobs, top_ids, top_logprobs)]

    def _to_host(self, tensor: torch.Tensor) -> np.ndarray:
        host = self.device.host_empty(*tensor.shape, dtype=tensor.dtype)
        return host.copy_(tensor, non_blocking=True).numpy()

    def _warm_up(self) -> None:
        """One prefill and one decode step into the dummy page: first calls are slow, and what
        cannot run should be known before the first request."""
        dummy = self.kv_pool.dummy_page
        length = min(self.args.page_size, self.max_context, self.max_step_tokens)
        for query, source in ((length, -1), (1, 0)):
            plan = StepPlan(
                step_id=-1,
                num_decode=int(source == 0),
                rows=np.zeros(1, np.int32),
                query_len=np.array([query], np.int32),
                kv_len=np.array([length], np.int32),
                input_ids=np.zeros(query if source < 0 else 0, np.int32),
                source=np.full(query, source, np.int32),
                page_rows=np.zeros(1, np.int32),
                page_index=np.zeros(1, np.int32),
                page_ids=np.full(1, dummy, np.int32),
                sample_index=np.zeros(1, np.int32),
            )
            self.run(plan)
        self.device.synchronize()


def _dtype(name: str, auto: str) -> torch.dtype:
    dtype = getattr(torch, auto if name == "auto" else name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _max_context(args: ServerArgs, config: ModelConfig) -> int:
    if args.context_length is None:
        return config.max_context
    if args.context_length > config.max_context:
        raise ConfigError(
            f"--context-length {args.context_length} exceeds the {config.max_context} positions of the model"
        )
    return args.context_length


def set_threads(threads: int) -> None:
    """The CPU threads of this rank, for our kernels and for torch's."""
    ops.set_num_threads(threads)
    torch.set_num_threads(threads)
