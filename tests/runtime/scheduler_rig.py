"""A scheduler on the fake engine, with a client that knows what must come out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from radix_runtime.channel import LocalChannel
from radix_runtime.config import ServerArgs
from radix_runtime.memory.page_allocator import PageAllocator
from radix_runtime.messages import (
    Abort,
    Control,
    ControlReply,
    FinishReason,
    Generate,
    Logprobs,
    RequestFailed,
    TextStop,
    TokenBatch,
    TokenDelta,
    pack_body,
    pack_ids,
    unpack_ids,
)
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.scheduler.constraints import MakeMasks
from radix_runtime.scheduler.request import Request
from radix_runtime.scheduler.scheduler import Scheduler
from radix_runtime.step_plan import StepMasks, StepPlan
from tests.runtime.check_content import check_content
from tests.runtime.fake_engine import FakeEngine, Handle
from tests.runtime.fake_model import FakeModel, oracle

EOS = frozenset({1, 2})


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Stream:
    """What the client of one choice saw."""

    ids: list[int] = field(default_factory=list)
    deltas: int = 0
    finish: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    cut: int | None = None  # the detokenizer stopped it after so many tokens


class Rig:
    """`samples` is the engine's max_samples; `settings` are ServerArgs."""

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 4,
        rows: int = 8,
        context: int = 256,
        samples: int = 1,
        chunk: int = 32,
        overlap: bool = True,
        lazy: bool = True,
        poison: bool = True,
        check: str = "step",
        eos: frozenset[int] = EOS,
        max_message: float = math.inf,
        model: FakeModel | None = None,
        group_sizes: tuple[int, int] = (64, 64),
        host_pages: int = 0,
        make_masks: MakeMasks | None = None,
        **settings: object,
    ) -> None:
        self.engine = FakeEngine(
            num_pages=pages,
            page_size=page_size,
            max_rows=rows,
            max_context=context,
            max_samples=samples,
            model=model or FakeModel(),
            group_sizes=group_sizes,
            host_pages=host_pages,
            lazy=lazy,
        )
        self.args = ServerArgs(
            page_size=page_size,
            chunked_prefill_size=chunk,
            disable_overlap_schedule=not overlap,
            check_invariants=check,
            **settings,
        )
        self.args.validate()
        self.eos = eos
        self.clock = Clock()
        self.inbox, self.outbox = LocalChannel(), LocalChannel()
        self.scheduler = self._make_scheduler(max_message, make_masks)
        self.life = self.scheduler.life
        self._watch_launches()
        if poison:
            self._poison_freed_pages()
        self._forget()

    def _make_scheduler(self, max_message: float, make_masks: MakeMasks | None) -> Scheduler:
        return Scheduler(
            args=self.args,
            executor=self.engine,
            inbox=self.inbox,
            outbox=self.outbox,
            eos_ids=sorted(self.eos),
            clock=self.clock,
            max_message=max_message,
            make_masks=make_masks,
        )

    def _forget(self) -> None:
        self.messages: dict[str, Generate] = {}
        self.streams: dict[tuple[str, int], Stream] = {}
        self.numbered: dict[int, Stream] = {}  # by the number that their tokens travel under
        self.failed: dict[str, RequestFailed] = {}
        self.replies: list[ControlReply] = []

    def _watch_launches(self) -> None:
        launch = self.engine.launch

        def checked(plan: StepPlan, masks: StepMasks | None = None) -> Handle:
            self._check_plan(plan)
            return launch(plan, masks)

        self.engine.launch = checked  # type: ignore[method-assign]

    def record_plans(self) -> list[StepPlan]:
        """The plans that are launched from now on."""
        plans: list[StepPlan] = []
        launch = self.engine.launch

        def record(plan: StepPlan, masks: StepMasks | None = None) -> Handle:
            plans.append(plan)
            return launch(plan, masks)

        self.engine.launch = record  # type: ignore[method-assign]
        return plans

    def _check_plan(self, plan: StepPlan) -> None:
        prompts = {r.row: r.prompt_len for r in self.life.running}
        for index in range(plan.num_decode, len(plan.rows)):
            tokens = plan.query_len[index]
            end = plan.kv_len[index]
            alone = tokens == 1 and 1 < end <= prompts[plan.rows[index]]
            assert not alone, "a token of a prompt is computed alone"

    def _poison_freed_pages(self) -> None:
        poison = self.engine.poison_later if self.life.host else self.engine.poison
        _after_free(self.life.allocator, poison)
        for window in self.life.windows:
            _after_free(window.pool.allocator, self.engine.poison_window)

    # The client ---------------------------------------------------------------------------

    def submit(self, rid: str, ids: object, *, stream: bool = True, **fields: object) -> Generate:
        names = set(SamplingParams.__struct_fields__)
        params = {k: v for k, v in fields.items() if k in names}
        rest = {k: v for k, v in fields.items() if k not in names}
        params.setdefault("temperature", 0.0)
        message = Generate(
            rid=rid,
            input_ids=pack_ids(ids),
            sampling=SamplingParams(**params),
            stream=stream,
            **rest,
        )
        self.messages[rid] = message
        self.inbox.send(message)
        return message

    def abort(self, rid: str) -> None:
        self.inbox.send(Abort(rid))

    def text_stop(self, rid: str, choice: int, n_tokens: int) -> None:
        """As the detokenizer does: it cuts first and tells the scheduler later."""
        stream = self.streams[rid, choice]
        assert stream.finish is None and n_tokens <= len(stream.ids)
        stream.cut = n_tokens
        stream.finish = FinishReason("stop", matched="text")
        self.inbox.send(TextStop(rid=rid, choice=choice, n_tokens=n_tokens))

    def ask(self, op: str, body: object = None) -> ControlReply:
        """The reply to a Control message."""
        self.inbox.send(Control(len(self.replies), op, body=pack_body(body)))
        self.step()
        return self.replies[-1]

    def stats(self) -> dict[str, float]:
        return self.ask("stats").result(dict[str, float])

    def flush_cache(self) -> bool:
        return self.ask("flush_cache").result(bool)

    def step(self) -> bool:
        happened = self.scheduler.step()
        for message in self.outbox.receive():
            if isinstance(message, TokenBatch):
                for number, ids, _ in message.tokens or ():
                    self._receive_tokens(number, ids)
                for delta in message.deltas:
                    self._receive(delta)
            elif isinstance(message, RequestFailed):
                assert message.rid not in self.failed, "two terminal messages"
                self.failed[message.rid] = message
            else:
                assert isinstance(message, ControlReply)
                self.replies.append(message)
        return happened

    def run(self, limit: int = 100_000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the scheduler does not come to rest")

    def _receive_tokens(self, number: int, ids: bytes) -> None:
        stream = self.numbered[number]
        if stream.cut is not None:
            return
        assert stream.finish is None, "tokens after the last delta"
        stream.ids += unpack_ids(ids).tolist()
        stream.deltas += 1

    def _receive(self, delta: TokenDelta) -> None:
        key = (delta.rid, delta.choice)
        if delta.rid in self.failed:
            # Only the detokenizer is told, so that it forgets what it had begun.
            assert delta.finish is not None and delta.finish.type == "abort" and key in self.streams
            return
        first = key not in self.streams
        stream = self.streams.setdefault(key, Stream())
        if first:
            assert delta.stream is not None and delta.stream not in self.numbered
            self.numbered[delta.stream] = stream
        assert (delta.sampling is not None) == first == (delta.input_ids is not None)
        if stream.cut is not None:
            return  # the detokenizer ignores what was on its way
        assert stream.finish is None, f"{key}: a delta after the last one"
        stream.ids += unpack_ids(delta.ids).tolist()
        stream.deltas += 1
        stream.finish = delta.finish
        stream.cached_tokens = delta.cached_tokens
        assert delta.completion_tokens == len(stream.ids)
        stream.logprobs += [delta.logprobs] if delta.logprobs else []
        stream.prompt_logprobs += [delta.prompt_logprobs] if delta.prompt_logprobs else []

    # What must hold -----------------------------------------------------------------------

    def request(self, rid: str, choice: int = 0) -> Request:
        return next(r for r in self.scheduler.live[rid] if r.choice == choice)

    def prompt_of(self, rid: str) -> np.ndarray:
        """The prompt of `rid`."""
        return unpack_ids(self.messages[rid].input_ids)

    def verify(self, rid: str) -> None:
        """Every choice of `rid` ended once and gave what the oracle says, or a prefix of it when
        it was aborted."""
        message = self.messages[rid]
        if rid in self.failed:
            assert rid not in self.scheduler.live
            return
        for choice in range(message.sampling.n):
            stream = self.streams[rid, choice]
            assert stream.finish is not None, f"{rid}/{choice} never ended"
            limit = min(self.engine.max_context, self.engine.num_pages * self.engine.page_size)
            want = oracle(message, choice, eos=self.eos, limit=limit, model=self.engine.model)
            if stream.cut is not None or stream.finish.type == "abort":
                assert stream.ids == want.ids[: len(stream.ids)], f"{rid}/{choice}"
                continue
            assert stream.ids == want.ids, f"{rid}/{choice}"
            assert stream.finish == FinishReason(want.finish, matched=want.matched)

    def verify_all(self) -> None:
        for rid in self.messages:
            self.verify(rid)
        self.verify_rest()

    def verify_rest(self) -> None:
        """Nothing is left over: no page, row, lock or map entry."""
        scheduler = self.scheduler
        assert scheduler.is_idle and scheduler.step_in_flight_since is None
        scheduler.check()
        check_content(self.engine, self.life.cache)
        life = self.life
        assert not life.pending and not life.deferred and not life.draining and not scheduler.live
        assert len(life.table.free_rows) == life.table.max_rows
        assert life.allocator.num_free + life.cache.total_pages == life.allocator.num_pages
        life.reset_cache()
        assert life.allocator.num_free == life.allocator.num_pages
        for pool in [group.pool for group in life.groups] + ([life.host] if life.host else []):
            assert pool.allocator.num_free == pool.allocator.num_pages
        scheduler.check()


def _after_free(allocator: PageAllocator, poison: Callable[[np.ndarray], None]) -> None:
    free = allocator.free

    def free_and_poison(pages: np.ndarray) -> None:
        free(pages)
        poison(pages)

    allocator.free = free_and_poison  # type: ignore[method-assign]


# What the scheduler tests share ---------------------------------------------------------------

RNG = np.random.default_rng()


def prompt(n: int, low: int = 3, high: int = 97) -> np.ndarray:
    return RNG.integers(low, high, n)


BOTH = pytest.mark.parametrize("overlap", [True, False])
PAGES = pytest.mark.parametrize("page_size", [1, 16, 64])
