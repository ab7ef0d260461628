"""Executors: the engine as the scheduler sees it, with one rank or several."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future

from ..config import ServerArgs
from ..device import Device
from ..distributed import Communicator, SharedMemory, core_share
from ..errors import ConfigError, EngineDeadError
from ..model_config import ModelConfig
from ..step_plan import Executor, StepPlan, StepResult, encode_plan
from .model_runner import ModelRunner, set_threads
from .worker_group import WorkerGroup

OnDeath = Callable[[str], None]


def create_executor(args: ServerArgs, config: ModelConfig, on_death: OnDeath | None = None) -> Executor:
    """Loads the model that `args.model_path` (a local directory) holds. `on_death` is called once,
    on another thread, when a rank dies; what is in flight then raises EngineDeadError, and so does
    every later launch. Raises ConfigError for what cannot work."""
    config.check_tp(args.tp_size)
    if args.tp_size == 1:
        return LocalExecutor(args, config)
    return TPExecutor(args, config, on_death)


def build_rank(args: ServerArgs, config: ModelConfig, device: Device, communicator: Communicator) -> ModelRunner:
    """The runner of this rank, on its share of the cores; runs on the thread that will use it."""
    if device.is_cpu:
        share = core_share(communicator.rank, communicator.world_size, args.num_threads)
        if share.cores is not None:
            os.sched_setaffinity(0, share.cores)  # this thread and those it starts
        set_threads(share.threads)
    return ModelRunner(args, config, device, communicator)


class _Handle:
    def __init__(self, ticket: Future[StepResult], explain: Callable[[BaseException], str]) -> None:
        self._ticket = ticket
        self._explain = explain

    def done(self) -> bool:
        return self._ticket.done()

    def result(self) -> StepResult:
        try:
            return self._ticket.result()
        except Exception as error:
            raise EngineDeadError(self._explain(error)) from error


class LocalExecutor:
    """One rank in this process. Steps run in the order of their launch on the device's stream."""

    _failure: str | None = None  # why the engine is dead; the first reason counts

    def __init__(self, args: ServerArgs, config: ModelConfig, communicator: Communicator | None = None) -> None:
        device = Device.resolve(args.device)
        self._communicator = communicator or Communicator()
        self._stream = device.stream()
        try:
            build = self._stream.submit(lambda: build_rank(args, config, device, self._communicator))
            self.runner = build.result()
        except BaseException:
            self._communicator.abort()
            self._stream.shutdown()
            raise
        self.num_pages = self.runner.kv_pool.num_pages
        self.page_size = args.page_size
        self.max_rows = self.runner.max_rows
        self.max_context = self.runner.max_context
        self.vocab_size = config.vocab_size

    def launch(self, plan: StepPlan) -> _Handle:
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        try:
            return _Handle(self._stream.submit(lambda: self._run(plan)), self._explain)
        except Exception as error:
            raise EngineDeadError(self._explain(error)) from error

    def _run(self, plan: StepPlan) -> StepResult:
        if self._failure is not None:  # the state that this step builds on is not what it expects
            raise EngineDeadError(self._failure)
        try:
            return self.runner.run(plan)
        except BaseException as error:
            self._explain(error)
            self._communicator.abort()
            raise

    def _explain(self, error: BaseException) -> str:
        if self._failure is None:
            self._failure = f"a step failed: {type(error).__name__}: {error}"
        return self._failure

    def close(self) -> None:
        """Waits for the launched steps. Idempotent."""
        self._stream.shutdown()
        self._communicator.close()


class TPExecutor(LocalExecutor):
    """Rank 0 in this process, the others as its children. Every launch reaches them through the
    step ring before rank 0 runs it."""

    def __init__(self, args: ServerArgs, config: ModelConfig, on_death: OnDeath | None = None) -> None:
        if not Device.resolve(args.device).is_cpu:
            raise ConfigError("--tp-size above 1 needs --device cpu")
        self._on_death = on_death
        self._workers = WorkerGroup(args, self._worker_died)
        try:
            communicator = SharedMemory(self._workers.memory_path, 0, args.tp_size)
            self._workers.watch(communicator)
            super().__init__(args, config, communicator)
        except BaseException as error:
            self._workers.close()
            if self._workers.failure and not isinstance(error, ConfigError):
                raise EngineDeadError(self._workers.failure) from error
            raise

    def _worker_died(self, reason: str) -> None:
        self._failure = self._failure or reason
        if self._on_death is not None:
            self._on_death(self._failure)

    def launch(self, plan: StepPlan) -> _Handle:
        if self._failure is None:
            try:
                self._workers.ring.publish(encode_plan(plan))
            except EngineDeadError as error:
                # A closed ring is the echo of a death that has a better name.
                raise EngineDeadError(self._failure or self._explain(error)) from error
        return super().launch(plan)

    def _explain(self, error: BaseException) -> str:
        # A broken exchange is mostly the echo of a death: give its news a moment to arrive.
        if self._failure is None and isinstance(error, RuntimeError):
            self._workers.await_death()
        return super()._explain(error)

    def close(self) -> None:
        if self._failure is not None:
            self._communicator.abort()
        self._stream.shutdown()
        self._workers.close()
        self._communicator.close()
