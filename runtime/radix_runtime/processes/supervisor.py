"""The supervisor of `radix serve`: starts the processes, watches them, ends them together.

docs/serving.md has the cases in which it ends them. Only a process of a restartable role may die
alone."""

# Nothing polls: the loop sleeps on exits, status pipes and signals, and reads heartbeats each
# second from the start.

import logging
import os
import resource
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from ..config import ServerArgs
from ..errors import EXIT_CLEAN, EXIT_HANG, EXIT_INTERNAL, ConfigError
from ..server.auth import counted_keys, keys_digest
from ..server.listener import url_of
from ..server.shared_numbers import SharedNumbers, create_memory
from ..spawn import DUMP_SIGNAL
from .child import Info, Launch, on_signals
from .child_process import ChildProcess
from .health_port import HealthPort
from .heartbeat import Heartbeats
from .ipc import TOKEN_BYTES, LinkError, Node
from .private_directory import private_directory
from .restarts import DEATH_WINDOW, MAX_DEATHS, Restarts
from .roles import SUPERVISOR, Role, Topology, process_id, serving_roles
from .stopped import family, is_stopped

_OTHER_FILES = 256  # open files of a process beside connections
_TICK = 1.0  # seconds between two looks at the heartbeats
_GRACE = 2.5  # seconds that children have to end by themselves,
_ENGINE_GRACE = 1.0  # those that no client hears of, after a death: one step may take longer
_DUMP_TIME = 0.05  # seconds for a process to print its stacks

log = logging.getLogger(__name__)


