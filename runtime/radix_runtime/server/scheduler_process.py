"""The scheduler process of `radix serve`: rank 0 of the engine and its scheduler."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from .. import hf
from ..engine.executor import create_executor
from ..errors import EXIT_INTERNAL
from ..model_config import ModelConfig
from ..scheduler.scheduler import Scheduler
from ..step_plan import Executor
from .child import Child, Info, Report, run_child
from .heartbeat import CountingExecutor
from .ipc import SCHEDULER, Receiver, Sender

_LOG_SECONDS = 5.0  # between two lines about the load
_CONNECT_SECONDS = 60.0  # the other processes start in far less

log = logging.getLogger(__name__)


class LoadLog:
    """One line every few seconds while tokens flow."""

    def __init__(self, stats: Callable[[], dict[str, float]]) -> None:
        self._stats = stats
        self._last = stats()
        self._due = time.monotonic() + _LOG_SECONDS

    def tick(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        seconds = now - self._due + _LOG_SECONDS
        self._due = now + _LOG_SECONDS
        stats = self._stats()
        since = {name: value - self._last[name] for name, value in stats.items()}
        self._last = stats
        prompt, cached = since["prefill_tokens_total"], since["cached_tokens_total"]
        output = since["generation_tokens_total"]
        if prompt + output < seconds:  # next to nothing, as a health probe
            return
        log.info(
            "running %d, queued %d, prefill %.0f tok/s, decode %.0f tok/s, cache hits %.0f %%, KV in use %.0f %%",
            stats["num_running_reqs"],
            stats["num_queue_reqs"],
            prompt / seconds,
            output / seconds,
            100 * cached / max(1, prompt + cached),
            100 * stats["token_usage"],
        )


def serve(child: Child, load: Callable[[], Executor], eos_ids: Sequence[int]) -> None:
    """Loads the engine, tells the supervisor, and schedules until SIGTERM."""
    wake = child.stop_on_sigterm()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = Receiver(context, child.directory, SCHEDULER, child.token, wake)
    outbox = Sender(context, child.directory, SCHEDULER, child.token)
    executor = load()
    try:
        counting = CountingExecutor(executor, child.heartbeats)
        scheduler = Scheduler(child.args, counting, inbox, outbox, eos_ids=eos_ids)
        load_log = LoadLog(scheduler.stats)

        def heartbeat() -> None:
            child.beat()
            load_log.tick()

        scheduler.heartbeat = heartbeat
        outbox.wait_connected(_CONNECT_SECONDS)
        tokens = executor.num_pages * executor.page_size
        log.info("KV cache: %d tokens in pages of %d", tokens, executor.page_size)
        info: Info = {
            "max_total_num_tokens": tokens,
            "max_context": executor.max_context,
            "page_size": executor.page_size,
        }
        child.report(Report("ready", info=info))
        scheduler.run(child.should_stop)
    finally:
        executor.close()


def main(child: Child) -> None:
    args = child.args
    config = ModelConfig.from_dir(args.model_path or "", args.json_model_override_args)
    tokenizer = hf.load_tokenizer(args.tokenizer_path or args.model_path or "")
    eos_ids = hf.eos_token_ids(Path(args.model_path or ""), tokenizer)

    def rank_died(reason: str) -> None:
        child.report(Report("fatal", reason))
        os._exit(EXIT_INTERNAL)  # also when idle, and whatever the main thread waits for

    serve(child, lambda: create_executor(args, config, rank_died), eos_ids)


if __name__ == "__main__":
    run_child(main)
