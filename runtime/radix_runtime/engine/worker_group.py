"""The processes of ranks 1 .. N-1: started, watched and ended by rank 0."""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from ..config import ServerArgs
from ..errors import EXIT_INTERNAL, ConfigError, EngineDeadError
from ..spawn import signal_name, start_process
from .commands import CommandReply
from .step_ring import RingHandle, StepRing

logger = logging.getLogger(__name__)

Death = ConfigError | EngineDeadError  # of a rank, and why

_EXIT_SECONDS = 5.0  # that the workers have to end by themselves
_REPLY_SECONDS = 600.0  # that each has for a command
# A worker that is stopped (SIGSTOP) is looked at so often, so many seconds apart, before it counts
# as dead. Looks, and no deadline: where all processes are stopped and continued, none is.
_STOPPED_LOOKS = 20
_LOOK_SECONDS = 0.05
# A worker that ends without a word mostly follows another, which is given so long to be told first.
_ECHO_SECONDS = 1.0
_MOST_WORDS = 2000  # characters
_PIPE_BYTES = 64 << 10  # what a pipe holds at least of one write


class WorkerSpec(msgspec.Struct, forbid_unknown_fields=True):
    """What a worker reads from its standard input."""

    args: ServerArgs
    rank: int
    memory_fd: int
    ring: RingHandle
    reply_fd: int  # write end of the pipe for CommandReplies
    words_fd: int  # write end of the pipe for its LastWords
    parent_pid: int  # rank 0's process
    # The main thread started the worker, which may then ask the kernel to end it with that thread.
    main_thread: bool


class LastWords(msgspec.Struct, forbid_unknown_fields=True):
    """What a worker says of its end, before it exits."""

    text: str
    is_config_error: bool = False


def say_last_words(spec: WorkerSpec, words: LastWords) -> None:
    """In a worker, once."""
    words.text = words.text[:_MOST_WORDS]
    os.write(spec.words_fd, msgspec.json.encode(words))


