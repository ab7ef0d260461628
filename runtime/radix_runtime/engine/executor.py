"""Executors: the engine as the scheduler sees it, with one rank or several."""

import os
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from .. import ops
from ..cache_spec import ONLY_FULL_PAGES
from ..config import ServerArgs
from ..device import Device, Span
from ..distributed import Communicator, connect, core_share
from ..errors import ConfigError, EngineCommandError, EngineDeadError, MaskError
from ..model_config import ModelConfig
from ..step_plan import (
    EngineCommand,
    Forward,
    StepMasks,
    StepPlan,
    StepResult,
)
from .agreement import StepSeal, check_agreement, shared_facts
from .commands import CommandReply, execute, texts
from .deferred_stream import DeferredStream
from .masks import check_masks
from .memory_advice import step_failure
from .model_runner import ModelRunner
from .worker_group import Death, WorkerGroup

_NEWS_SECONDS = 0.5  # between a broken exchange and the news of the death that broke it


def create_executor(
    args: ServerArgs, config: ModelConfig, on_death: Callable[[Death], None] = lambda death: None
) -> "LocalExecutor":
    """Loads the model in the local directory `args.model_path`.

    `on_death(death)` is called once, on another thread, when another rank dies; then the steps in
    flight and every later launch raise EngineDeadError. Raises ConfigError."""
    config.check_tp(args.tp_size)
    if args.tp_size == 1:
        return LocalExecutor(args, config)
    return TPExecutor(args, config, on_death=on_death)


def build_rank(
    args: ServerArgs, config: ModelConfig, device: Device, communicator: Communicator
) -> ModelRunner:
    """The runner of this rank, on its share of the cores; runs on the thread that will use it."""
    if device.is_cpu:
        threads, cores = core_share(communicator.rank, communicator.world_size, args.num_threads)
        if cores is not None:
            os.sched_setaffinity(0, cores)  # this thread and those it starts
        ops.set_num_threads(threads)
        torch.set_num_threads(threads)
    communicator.open(device)
    runner = ModelRunner(args, config, device=device, communicator=communicator)
    check_agreement(shared_facts(runner), communicator, device.torch_device)
    return runner


class LocalExecutor:
    """One rank in this process. Steps run in the order of their launch on the device's stream."""

    failure: str | None = None  # why the engine is dead; the first reason counts

    def __init__(
        self, args: ServerArgs, config: ModelConfig, communicator: Communicator | None = None
    ) -> None:
        device = Device.resolve(args.device)
        ops.check_device(device.kind)
        self._args = args
        self._device = device
        self._communicator = communicator or Communicator()
        self._stream = DeferredStream(device.stream(self._check))
        self._clock = device.clock()
        try:
            self.runner = self._stream.submit(
                build_rank, args, config, device, self._communicator
            ).result()
        except BaseException:
            self._communicator.abort()
            self._stream.shutdown()
            raise
        self.num_pages = self.runner.kv_pool.num_pages
        self.page_size = args.page_size
        self.max_rows = self.runner.max_rows
        self.max_context = self.runner.max_context
        self.vocab_size = config.vocab_size
        self.max_samples = self.runner.max_samples
        self.cache_groups = ONLY_FULL_PAGES
        self.host_pages = 0

    def launch(self, plan: StepPlan, masks: StepMasks | None = None) -> Future[StepResult]:
        """Executor.launch."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        return self._stream.submit(self._run, plan, masks, waits=masks is not None)

    def _run(self, plan: StepPlan, masks: StepMasks | None) -> StepResult:
        if self.failure is not None:  # the state that this step builds on is not what it expects
            raise EngineDeadError(self.failure)
        try:
            start = self._clock.start()
            result = self.runner.run(plan) if masks is None else self._run_masked(plan, masks)
            result.device_span = Span(self._clock, start=start, end=self._clock.end())
            return result
        except MaskError:
            raise
        except BaseException as error:
            dead = self._died_of(error)
            self._communicator.abort()
            if isinstance(error, Exception):
                raise dead from error
            raise

    def _run_masked(self, plan: StepPlan, masks: StepMasks) -> StepResult:
        queued_at = time.monotonic()
        forwarded = self.runner.forward(plan)
        try:
            forward = Forward(queued_at=queued_at, is_running=self._device.mark())
            words, late = masks.take(forward)
            check_masks(plan, words, late, self.vocab_size)
        except Exception as error:
            # The other ranks wait for ids, and the step behind this one for a next token.
            self.runner.skip_draw(plan, forwarded)
            raise MaskError(plan.step_id, str(error) or type(error).__name__) from error
        return self.runner.draw(plan, forwarded, words, late)

    def call(self, command: EngineCommand) -> Future[list[str]]:
        """Executor.call."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        try:
            return self._stream.submit(self._execute, command)
        except EngineCommandError as error:  # a GPU's stream runs it on this thread
            failed: Future[list[str]] = Future()
            failed.set_exception(error)
            return failed

    def _execute(self, command: EngineCommand) -> list[str]:
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        own = execute(self.runner, command, rank=0)
        try:
            return texts([own, *self._other_replies()])
        except EngineDeadError as error:
            raise self._died_of(error) from error

    def _other_replies(self) -> list[CommandReply]:
        """What the ranks of other processes answer to the command that runs."""
        return []

    def _check(self) -> None:
        try:
            self._communicator.check()
        except RuntimeError as error:
            raise self._died_of(error) from error

    def _died_of(self, error: BaseException) -> EngineDeadError:
        self.failure = self.failure or f"a step failed: {self._why(error)}"
        return EngineDeadError(self.failure)

    def _why(self, error: BaseException) -> str:
        return step_failure(self._args, self._device, error)

    def close(self) -> None:
        """Executor.close."""
        self._stream.shutdown()
        self._release()
        self._communicator.close()

    def _release(self) -> None:
        """Gives back the memory of the model, the KV pool and the graphs."""
        if hasattr(self, "runner"):
            del self.runner
        self._device.release_memory()


