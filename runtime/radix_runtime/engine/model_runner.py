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

from ..attention.registry import create_attention_backend
from ..batch import ForwardBatch
from ..config import ServerArgs
from ..device import Device, GraphRecorder, Memory, OutOfMemory, upload
from ..distributed import Communicator
from ..errors import ConfigError
from ..layers.attention import Attention
from ..layers.base import BuildContext
from ..layers.weight import weight_bytes
from ..memory.kv_layout import kv_dtype_named, kv_layout
from ..memory.kv_pool import KVPool
from ..messages import unpack_ids
from ..model_config import ModelConfig
from ..models.loader import load_model
from ..quantization.config import Target
from ..quantization.registry import quantization_of
from ..step_plan import LogprobSpan, SpanScores, StepPlan, StepResult
from ..step_shape import StepShapes
from .candidate_draw import CandidateDraw, has_kernels
from .capture import Capture
from .draw_settings import DrawSettings
from .graph_sizes import choose_shapes
from .inference import inference
from .kv_budget import kv_pages
from .masks import draw_masks, late_entries
from .memory_advice import Stage, no_memory
from .padded_steps import PaddedSteps, StepBuffers
from .plain_steps import Drawn, PlainSteps
from .profiler import Profiler
from .row_state import RowState
from .sampler import Sampler
from .span_scores import span_scores
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
    prompt_logprobs: list[SpanScores]


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
        self.max_context = config.context_length(args.context_length)
        self._dtype = getattr(torch, config.dtype if args.dtype == "auto" else args.dtype)
        self._max_batch = args.running_limit
        self.max_rows = 2 * self._max_batch  # released rows wait for their last step
        kv_dtype = kv_dtype_named(args.kv_cache_dtype, self._dtype)
        self.backend = create_attention_backend(
            args.attention_backend, config, device, kv_dtype, args.page_size
        )
        communicator.barrier(_LOAD_TIMEOUT)  # no rank has loaded yet
        before = device.memory()
        communicator.barrier(_LOAD_TIMEOUT)
        self._stage = Stage.WEIGHTS  # what memory is taken for now
        try:
            self._load(args)
            self._set_up_graphs(args)
            self._make_pool(args, kv_dtype, before)
        except (RuntimeError, MemoryError) as error:
            out_of_memory = OutOfMemory.of(error)
            if out_of_memory is None:
                raise
            raise ConfigError(no_memory(args, device, self._stage, out_of_memory)) from None
        _trim(0)
        self.free_memory = device.memory().available
        self.taken_memory = before.available - self.free_memory  # bytes since loading began

    def _load(self, args: ServerArgs) -> None:
        where = self.device.torch_device
        positions = self.max_context
        if self.device.is_cpu:  # no row is longer than the pool; on a GPU the warm-up's may be
            pages = -(-(args.max_total_tokens or self.max_context) // args.page_size)
            positions = min(positions, pages * args.page_size)
        target = Target(device=where, dtype=self._dtype, fp8_fast_accum=args.fp8_fast_accum)
        ctx = BuildContext(
            communicator=self._comm,
            backend=self.backend,
            quantization=quantization_of(args.quantization, self.config.quantization, target),
            dtype=self._dtype,
            device=where,
            max_positions=positions,
            persistent_decoder=not args.disable_persistent_decoder,
        )
        self.model = load_model(self.config, args, ctx)
        _trim(0)
        # Fresh memory of more than 32 MiB is the system's: every step would be the first to touch
        # its pages.
        self._logits = None
        if self.device.is_cpu and self._comm.world_size == 1:
            self._logits = torch.empty(self._max_batch * self.max_samples, self.config.vocab_size)
        self._state = RowState(self.max_rows, max_samples=self.max_samples, device=self.device)
        self._one_each = np.ones(self._max_batch, np.int32)
        self._one_each.flags.writeable = False  # it is part of many results
        self._make_sampler()

    def _make_sampler(self) -> None:
        """What draws on rank 0, and what the others know of it."""
        limits: Any = {
            "max_rows": self.max_rows,
            "vocab_size": self.config.vocab_size,
            "device": self.device.torch_device,
            "max_samples": self._max_batch * self.max_samples,
        }
        self._sampler = Sampler(**limits) if self._comm.rank == 0 else None
        settings = DrawSettings(**limits) if self._sampler is None else self._sampler.settings
        self._admit = settings.admit if self._sampler is None else self._sampler.admit
        self.candidates: CandidateDraw | None = None
        if self.lists_candidates():
            self.candidates = CandidateDraw(
                self.model,
                vocab_size=self.config.vocab_size,
                communicator=self._comm,
                settings=settings,
            )

    def lists_candidates(self) -> bool:
        """Whether ranks list candidates of their parts of the vocabulary, instead of giving rank 0
        their logits, where the rows of a step allow it."""
        return has_kernels(self.device.kind) and self.model.vocabulary_shard() is not None

    def _set_up_graphs(self, args: ServerArgs) -> None:
        """Whether steps are padded, to what, and whether graphs of them are captured."""
        self.shapes: StepShapes | None = None
        self._recorder: GraphRecorder | None = None
        self._padded: PaddedSteps | None = None
        if not self.pads_steps(args):
            return
        num_parameters = weight_bytes(self.model) // self._dtype.itemsize
        # What is expanded of latents is as large as the chunks' rows are long.
        with_chunks = not self.config.spec.keeps_latents
        self.shapes = choose_shapes(
            args,
            num_parameters,
            most_tokens=min(self._most_tokens(args), self._max_batch * self.max_context),
            with_chunks=with_chunks,
        )
        self._buffers = StepBuffers.empty(
            self.shapes,
            hidden_size=self.config.spec.hidden_size,
            vocab_size=self.config.vocab_size,
            dtype=self._dtype,
            device=self.device.torch_device,
            with_logits=self._sampler is not None,
            record_ranks=self._record_ranks(),
        )
        if not args.disable_cuda_graph and self.backend.capturable:
            self._recorder = self.graph_recorder()

    def _record_ranks(self) -> int:
        """Of how many ranks this one gets the candidates."""
        return 0 if self.candidates is None or self._sampler is None else self.candidates.ranks

    def pads_steps(self, args: ServerArgs) -> bool:
        """Whether steps are padded to few shapes. On the CPU no bit depends on the shape, and there
        are no graphs."""
        return not self.device.is_cpu

    def graph_recorder(self) -> GraphRecorder | None:
        """What captures steps."""
        return self.device.graph_recorder()

    def _make_pool(self, args: ServerArgs, kv_dtype: torch.dtype, before: Memory) -> None:
        world = self._comm.world_size
        layout = kv_layout(
            self.config.spec,
            kv_dtype=kv_dtype,
            dtype=self._dtype,
            page_size=args.page_size,
            ranks=world,
        )
        make_pool = partial(KVPool, layout, device=self.device)
        trial = None
        graph_bytes = 0
        self._stage = Stage.STEPS
        if not self.device.is_cpu or self._recorder is not None:
            # torch keeps the memory of the largest steps: the pool cannot have it.
            self._use_pool(make_pool(num_pages=1), args)
            # Graphs hold the addresses of the pool and are captured anew; those of the trial keep
            # the memory that both share until then.
            trial = self._padded
            capture = self._graph_capture()
            if capture is not None:
                self._stage = Stage.GRAPHS
                graph_bytes = capture.largest(
                    token_bytes=self.config.spec.hidden_size * self._dtype.itemsize
                )
        self._comm.barrier(_LOAD_TIMEOUT)  # every rank has its weights
        pages = kv_pages(
            args,
            self.device,
            layout.page_bytes,
            ranks=world if self.device.is_cpu else 1,
            full_pages=self._max_batch * -(-self.max_context // args.page_size),
            before=before,
            reserved=graph_bytes,
        )
        self._stage = Stage.KV_CACHE
        mine = torch.tensor([pages], device=self.device.torch_device)
        self._use_pool(make_pool(num_pages=int(self._comm.all_gather(mine).min())), args)
        capture = self._graph_capture()
        if capture is not None:
            self._stage = Stage.GRAPHS
            capture.everything()
        del trial

    def _graph_capture(self) -> Capture | None:
        """What captures the steps of the pool in use; None where nothing is captured."""
        if self._padded is None or self._recorder is None:
            return None
        return Capture(self._padded, run=self.run, state=self._state, device=self.device)

    def _most_tokens(self, args: ServerArgs) -> int:
        """Tokens that a step may have."""
        tokens = max(args.step_tokens, self._max_batch)
        if args.step_tokens == -1:
            tokens = self.max_context + self.max_rows
        return tokens + self._max_batch * (self.max_samples - 1)  # drafts come on top

    def _use_pool(self, pool: KVPool, args: ServerArgs) -> None:
        """From now on steps run on `pool`: first those of the warm-up, into its dummy page."""
        self.kv_pool = pool
        for module in self.model.modules():
            if isinstance(module, Attention):
                module.calibrate(pool)
        self.batch = ForwardBatch(
            self.device,
            pool,
            max_tokens=self._most_tokens(args),
            max_batch=self._max_batch,
            max_rows=self.max_rows,
            max_context=self.max_context,
            max_samples=self.max_samples,
            expands_decode=self.backend.expands_decode,
            fixed_width=self.shapes is not None,
        )
        self._plain = PlainSteps(
            self.model,
            batch=self.batch,
            state=self._state,
            sampler=self._sampler,
            communicator=self._comm,
            candidates=self.candidates,
            logits=self._logits,
        )
        if self.shapes is not None:
            self._padded = PaddedSteps(
                self.shapes,
                self.model,
                batch=self.batch,
                state=self._state,
                sampler=self._sampler,
                communicator=self._comm,
                candidates=self.candidates,
                buffers=self._buffers,
                recorder=self._recorder,
            )
        for plan in warm_up_plans(self.batch):
            self._state.reset(committed_len=int(plan.kv_len[0]) - 1)
            self.run(plan)
        self._state.reset()
        self.device.synchronize()

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that steps are replayed from."""
        return 0 if self._padded is None else len(self._padded.graphs)

    @inference
    def run(self, plan: StepPlan) -> StepResult:
        """`forward` and `draw`."""
        return self.draw(plan, self.forward(plan))

    @inference
    def forward(self, plan: StepPlan) -> Forwarded:
        """Queues the model's part of a step, on all ranks: it stores the keys and values of the
        plan's tokens. `draw` or `skip_draw` of the same plan must follow before another step."""
        for state in plan.new_rows:
            self._admit(state)
        shape = None if self._padded is None else self._padded.shapes.of(plan)
        self.batch.upload(plan, shape)
        rows = self.batch.rows_of_samples
        by_candidates = self.candidates is not None and self.candidates.begin(plan, rows)
        self.backend.plan(self.batch)
        with self.profiler.span(f"forward {self.batch.num_tokens} tokens"):
            all_hidden, hidden = self._steps.forward(by_candidates=by_candidates)
        scores = [self._score(plan, span, all_hidden) for span in plan.logprob_spans]
        return Forwarded(
            hidden=hidden,
            prompt_logprobs=[score for score in scores if score is not None],
        )

    @property
    def _steps(self) -> PlainSteps | PaddedSteps:
        """What runs the step of the batch."""
        if self.batch.shape is None or self._padded is None:
            return self._plain
        return self._padded

    def _score(self, plan: StepPlan, span: LogprobSpan, hidden: torch.Tensor) -> SpanScores | None:
        """A span's entry in StepResult.prompt_logprobs; None on ranks other than 0."""
        targets = upload(unpack_ids(span.targets).copy(), hidden.device)
        start = self.batch.first_token(plan, span.index) + span.first
        logits = self.model.compute_logits(hidden[start : start + len(targets)])
        if logits is None:
            return None
        return span_scores(logits, targets, span, self._to_host)

    @inference
    def draw(
        self,
        plan: StepPlan,
        forwarded: Forwarded,
        masks: np.ndarray | None = None,
        late: np.ndarray | None = None,
    ) -> StepResult:
        """Queues the rest of the step, on all ranks: samples, and moves the rows past what they
        accept. Results are rank 0's, on a GPU filled when the stream has passed. `masks` and
        `late`, rank 0's alone, have passed `check_masks`. The other ranks learn from the ids who is
        late."""
        bitmask = None
        if masks is not None:
            bitmask = upload(draw_masks(masks, late), self.device.torch_device)
        with self.profiler.span("draw"):
            drawn = self._steps.draw(forwarded.hidden, self.batch.rows_of_samples, bitmask)
        result = self._result(plan, forwarded, drawn)
        if late is not None:
            result.late = late_entries(plan, late)
        return result

    @inference
    def skip_draw(self, plan: StepPlan, forwarded: Forwarded) -> StepResult:
        """Instead of `draw`, on rank 0: every sample is -1, as for logits that are not finite. A
        later step finds valid state."""
        return self._result(plan, forwarded, self._steps.fail_draw(forwarded.hidden))

    def _result(self, plan: StepPlan, forwarded: Forwarded, drawn: Drawn) -> StepResult:
        counts = self._to_host(drawn.counts)
        if counts is None:
            counts = self._one_each[: self.batch.num_sampling]
        sampled = drawn.sampled
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
        return None if tensor is None else self.device.to_host(tensor)