class WorkerGroup:
    """Starts one process a rank on construction. Each holds the read end of a pipe whose other end
    is in this process, so none outlives it.

    Frames reach the workers through `ring`; `memory_path` names the file that all ranks share for
    their Communicator."""

    def __init__(self, args: ServerArgs) -> None:
        self.ring = StepRing(args.tp_size - 1)
        self._memory_fd = os.memfd_create("radix-comm")
        self._replies: list[Connection] = []
        self._words: list[int] = []  # read ends of the pipes for LastWords
        self.processes = [self._start(args, rank) for rank in range(1, args.tp_size)]
        self._watchers: list[threading.Thread] = []
        self._on_death: Callable[[Death], None] = lambda death: None
        self._lock = threading.RLock()  # of the news of a death
        self._closed = False
        self._death_told = threading.Event()

    @property
    def memory_path(self) -> str:
        return f"/proc/self/fd/{self._memory_fd}"

    def _start(self, args: ServerArgs, rank: int) -> subprocess.Popen[bytes]:
        read_fd, reply_fd = os.pipe()
        self._replies.append(Connection(read_fd, writable=False))
        read_fd, words_fd = os.pipe()
        self._words.append(read_fd)
        spec = WorkerSpec(
            args=args,
            rank=rank,
            memory_fd=self._memory_fd,
            ring=self.ring.handle,
            reply_fd=reply_fd,
            words_fd=words_fd,
            parent_pid=os.getpid(),
            main_thread=threading.current_thread() is threading.main_thread(),
        )
        descriptors = [self._memory_fd, reply_fd, words_fd, *self.ring.handle.fds]
        # What it prints is no output of this program.
        process = start_process(
            "radix_runtime.engine.worker",
            title=f"radix: rank {rank}",
            stdout=2,
            pass_fds=descriptors,
        )
        # Their ends in the worker are the last: a death ends what waits for a reply.
        os.close(reply_fd)
        os.close(words_fd)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()  # and stays open: its end tells the worker that we are gone
        return process

    def watch(self, on_death: Callable[[Death], None]) -> None:
        """From now on `on_death(death)` is called, once, on another thread, when a worker ends
        before `close`, or is stopped for a second, since the others would wait for it."""
        self._on_death = on_death
        for rank, process in enumerate(self.processes, 1):
            for look_after in (self._watch_end, self._watch_stops):
                watcher = threading.Thread(target=look_after, args=(rank, process), daemon=True)
                watcher.start()
                self._watchers.append(watcher)

    def _watch_end(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        frame = os.read(self._words[rank - 1], _PIPE_BYTES)  # nothing where it ends without
        if frame:
            words = msgspec.json.decode(frame, type=LastWords)
            how = f"failed: {words.text}"
        else:
            words = LastWords("")
            how = self._await_exit(process)
        self._tell_death(rank, how, is_config_error=words.is_config_error)

    def _watch_stops(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        while _is_stopped(process.pid, wait=True):
            if not _continues(process.pid):
                seconds = _STOPPED_LOOKS * _LOOK_SECONDS
                with self._lock:  # so that its end is no news before this is
                    process.kill()  # it could not end by itself
                    self._tell_death(rank, f"has been stopped (SIGSTOP) for {seconds:g} s")
                return

    def _tell_death(self, rank: int, how: str, *, is_config_error: bool = False) -> None:
        with self._lock:
            if self._closed or self._death_told.is_set():
                return  # asked for, or the consequence of the first death
            pid = self.processes[rank - 1].pid
            reason = f"tensor-parallel rank {rank} (pid {pid}) {how}"
            if is_config_error:  # one line for all ranks: who catches it says it
                self._on_death(ConfigError(reason))
            else:
                logger.error("%s", reason)
                self._on_death(EngineDeadError(reason))
            self._death_told.set()

    def _await_exit(self, process: subprocess.Popen[bytes]) -> str:
        """How a worker that has said nothing has ended."""
        code = process.wait()
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        if code == EXIT_INTERNAL:
            self._death_told.wait(_ECHO_SECONDS)
        return f"exited with {code}"

    def receive_replies(self) -> list[CommandReply]:
        """Each worker's answer to the command that was published last, in the order of ranks.

        Raises EngineDeadError: a worker has died, or does not answer."""
        replies = []
        for rank, connection in enumerate(self._replies, 1):
            try:
                if not connection.poll(_REPLY_SECONDS):
                    text = f"worker rank {rank} did not answer in {_REPLY_SECONDS:g} s"
                    raise EngineDeadError(text)
                frame = connection.recv_bytes()
            except (EOFError, ConnectionError):
                raise EngineDeadError(f"worker rank {rank} has gone") from None
            replies.append(msgspec.msgpack.decode(frame, type=CommandReply))
        return replies

    def await_death(self, seconds: float) -> None:
        """Gives a death that is under way the time to be reported."""
        self._death_told.wait(seconds)

    def stop_watching(self) -> None:
        """Deaths from now on are asked for."""
        self._closed = True

    def kill(self) -> None:
        """Before `close`, where nothing that the workers do is wanted any more."""
        self.stop_watching()
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """Ends the workers after the last published frame; kills what does not end. Once."""
        self.stop_watching()
        self.ring.close()
        deadline = time.monotonic() + _EXIT_SECONDS
        for process in self.processes:
            with process:  # closes its input too
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
        for watcher in self._watchers:
            watcher.join()
        for connection in self._replies:
            connection.close()
        for descriptor in self._words:
            os.close(descriptor)
        self.ring.release()
        os.close(self._memory_fd)


def _is_stopped(pid: int, *, wait: bool = False) -> bool:
    """Whether a child of this process is stopped. `wait`: first until it is, or has ended."""
    options = os.WSTOPPED | os.WEXITED | os.WNOWAIT  # its end remains to be waited for
    try:
        state = os.waitid(os.P_PID, pid, options if wait else options | os.WNOHANG)
    except ChildProcessError:  # somebody has waited for its end
        return False
    return state is not None and state.si_code == os.CLD_STOPPED


def _continues(pid: int) -> bool:
    """Whether a stopped child runs again within a second."""
    for _ in range(_STOPPED_LOOKS):
        time.sleep(_LOOK_SECONDS)
        if not _is_stopped(pid):
            return True
    return False
