"""The HTTP server over the real scheduler and detokenizer, on the fake engine, in one process.

uvicorn and the TokenizerManager run on an event loop in one thread, the scheduler and the
detokenizer in another, as `serve` has them in processes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, TypeVar

from radix_runtime.channel import LocalChannel
from radix_runtime.config import ServerArgs
from radix_runtime.grammar.service import Grammars
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.messages import (
    Abort,
    Control,
    ControlReply,
    Generate,
    Message,
    RequestFailed,
    TextBatch,
    TextStop,
    TokenBatch,
)
from radix_runtime.scheduler.scheduler import Scheduler
from radix_runtime.server.api import create_app, http_server
from radix_runtime.server.listener import bind_port
from radix_runtime.server.shared_numbers import SharedNumbers
from radix_runtime.server.tokenizer_manager import TokenizerManager
from radix_runtime.text.detokenizer import Detokenizer
from radix_runtime.text.tokenizer import load_tokenizer
from tests.runtime.fake_engine import FakeEngine
from tests.runtime.loop_monitor import LoopMonitor

T = TypeVar("T")
VOCAB = 1536
CONTEXT = 256
MODEL = "fake"
LONG = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}  # for a slow engine


class _Outbox:
    def __init__(self, routes: dict[type, Callable[[Any], None]]) -> None:
        self._routes = routes

    def send(self, message: Message, instance: int = 0) -> None:
        assert instance == 0
        self._routes[type(message)](message)


def _fake_engine(args: ServerArgs, pages: int) -> FakeEngine:
    return FakeEngine(
        num_pages=pages,
        page_size=args.page_size,
        max_rows=8,
        max_context=CONTEXT,
        vocab_size=VOCAB,
        lazy=False,
    )


class Stack:
    """`delay`: seconds that each engine iteration takes. `with Stack() as s:` serves at `s.url`.
    `monitored`: `monitor` measures every callback of the event loop, which `make_loop` makes; the
    monitor knows asyncio's own only."""

    def __init__(
        self,
        *,
        pages: int = 64,
        delay: float = 0.0,
        ready: bool = True,
        monitored: bool = False,
        make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
        **settings: Any,
    ) -> None:
        self.args = ServerArgs(
            served_model_name=MODEL, page_size=4, chunked_prefill_size=64, max_running_requests=8,
            check_invariants="step", port=0, **settings,
        )  # fmt: skip
        self.args.validate()
        self.tokenizer = None
        if not self.args.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(DEMO_MODEL_DIR, self.args.chat_template)
        self.engine = _fake_engine(self.args, pages)
        self.grammars = Grammars(
            self.args, self.tokenizer, vocab_size=VOCAB, eos_ids=[2], mask_rows=8
        )
        self.delay = delay
        self.sent: list[Message] = []
        self.dead_reason: str | None = None
        self._ready = ready
        self._stopping = False
        self._stepping = threading.Lock()
        self.running = threading.Event()  # cleared: the engine stands still
        self.running.set()
        self._inbox = LocalChannel()
        self._connect()
        self._loop = make_loop()
        self.monitor = LoopMonitor(self._loop)
        self._monitored = monitored
        self._threads = [
            threading.Thread(target=self._serve, daemon=True),
            threading.Thread(target=self._run_engine, daemon=True),
        ]

    def _connect(self) -> None:
        """Makes the scheduler and the detokenizer, each with its links."""
        ids_in = LocalChannel()
        self.scheduler = Scheduler(
            args=self.args,
            executor=self.engine,
            inbox=self._inbox,
            outbox=_Outbox(
                {TokenBatch: ids_in.send, RequestFailed: ids_in.send, ControlReply: self._to_api}
            ),
            eos_ids=[2],
            make_masks=self.grammars.start_masker,
        )
        self.detokenizer = Detokenizer(
            tokenizer=self.tokenizer,
            inbox=ids_in,
            outbox=_Outbox(
                {TextBatch: self._to_api, RequestFailed: self._to_api, TextStop: self._inbox.send}
            ),
        )

    def send(self, message: Message, instance: int = 0) -> None:
        """The manager's link."""
        self.sent.append(message)
        self._inbox.send(message)

    def _to_api(self, message: Message) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.manager.handle, message)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve(sockets=[self._listener]))

    def _run_engine(self) -> None:
        while not self._stopping:
            self.running.wait(0.1)
            if not self.running.is_set():
                continue
            with self._stepping:
                busy = self.scheduler.step()
                busy |= self.detokenizer.step()
            if self.delay and self.scheduler.live:
                time.sleep(self.delay)
            if not busy:
                self._inbox.wait(0.02)

    def __enter__(self) -> Stack:
        self._listener = bind_port("127.0.0.1", 0)
        facts = SimpleNamespace(vocab_size=VOCAB, max_context=CONTEXT)
        self.manager = TokenizerManager(
            args=self.args,
            model=facts,  # type: ignore[arg-type]
            tokenizer=self.tokenizer,
            link=self,
            defaults={},
            grammars=self.grammars,
            numbers=SharedNumbers(),
        )
        if self._ready:
            tokens = self.engine.num_pages * self.engine.page_size
            self.manager.set_ready({"max_total_num_tokens": tokens})
        self.manager.health = lambda: self.dead_reason
        self.app = create_app(self.manager)
        self._server = http_server(self.app, self.args.max_connections, self.manager.numbers)
        if self._monitored:
            gc.collect()
            gc.freeze()  # as the API process does
            self.monitor.__enter__()
        for thread in self._threads:
            thread.start()
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping = True
        self._server.should_exit = True
        for thread in self._threads:
            thread.join(60)
        self.app.state.bodies.close()
        self.manager.text.close()
        self.grammars.close()
        if self._monitored:
            self.monitor.__exit__(*exc)
            gc.unfreeze()
        self._listener.close()

    def on_loop(self, work: Callable[[], T]) -> T:
        """Runs `work` on the event loop's thread."""
        result: Future[T] = Future()
        self._loop.call_soon_threadsafe(lambda: result.set_result(work()))
        return result.result(60)

    def wait(self, condition: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition did not come true"
            time.sleep(0.005)

    def connections(self) -> list[Any]:
        """uvicorn's protocols of the open connections."""
        return list(self._server.server_state.connections)

    def check_idle(self) -> None:
        """Nothing is open anywhere, every request has exactly one end, no page is lost."""
        self.wait(self._at_rest)
        self.wait(lambda: len(self.manager._open) == 0 and self.detokenizer.num_open == 0)
        counts = self.manager.counts
        assert counts.accepted == counts.ok + counts.aborted + counts.failed + counts.refused
        assert not self.manager._open and not self.manager._controls
        with self._stepping:
            self.scheduler.check()
            life = self.scheduler.life
            assert life.allocator.num_free + life.cache.total_pages == life.allocator.num_pages
            assert len(life.table.free_rows) == life.table.max_rows

    def _at_rest(self) -> bool:
        with self._stepping:
            return self.scheduler.is_idle and not self._inbox._messages

    def sent_of(self, kind: type[Generate] | type[Abort] | type[Control]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def events(text: str) -> list[Any]:
    """The JSON of the events of a stream that has ended as it should."""
    frames = text.split("\n\n")
    assert frames.pop() == "" and frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def in_background(work: Callable[[], T]) -> tuple[threading.Thread, list[T]]:
    """Runs `work` on a thread; its result is in the list after `join`."""
    result: list[T] = []
    thread = threading.Thread(target=lambda: result.append(work()), daemon=True)
    thread.start()
    return thread, result
