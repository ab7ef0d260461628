"""A tensor-parallel worker (rank > 0): takes plans and commands from the ring and runs its shard.

Rank 0 starts it with a WorkerSpec on standard input, which stays open as long as rank 0 lives. A
worker schedules and samples nothing."""

import ctypes
import logging
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

import msgspec

from ..device import Device
from ..distributed import CommunicatorAborted, connect
from ..errors import EXIT_CLEAN, EXIT_CONFIG, EXIT_INTERNAL, ConfigError
from ..log import setup_logging
from ..model_config import ModelConfig
from ..step_plan import StepPlan, deserialize_plan
from .commands import execute
from .executor import build_rank
from .step_ring import StepRingReader
from .worker_group import WorkerSpec

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Runs until rank 0 closes the ring; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSpec)
    args = spec.args
    _die_with_parent(spec)
    setup_logging(f"rank {spec.rank}", args.log_level)
    device = Device.resolve(args.device, spec.rank)
    communicator = connect(args, f"/proc/self/fd/{spec.memory_fd}", spec.rank, device)
    try:
        config = ModelConfig.from_dir(args.model_path or "", args.json_model_override_args)
        ring = StepRingReader(spec.ring, spec.rank - 1)
        replies = Connection(spec.reply_fd, readable=False)
        with device.own_stream():
            runner = build_rank(args, config, device, communicator)
            while (frame := ring.receive()) is not None:
                work = deserialize_plan(frame)
                if isinstance(work, StepPlan):
                    runner.run(work)
                    communicator.check()
                else:
                    replies.send_bytes(msgspec.msgpack.encode(execute(runner, work, spec.rank)))
    except ConfigError as error:
        logger.error("%s", error)
        communicator.abort()
        return EXIT_CONFIG
    except RuntimeError as error:  # EngineDeadError is one
        is_echo = isinstance(error, CommunicatorAborted)  # who aborted the group has said why
        logger.log(logging.DEBUG if is_echo else logging.ERROR, "%r", error)
        communicator.abort()
        return EXIT_INTERNAL
    return EXIT_CLEAN


def _die_with_parent(spec: WorkerSpec) -> None:
    """No worker outlives rank 0, however that one ends."""
    if spec.main_thread:
        # The signal comes with the end of the *thread* that started us: only for the main one.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != spec.parent_pid:
        os._exit(EXIT_INTERNAL)
    threading.Thread(target=_wait_for_end_of_input, daemon=True).start()


def _wait_for_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(EXIT_INTERNAL)  # rank 0 is gone: it closes its end only after our own
