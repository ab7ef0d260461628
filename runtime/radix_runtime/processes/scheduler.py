"""The scheduler process of `radix serve`: rank 0 of the engine and its scheduler."""

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import ServerArgs
from ..engine.device_defaults import with_device_defaults
from ..engine.executor import LocalExecutor, create_executor
from ..engine.facts import engine_facts, resolved_settings
from ..engine.worker_group import Death
from ..errors import EXIT_CONFIG, EXIT_INTERNAL, ConfigError, RequestError
from ..grammar.service import Grammars
from ..model_config import ModelConfig
from ..scheduler.scheduler import Scheduler
from ..scheduler.step_log import StepLog
from ..text.generation_config import eos_token_ids
from ..text.tokenizer import Tokenizer, served_tokenizer
from .child import Child
from .ipc import MAX_BODY

_LOG_SECONDS = 5.0  # between two lines about the load

log = logging.getLogger(__name__)


class LoadLog:
    """Logs a line about the load every few seconds while tokens flow."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._last = scheduler.stats()
        self._start = time.monotonic()

    def tick(self) -> None:
        """To be called often."""
        seconds = time.monotonic() - self._start
        if seconds < _LOG_SECONDS:
            return
        new = self._scheduler.stats()
        prefill = new["prefill_tokens_total"] - self._last["prefill_tokens_total"]
        cached = new["cached_tokens_total"] - self._last["cached_tokens_total"]
        decode = new["generation_tokens_total"] - self._last["generation_tokens_total"]
        self._last = new
        self._start = time.monotonic()
        if prefill + decode < seconds:  # next to nothing, as a health probe
            return
        log.info(
            "running %d, queued %d, prefill %.0f tok/s, decode %.0f tok/s, cache hits %.0f %%, "
            "KV in use %.0f %%",
            new["num_running_reqs"],
            new["num_queue_reqs"],
            prefill / seconds,
            decode / seconds,
            100 * cached / max(1, prefill + cached),
            100 * new["token_usage"],
        )


def serve(child: Child) -> None:
    """Runs until the supervisor asks this process to stop, or a rank dies."""
    inbox, outbox = child.connect()
    args = with_device_defaults(child.args)
    config = ModelConfig.from_dir(args.model_path or "", args.json_model_override_args)
    tokenizer = served_tokenizer(args)
    eos_ids = eos_token_ids(Path(args.model_path or ""), tokenizer)

    def rank_died(death: Death) -> None:
        is_config = isinstance(death, ConfigError)
        child.report("config" if is_config else "fatal", death)
        # Also when idle, and whatever the main thread waits for.
        os._exit(EXIT_CONFIG if is_config else EXIT_INTERNAL)

    step_log = StepLog(args.trace)
    executor = create_executor(args, config, rank_died)
    grammars = _grammars(args, executor, tokenizer=tokenizer, eos_ids=eos_ids)
    try:
        scheduler = Scheduler(
            args=args,
            executor=executor,
            inbox=inbox,
            outbox=outbox,
            eos_ids=eos_ids,
            max_message=MAX_BODY,
            make_masks=grammars.start_masker,
        )
        scheduler.step_log = step_log
        with suppress(RequestError):  # answers cannot be constrained
            scheduler.constraints.start()
        load = LoadLog(scheduler)

        def heartbeat() -> None:
            child.beat()
            load.tick()

        scheduler.heartbeat = heartbeat
        _watch_steps(child, scheduler)
        outbox.wait_connected()
        child.report("ready", info=_facts(args, config, executor))
        scheduler.run(child.should_stop)
    finally:
        grammars.close()
        executor.close()
        step_log.close()


def _facts(args: ServerArgs, config: ModelConfig, executor: LocalExecutor) -> dict[str, Any]:
    """What the server tells of its engine."""
    return {
        **resolved_settings(args, config),
        **engine_facts(executor.runner),
        "max_total_num_tokens": executor.num_pages * executor.page_size,
        "max_context": executor.max_context,
        "page_size": executor.page_size,
    }


def _grammars(
    args: ServerArgs,
    executor: LocalExecutor,
    *,
    tokenizer: Tokenizer | None,
    eos_ids: Sequence[int],
) -> Grammars:
    return Grammars(
        args,
        tokenizer,
        vocab_size=executor.vocab_size,
        eos_ids=eos_ids,
        mask_rows=executor.max_rows * executor.max_samples,
    )


def _watch_steps(child: Child, scheduler: Scheduler) -> None:
    """Notes every second whether steps complete, on a thread: the scheduler's loop may wait for
    one."""

    def watch() -> None:
        while True:  # it stands still when the process does (SIGSTOP, a held GIL)
            time.sleep(1.0)
            child.heartbeats.watch_step(child.process, scheduler.step_in_flight_since)

    threading.Thread(target=watch, name="heartbeat", daemon=True).start()
