"""A tensor-parallel worker (rank > 0): takes plans and commands from the ring and runs its shard.

Rank 0 starts it with a WorkerSpec on standard input, which stays open as long as rank 0 lives. A
worker schedules and samples nothing."""

import logging
import os
import sys
import threading
from multiprocessing.connection import Connection
from typing import NoReturn

import msgspec

from ..device import Device, OutOfMemory
from ..distributed import Communicator, CommunicatorAborted, connect
from ..errors import EXIT_CLEAN, EXIT_CONFIG, EXIT_INTERNAL, ConfigError
from ..log import setup_logging
from ..model_config import ModelConfig
from ..spawn import die_with_parent, leave
from ..step_plan import StepPlan
from .agreement import StepSeal
from .commands import execute
from .executor import build_rank
from .memory_advice import step_failure
from .model_runner import ModelRunner
from .step_ring import StepRingReader
from .worker_group import LastWords, WorkerSpec, say_last_words

logger = logging.getLogger(__name__)


def main() -> NoReturn:
    """Runs until rank 0 closes the ring."""
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSpec)
    _die_with_parent(spec)
    setup_logging(f"rank {spec.rank}", spec.args.log_level)
    leave(_exit_code(spec))  # torch's own end would take half a second, on each rank


def _exit_code(spec: WorkerSpec) -> int:
    """Serves, and says why it fails; the exit code."""
    try:
        _serve(spec)
    except ConfigError:
        return EXIT_CONFIG
    except Exception as error:
        logger.debug("%r", error)
        return EXIT_INTERNAL
    return EXIT_CLEAN


def _serve(spec: WorkerSpec) -> None:
    """Until rank 0 closes the ring. Says why it fails, and then ends the waits of all ranks: rank 0
    waits only a moment for the reason of an abort."""
    communicator = Communicator()  # of one rank, until it is connected
    try:
        device = Device.resolve(spec.args.device, spec.rank)
        communicator = connect(spec.args, f"/proc/self/fd/{spec.memory_fd}", spec.rank, device)
        _run_steps(spec, device, communicator)
    except BaseException as error:
        _say_why(spec, error)
        communicator.abort()
        raise


def _say_why(spec: WorkerSpec, error: BaseException) -> None:
    if isinstance(error, ConfigError):  # rank 0 logs it, once for all ranks
        say_last_words(spec, LastWords(str(error), is_config_error=True))
    elif isinstance(error, CommunicatorAborted):
        pass  # who aborted the group says why
    elif isinstance(error, RuntimeError):  # rank 0 logs it
        say_last_words(spec, LastWords(str(error)))
    elif isinstance(error, Exception):
        # The traceback first: with these words rank 0 may end this process.
        logger.exception("unexpected error")
        say_last_words(spec, LastWords(f"{type(error).__name__}: {error}"))


def _run_steps(spec: WorkerSpec, device: Device, communicator: Communicator) -> None:
    args = spec.args
    config = ModelConfig.from_dir(args.model_path or "", args.json_model_override_args)
    ring = StepRingReader(spec.ring, spec.rank - 1)
    replies = Connection(spec.reply_fd, readable=False)
    with device.own_stream():
        runner = build_rank(args, config, device, communicator)
        seal = StepSeal(runner, spec.rank)
        while (frame := ring.receive()) is not None:
            work = seal.open(frame)
            if isinstance(work, StepPlan):
                _run_step(spec, device, runner, work)
                communicator.check()
            else:
                replies.send_bytes(msgspec.msgpack.encode(execute(runner, work, spec.rank)))
        communicator.check()  # what an abort has cut would never be done
        device.synchronize()  # others may wait for what the last step sends


def _run_step(spec: WorkerSpec, device: Device, runner: ModelRunner, plan: StepPlan) -> None:
    try:
        runner.run(plan)
    except RuntimeError as error:
        if OutOfMemory.of(error) is None:
            raise
        raise RuntimeError(step_failure(spec.args, device, error)) from error


def _die_with_parent(spec: WorkerSpec) -> None:
    """No worker outlives rank 0, however that one ends."""
    if spec.main_thread:
        # The signal comes with the end of the *thread* that started us: only for the main one.
        die_with_parent()
    if os.getppid() != spec.parent_pid:
        os._exit(EXIT_INTERNAL)
    threading.Thread(target=_wait_for_end_of_input, daemon=True).start()


def _wait_for_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(EXIT_INTERNAL)  # rank 0 is gone: it closes its end only after our own