class TPExecutor(LocalExecutor):
    """Rank 0 in this process, the others as its children. Every launch reaches them through the
    step ring before rank 0 runs it."""

    def __init__(
        self, args: ServerArgs, config: ModelConfig, on_death: Callable[[Death], None]
    ) -> None:
        self._device = Device.resolve(args.device, count=args.tp_size)
        ops.check_device(self._device.kind)  # before there are processes to end
        self._on_death = on_death
        self._death: Death | None = None  # where that of another rank is the failure
        self._closed = False
        self._communicator = Communicator()  # of one rank, until it is connected
        self._group = WorkerGroup(args)
        try:
            self._communicator = connect(args, self._group.memory_path, 0, self._device)
            self._group.watch(self._worker_died)
            super().__init__(args, config, self._communicator)
            self._seal = StepSeal(self.runner, rank=0)
        except BaseException as error:
            self._await_news(error)
            self._group.kill()  # they may still load for minutes
            self.close()
            if self._death is not None and not isinstance(error, ConfigError):
                raise self._death from error
            raise

    @property
    def workers(self) -> list[subprocess.Popen[bytes]]:
        """The processes of ranks 1 .. N-1."""
        return self._group.processes

    def _worker_died(self, death: Death) -> None:
        if self.failure is None:
            self._death = death
            self.failure = str(death)
        self._on_death(self._death or EngineDeadError(self.failure))
        self._communicator.abort()
        self._group.ring.close()

    def launch(self, plan: StepPlan, masks: StepMasks | None = None) -> Future[StepResult]:
        """Executor.launch."""
        plan.has_masks = masks is not None
        self._publish(plan)
        return super().launch(plan, masks)

    def call(self, command: EngineCommand) -> Future[list[str]]:
        """Executor.call."""
        self._publish(command)
        return super().call(command)

    def _publish(self, work: StepPlan | EngineCommand) -> None:
        if self.failure is None:
            try:
                self._group.ring.publish(self._seal.close(work))
            except EngineDeadError as error:
                raise self._died_of(error) from error

    def _other_replies(self) -> list[CommandReply]:
        return self._group.receive_replies()

    def _await_news(self, error: BaseException) -> None:
        # A closed ring or a broken exchange is mostly the consequence of a death: give the report
        # of it a moment to arrive.
        if self.failure is None and isinstance(error, RuntimeError):
            self._group.await_death(_NEWS_SECONDS)

    def _died_of(self, error: BaseException) -> EngineDeadError:
        self._await_news(error)
        return super()._died_of(error)

    def close(self) -> None:
        """Executor.close. Ends the workers after the last launched step; kills what does not
        end."""
        if self._closed:
            return
        self._closed = True
        self._group.stop_watching()
        if self.failure is not None:
            self._communicator.abort()
        if hasattr(self, "_stream"):  # the start may have failed before
            self._stream.shutdown()
        self._group.close()
        self._release()  # first: NCCL waits for the graphs that hold its work
        self._communicator.close()
