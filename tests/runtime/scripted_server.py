"""The HTTP server over a model that says what a test wants: real sockets and requests, real token
ids and text, no engine."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from radix_runtime.channel import LocalChannel
from radix_runtime.config import ServerArgs
from radix_runtime.grammar.service import Grammars
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.messages import (
    Abort,
    FinishReason,
    Generate,
    Message,
    TextBatch,
    TextStop,
    TokenBatch,
    TokenDelta,
    pack_ids,
    slice_ids,
    unpack_ids,
)
from radix_runtime.server.api import create_app, http_server
from radix_runtime.server.listener import bind_port
from radix_runtime.server.shared_numbers import SharedNumbers
from radix_runtime.server.tokenizer_manager import TokenizerManager
from radix_runtime.text.detokenizer import Detokenizer
from radix_runtime.text.tokenizer import load_tokenizer
from tests.runtime.loop_monitor import LoopMonitor

MODEL = "scripted"
CONTEXT = 1 << 16


class ScriptedServer:
    """`answers` are the texts that the next choices get, first come first served; a text that is
    longer than a request's max_new_tokens is cut there. `prompts` are those of the requests so far.
    `tokens`: in each message. `monitored`: `monitor` measures every callback of the event loop."""

    def __init__(self, *, tokens: int = 1, monitored: bool = False, **settings: Any) -> None:
        self.args = ServerArgs(served_model_name=MODEL, port=0, **settings)
        self.tokenizer = load_tokenizer(DEMO_MODEL_DIR, self.args.chat_template)
        self.answers: list[str] = []
        self.prompts: list[str] = []
        self.requests: list[Generate] = []
        self._tokens = tokens
        self._loop = asyncio.new_event_loop()
        self.monitor = LoopMonitor(self._loop)
        self._monitored = monitored
        self._model = ThreadPoolExecutor(max_workers=1)
        self._ids = LocalChannel()
        self._detokenizer = Detokenizer(
            tokenizer=self.tokenizer, inbox=self._ids, outbox=_Outbox(self._to_api)
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> ScriptedServer:
        self._listener = bind_port("127.0.0.1", 0)
        self._grammars = Grammars(self.args, self.tokenizer, vocab_size=1536, eos_ids=[2])
        facts = SimpleNamespace(vocab_size=1536, max_context=CONTEXT)
        self.manager = TokenizerManager(
            args=self.args,
            model=facts,  # type: ignore[arg-type]
            tokenizer=self.tokenizer,
            link=self,
            defaults={},
            grammars=self._grammars,
            numbers=SharedNumbers(),
        )
        self.manager.set_ready({"max_total_num_tokens": CONTEXT})
        self._app = create_app(self.manager)
        self._server = http_server(self._app, self.args.max_connections, self.manager.numbers)
        if self._monitored:
            gc.collect()
            gc.freeze()  # as the API process does
            self.monitor.__enter__()
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        self._model.shutdown()
        self._grammars.close()
        if self._monitored:
            self.monitor.__exit__(*exc)
            gc.unfreeze()
        self._app.state.bodies.close()
        self.manager.text.close()
        self._listener.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve(sockets=[self._listener]))

    def _to_api(self, message: Message) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.manager.handle, message)

    def send(self, message: Message, instance: int = 0) -> None:
        """The manager's link."""
        if isinstance(message, Abort):
            return
        assert isinstance(message, Generate)
        self._model.submit(self._run, message)

    def _run(self, request: Generate) -> None:
        """The work of an engine and of the detokenizer, which is not done on the loop's thread."""
        self.requests.append(request)
        self.prompts.append(self.tokenizer.decode(unpack_ids(request.input_ids), False))
        for choice in range(request.sampling.n):
            self._answer(request, choice, self.answers.pop(0))
        while self._detokenizer.step():
            pass

    def _answer(self, request: Generate, choice: int, text: str) -> None:
        ids = pack_ids(self.tokenizer.encode(text, add_special_tokens=False))
        limit = request.sampling.max_new_tokens or 0
        count = len(ids) // 4
        finish = FinishReason("stop", self.tokenizer.eos_token_id)
        if count > limit:
            count, finish = limit, FinishReason("length")
        for start in range(0, max(count, 1), self._tokens):
            end = min(start + self._tokens, count)
            delta = TokenDelta(
                rid=request.rid,
                choice=choice,
                ids=slice_ids(ids, start, end),
                finish=finish if end == count else None,
                completion_tokens=end,
                sampling=request.sampling if start == 0 else None,
                input_ids=b"" if start == 0 else None,
            )
            self._ids.send(TokenBatch([delta]))


class _Outbox:
    def __init__(self, to_api: Callable[[Message], None]) -> None:
        self._to_api = to_api

    def send(self, message: Message, instance: int = 0) -> None:
        if not isinstance(message, TextStop):
            assert isinstance(message, TextBatch)
            self._to_api(message)
