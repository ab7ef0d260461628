"""The scheduler process of `radix serve`: rank 0 of the engine and its scheduler."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..engine.executor import create_executor
from ..errors import EXIT_INTERNAL
from ..model_config import ModelConfig
from ..scheduler.scheduler import Scheduler
from ..text.generation_config import eos_token_ids
from ..text.tokenizer import load_tokenizer
from .child import Child
from .ipc import MAX_BODY

_LOG_SECONDS = 5.0  # between two lines about the load
_COUNTED = ("prefill", "cached", "generation")

log = logging.getLogger(__name__)


def heartbeats(child: Child, stats: Callable[[], dict[str, float]]) -> Iterator[None]:
    """To be resumed often: beats, and logs a line every few seconds while tokens flow."""
    last, start = stats(), time.monotonic()
    while True:
        child.beat()
        yield
        if (seconds := time.monotonic() - start) < _LOG_SECONDS:
            continue
        new, start = stats(), time.monotonic()
        prompt, cached, output = (
            new[f"{name}_tokens_total"] - last[f"{name}_tokens_total"] for name in _COUNTED
        )
        last = new
        if prompt + output >= seconds:  # less is next to nothing, as a health probe
            log.info(
                "running %d, queued %d, prefill %.0f tok/s, decode %.0f tok/s, cache hits %.0f %%, KV in use %.0f %%",
                *(
                    new["num_running_reqs"],
                    new["num_queue_reqs"],
                    prompt / seconds,
                    output / seconds,
                ),
                *(100 * cached / max(1, prompt + cached), 100 * new["token_usage"]),
            )


def serve(child: Child) -> None:
    inbox, outbox = child.connect()
    args = child.args
    config = ModelConfig.from_dir(args.model_path or "", args.json_model_override_args)
    tokenizer = load_tokenizer(args.tokenizer_path or args.model_path or "")
    eos_ids = eos_token_ids(Path(args.model_path or ""), tokenizer)

    def rank_died(reason: str) -> None:
        child.report("fatal", reason)
        os._exit(EXIT_INTERNAL)  # also when idle, and whatever the main thread waits for

    executor = create_executor(args, config, rank_died)
    try:
        scheduler = Scheduler(args, executor, inbox, outbox, eos_ids=eos_ids, max_message=MAX_BODY)
        scheduler.heartbeat = heartbeats(child, scheduler.stats).__next__

        def watch() -> None:
            while True:  # it stands still when the process does (SIGSTOP, a held GIL)
                time.sleep(1.0)
                child.heartbeats.watch_step(scheduler.step_in_flight_since)

        threading.Thread(target=watch, name="heartbeat", daemon=True).start()
        outbox.wait_connected()
        tokens = executor.num_pages * executor.page_size
        log.info("KV cache: %d tokens in pages of %d", tokens, executor.page_size)
        sizes = {"max_context": executor.max_context, "page_size": executor.page_size}
        child.report("ready", info={"max_total_num_tokens": tokens, **sizes})
        scheduler.run(child.should_stop)
    finally:
        executor.close()
