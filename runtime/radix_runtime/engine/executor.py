"""Executors: the engine as the scheduler sees it, with one rank or several."""

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
import torch

from .. import ops
from ..cache_spec import ONLY_FULL_PAGES
from ..config import ServerArgs
from ..device import Device
from ..distributed import Communicator, connect, core_share
from ..errors import ConfigError, EngineDeadError
from ..model_config import ModelConfig
from ..processes import start_process
from ..step_plan import Executor, StepPlan, StepResult, serialize_plan
from .model_runner import ModelRunner
from .step_ring import RingHandle, StepRing

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0
_NEWS_SECONDS = 0.5  # between a broken exchange and the news of the death that broke it


def create_executor(
    args: ServerArgs, config: ModelConfig, on_death: Callable[[str], None] = lambda reason: None
) -> Executor:
    """Loads the model that `args.model_path` (a local directory) holds. `on_death` is called once,
    on another thread, when a rank dies; then what is in flight and every later launch raise
    EngineDeadError. Raises ConfigError."""
    config.check_tp(args.tp_size)
    return LocalExecutor(args, config) if args.tp_size == 1 else TPExecutor(args, config, on_death)


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
    return ModelRunner(args, config, device, communicator)


class LocalExecutor:
    """One rank in this process. Steps run in the order of their launch on the device's stream."""

    failure: str | None = None  # why the engine is dead; the first reason counts

    def __init__(
        self, args: ServerArgs, config: ModelConfig, communicator: Communicator | None = None
    ) -> None:
        device = Device.resolve(args.device)
        self._communicator = communicator or Communicator()
        self._stream = device.stream(self._check)
        try:
            self.runner = self._stream.submit(
                build_rank, args, config, device, self._communicator
            ).result()
        except BaseException:
            self._communicator.abort()
            self._stream.shutdown()
            raise
        self.num_pages, self.page_size = self.runner.kv_pool.num_pages, args.page_size
        self.max_rows, self.max_context = self.runner.max_rows, self.runner.max_context
        self.vocab_size = config.vocab_size
        self.max_samples = 1  # nothing drafts tokens yet
        self.cache_groups = ONLY_FULL_PAGES
        self.host_pages = 0

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        return self._stream.submit(self._run, plan)

    def _run(self, plan: StepPlan) -> StepResult:
        if self.failure is not None:  # the state that this step builds on is not what it expects
            raise EngineDeadError(self.failure)
        try:
            return self.runner.run(plan)
        except BaseException as error:
            dead = self._died_of(error)
            self._communicator.abort()
            if isinstance(error, Exception):
                raise dead from error
            raise

    def _check(self) -> None:
        try:
            self._communicator.check()
        except RuntimeError as error:
            raise self._died_of(error) from error

    def _died_of(self, error: BaseException) -> EngineDeadError:
        self.failure = self.failure or f"a step failed: {type(error).__name__}: {error}"
        return EngineDeadError(self.failure)

    def close(self) -> None:
        """Waits for the launched steps. Idempotent."""
        self._stream.shutdown()
        self._communicator.close()


class WorkerSpec(msgspec.Struct, forbid_unknown_fields=True):
    """What a worker reads from its standard input."""

    args: ServerArgs
    rank: int
    memory_fd: int
    ring: RingHandle
    parent_pid: int  # rank 0's process
    main_thread: (
        bool  # started the worker, which then may ask the kernel to end it with that thread
    )


class TPExecutor(LocalExecutor):
    """Rank 0 in this process, the others as its children. Every launch reaches them through the
    step ring before rank 0 runs it. Each holds the read end of a pipe whose other end dies with
    this process."""

    def __init__(
        self, args: ServerArgs, config: ModelConfig, on_death: Callable[[str], None]
    ) -> None:
        device = Device.resolve(args.device, count=args.tp_size)
        self._on_death = on_death
        self._ring = StepRing(args.tp_size - 1)
        self._memory_fd = os.memfd_create("radix-comm")  # the communicator's file
        self._news = threading.Event()  # of a death
        self._lock, self._closed = threading.Lock(), False
        self._communicator = connect(args, f"/proc/self/fd/{self._memory_fd}", 0, device)
        self.workers = [self._start(args, rank) for rank in range(1, args.tp_size)]
        self._watchers = [
            threading.Thread(target=self._watch, args=w, daemon=True)
            for w in enumerate(self.workers, 1)
        ]
        for watcher in self._watchers:
            watcher.start()
        try:
            super().__init__(args, config, self._communicator)
        except BaseException as error:
            self._await_news(error)
            self.close()
            if self.failure and not isinstance(error, ConfigError):
                raise EngineDeadError(self.failure) from error
            raise

    def _start(self, args: ServerArgs, rank: int) -> subprocess.Popen[bytes]:
        main_thread = threading.current_thread() is threading.main_thread()
        spec = WorkerSpec(args, rank, self._memory_fd, self._ring.handle, os.getpid(), main_thread)
        descriptors = [self._memory_fd, *self._ring.handle.fds]
        # What it prints is no output of this program.
        process = start_process("radix_runtime.engine.worker", stdout=2, pass_fds=descriptors)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()  # and stays open: its end tells the worker that we are gone
        return process

    # A death that nobody asked for aborts the exchange and closes the ring.
    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with self._lock:
            if self._closed or self._news.is_set():  # other deaths are the echo of the first
                return
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            )
            reason = f"tensor-parallel rank {rank} (pid {process.pid}) {how}"
            logger.error("%s", reason)
            self.failure = self.failure or reason
            self._on_death(self.failure)
            self._news.set()
        self._communicator.abort()
        self._ring.close()

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        if self.failure is None:
            try:
                self._ring.publish(serialize_plan(plan))
            except EngineDeadError as error:
                raise self._died_of(error) from error
        return super().launch(plan)

    def _await_news(self, error: BaseException) -> None:
        # A closed ring or a broken exchange is mostly the echo of a death: give its news a moment
        # to arrive.
        if self.failure is None and isinstance(error, RuntimeError):
            self._news.wait(_NEWS_SECONDS)

    def _died_of(self, error: BaseException) -> EngineDeadError:
        self._await_news(error)
        return super()._died_of(error)

    def close(self) -> None:
        """Ends the workers after the last launched step; kills what does not end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.failure is not None:
            self._communicator.abort()
        self._stream.shutdown()
        self._ring.close()
        for process in self.workers:
            with process:  # closes its input too
                try:
                    process.wait(_EXIT_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
        for watcher in self._watchers:
            watcher.join()
        self._ring.release()
        self._communicator.close()
        os.close(self._memory_fd)