class Supervisor:
    """One serving instance of the processes that `roles` describe. The caller binds `listener`, so
    that a port in use is known before anything else happens. `on_serving` is called once, with the
    URL and what the processes have reported, when requests are taken."""

    def __init__(
        self,
        args: ServerArgs,
        listener: socket.socket,
        on_serving: Callable[[str, Info], None],
        roles: Sequence[Role] | None = None,
    ) -> None:
        """`roles` None: those that `args` ask for."""
        roles = serving_roles(args.api_processes) if roles is None else roles
        self._args = args
        self._on_serving = on_serving
        self._listener = listener
        self._url = url_of(listener)
        self._roles = list(roles)
        self._topology = Topology(roles)
        self._heartbeats = Heartbeats(self._topology.everybody())
        self._http = [name for name in self._topology.processes if self._serves_http(name)]
        self._keys = counted_keys(args)
        self._keys_digest = keys_digest(args)
        self._numbers_fd = create_memory(len(self._http), self._keys)
        self._numbers = SharedNumbers(len(self._http), keys=self._keys, descriptor=self._numbers_fd)
        self._selector = selectors.DefaultSelector()  # the data of an entry is what to call
        self._children: dict[str, ChildProcess] = {}
        self._info: Info = {}
        self._serving = False
        self._signals: list[int] = []
        self._drained: set[str] = set()  # the processes that have no open request any more
        self._drain_end: float | None = None  # when what is still open is ended
        self._verdict: tuple[int, str] | None = None  # exit code and reason, once decided
        self._node: Node
        self._restarts: Restarts

    def run(self) -> int:
        """Serves until a signal or a failure; the exit code. Runs in the main thread only. Raises
        ConfigError when a child finds that the configuration cannot work."""
        _raise_descriptor_limit(self._args.max_connections)
        health_port = self._open_health_port()
        wake = on_signals(self._signals.append, signal.SIGTERM, signal.SIGINT)
        self._on_readable(wake.fileno(), lambda: wake.recv(64))
        with private_directory() as directory:
            generations: dict[str, int] = {}
            self._node = Node(
                process=process_id(SUPERVISOR),
                topology=self._topology,
                directory=Path(directory),
                token=secrets.token_bytes(TOKEN_BYTES),
                generations=generations,
            )
            self._restarts = Restarts(self._node, generations)
            try:
                for process in self._topology.processes:
                    self._start(process)
                self._listener.close()  # an API that dies must not leave clients in its backlog
                while self._verdict is None:
                    self._dispatch(self._next_look())
                    self._look()
                return self._end(*self._verdict)
            finally:
                for child in self._children.values():
                    child.close()
                if health_port is not None:
                    health_port.close()

    def _open_health_port(self) -> HealthPort | None:
        if self._args.health_port is None:
            return None
        port = HealthPort(
            self._args.host,
            self._args.health_port,
            url=self._url,
            health=self._heartbeats.stale,
            ready=self._why_not_ready,
            metrics_need_key=self._args.metrics_api_key is not None,
        )
        log.info("health, readiness and metrics on port %d", port.port)
        return port

    def _why_not_ready(self) -> str | None:
        if not self._serving or self._verdict is not None:
            return "not serving"
        drains = self._numbers.drained_from or self._drain_end is not None
        return "draining" if drains else None

    def _serves_http(self, process: str) -> bool:
        return self._topology.role(process).serves_http

    def _start(self, process: str) -> None:
        serves_http = self._serves_http(process)
        launch = Launch(
            process=process,
            roles=self._roles,
            args=self._args,
            directory=str(self._node.directory),
            token=self._node.token,
            parent=os.getpid(),
            heartbeat_fd=self._heartbeats.descriptor,
            generations=dict(self._node.generations),
            listen_fd=self._listener.fileno() if serves_http else None,
            numbers_fd=self._numbers_fd if serves_http else None,
            keys=self._keys,
            keys_digest=self._keys_digest,
        )
        child = ChildProcess(launch, self._topology.label(process))
        self._children[process] = child
        self._on_readable(child.status, lambda: self._read_reports(child))
        self._on_readable(child.exit_descriptor, lambda: self._child_exited(child))

    def _tell_http(self, command: bytes) -> None:
        """Sends a command to the processes that serve HTTP."""
        for process in self._http:
            self._children[process].write(command)

    def _on_readable(self, descriptor: int, handler: Callable[[], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, handler)

    def _dispatch(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            if self._selector.get_map().get(key.fd) is key:  # an earlier one may have ended it
                key.data()

    def _decide(self, code: int, reason: str) -> None:
        if self._verdict is None:
            self._verdict = (code, reason)

    def _look(self) -> None:
        """Decides to end on a signal, or if steps or processes stand still."""
        self._heartbeats.beat(process_id(SUPERVISOR))
        if self._signals:
            self._follow_signals()
        # Before the instance serves too: ranks would wait an hour for one that is stopped.
        for child in self._children.values():
            self._heartbeats.note_stopped(child.process, is_stopped(child.pid))
        limit = self._args.step_timeout
        stale = self._heartbeats.stale(limit)
        if self._heartbeats.step_seconds > limit:
            self._decide(EXIT_HANG, f"no step was completed in {limit:g} s (--step-timeout)")
        elif stale is not None:
            self._silent(self._children[stale], limit)

    def _follow_signals(self) -> None:
        """SIGTERM lets open requests end first; SIGINT, or a second signal, does not."""
        if not self._serving or len(self._signals) > 1 or self._signals[0] != signal.SIGTERM:
            self._decide(EXIT_CLEAN, f"{signal.Signals(self._signals[-1]).name}: shutting down")
        elif self._drain_end is None:
            seconds = self._args.drain_delay + self._args.drain_timeout
            self._drain_end = time.monotonic() + seconds
            log.info("SIGTERM: open requests have %g s to end", seconds)
            self._tell_http(b"drain")
        elif time.monotonic() >= self._drain_end:
            self._decide(EXIT_CLEAN, "shutting down; requests that are still open end now")

    def _next_look(self) -> float:
        """Seconds until there is something to look at."""
        if self._drain_end is None:
            return _TICK
        return max(0.0, min(_TICK, self._drain_end - time.monotonic()))

    def _silent(self, child: ChildProcess, limit: float) -> None:
        reason = f"the {child.label} process has been silent for {limit:g} s"
        if not self._topology.role(child.process).restartable:
            self._decide(EXIT_HANG, reason)
            return
        log.error("%s and is killed", reason)
        self._heartbeats.clear(child.process)
        self._dump_stacks(child)
        os.kill(child.pid, signal.SIGKILL)

    # Reports and exits --------------------------------------------------------------------

    def _read_reports(self, child: ChildProcess) -> None:
        data = os.read(child.status, 1 << 16)
        if not data:
            self._selector.unregister(child.status)
        *lines, child.unread = (child.unread + data).split(b"\n")
        for line in lines:
            event, message, info = msgspec.json.decode(line)
            if event == "ready":
                self._child_ready(child, info)
            elif event == "serving":
                child.serving = True
                self._child_serves()
            elif event == "drained":
                self._drained.add(child.process)
                if self._drained.issuperset(self._http):
                    self._decide(EXIT_CLEAN, "shutting down: no request is open")
            elif event == "config" and not self._serving:
                raise ConfigError(message)
            else:
                child.reason = message

    def _child_ready(self, child: ChildProcess, info: Info) -> None:
        child.ready = True
        if self._serving:
            log.info("the %s process is back", child.label)
            with self._link_errors_fatal():
                self._restarts.started(child.process, self._listeners(child))
            return
        self._info |= info
        if all(child.ready for child in self._children.values()):
            self._tell_http(b"ready " + msgspec.json.encode(self._info))

    def _child_serves(self) -> None:
        """The instance serves when all processes that take requests do."""
        if all(self._children[process].serving for process in self._http):
            self._serving = True
            self._on_serving(self._url, self._info)
            log.info("ready: %s", self._url)

    def _child_exited(self, child: ChildProcess) -> None:
        self._selector.unregister(child.exit_descriptor)
        if child.status in self._selector.get_map():
            self._read_reports(child)  # its last words
        child.running = False
        restartable = self._topology.role(child.process).restartable
        if restartable and self._serving and self._verdict is None:
            self._restart(child)
        else:
            self._decide(EXIT_INTERNAL, child.exit_text())

    def _restart(self, child: ChildProcess) -> None:
        """Starts the next generation of a process that has died, unless it dies too often."""
        if child.status in self._selector.get_map():
            self._selector.unregister(child.status)
        how = child.exit_text()
        child.close()
        self._heartbeats.clear(child.process)
        with self._link_errors_fatal():
            if self._restarts.died(child.process, self._listeners(child)):
                log.error("%s; it is started again", how)
                self._start(child.process)
            else:
                often = f"{MAX_DEATHS} deaths within {DEATH_WINDOW:g} s"
                log.error("%s; after %s it is not started again", how, often)

    def _listeners(self, child: ChildProcess) -> set[str]:
        """The other processes that take messages."""
        return {
            other.process
            for other in self._children.values()
            if other.running and other.ready and other is not child
        }

    @contextmanager
    def _link_errors_fatal(self) -> Iterator[None]:
        """A process that takes no message from the supervisor ends the instance."""
        try:
            yield
        except LinkError as error:
            self._decide(EXIT_INTERNAL, str(error))

    # The end ------------------------------------------------------------------------------

    def _end(self, code: int, reason: str) -> int:
        """Open requests get their error, children a moment to end unless a further signal comes.
        The exit code."""
        signals = len(self._signals)
        log.log(logging.INFO if code == EXIT_CLEAN else logging.ERROR, "%s", reason)
        if not self._serving:
            return code
        running = [child for child in self._children.values() if child.running]
        if code == EXIT_HANG:
            for child in running:
                self._dump_stacks(child)
        self._tell_http(b"stop" if code == EXIT_CLEAN else f"fail {reason}".encode())
        start = time.monotonic()
        while running:
            self._ask_to_end(running, one_by_one=code == EXIT_CLEAN)
            ends = {child.process: start + self._grace(child, code) for child in running}
            self._dispatch(max(0.0, min(ends.values()) - time.monotonic()))
            if len(self._signals) > signals:
                return 128 + self._signals[-1]
            running = [child for child in running if child.running]
            now = time.monotonic()
            late = [child for child in running if now >= ends[child.process]]
            for child in late:  # whoever is left when all others have ended is killed
                log.error("the %s process does not end by itself and is killed", child.label)
            running = [child for child in running if child not in late]
        return code

    def _grace(self, child: ChildProcess, code: int) -> float:
        is_heard = self._serves_http(child.process)
        return _GRACE if is_heard or code == EXIT_CLEAN else _ENGINE_GRACE

    def _ask_to_end(self, running: list[ChildProcess], *, one_by_one: bool) -> None:
        """Asks processes to end. One by one: those that were started last first, so that who sends
        ends before who receives; after a death nothing is worth waiting for."""
        for child in reversed(running):
            if not self._serves_http(child.process):
                child.ask_to_end()
                if one_by_one:
                    return

    def _dump_stacks(self, child: ChildProcess) -> None:
        for pid in family(child.pid):  # tensor-parallel workers too
            with suppress(ProcessLookupError):
                os.kill(pid, DUMP_SIGNAL)
                time.sleep(_DUMP_TIME)  # for its stacks, before those of the next


def _raise_descriptor_limit(connections: int) -> None:
    """Lets this process and those that it starts open as many files as the system allows it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most != resource.RLIM_INFINITY and most < connections + _OTHER_FILES:
        log.warning(
            "the limit of open files is %d (ulimit -Hn): fewer than --max-connections %d fit",
            most,
            connections,
        )
