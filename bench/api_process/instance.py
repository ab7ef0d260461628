"""The instance that is measured: `radix serve` with a process in the scheduler's place that gives
every stream a token at each tick. All of it runs on the checkout that is measured."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

WORK = "RADIX_BENCH_WORK"  # the variable of the environment that says what to do, as JSON
WARM_TICKS = 20  # before those that are measured, and about as many behind them
TEXT = (
    "The harbour was quiet in the early morning. A few boats lay at the pier, and the smell of "
    "tar and salt hung over the water while the first gulls came in from the open sea. "
)

Figures = dict[str, float]


def main() -> None:
    """An instance with `serve` below in place of the scheduler; prints its port."""
    from radix_runtime.config import ServerArgs
    from radix_runtime.hub import DEMO_MODEL_DIR
    from radix_runtime.processes import roles as roles_module
    from radix_runtime.processes.supervisor import Supervisor
    from radix_runtime.server.listener import bind_port

    work = json.loads(os.environ[WORK])
    args = ServerArgs(
        model_path=str(DEMO_MODEL_DIR),
        port=0,
        max_running_requests=work["streams"],
        **_several(work["processes"]),
    )
    args.validate()
    served: Any = roles_module.ROLES
    if work["processes"] > 1:
        served = roles_module.serving_roles(work["processes"])
    roles = []
    for role in served:
        if role.name == roles_module.SCHEDULER:
            role = type(role)(
                name=role.name,
                module="bench.api_process.instance",
                sends=role.sends,
                instances=role.instances,
            )
        roles.append(role)
    listener = bind_port(args.host, args.port)

    def announce(url: str, info: object) -> None:
        print(listener_port, flush=True)

    listener_port = listener.getsockname()[1]
    with listener:
        sys.exit(Supervisor(args, listener, on_serving=announce, roles=roles).run())


def _several(processes: int) -> dict[str, Any]:
    """The setting of so many API processes; none for one, which older checkouts have too."""
    return {} if processes == 1 else {"api_processes": processes}


def serve(child: Any) -> None:
    """The process in the scheduler's place."""
    from radix_runtime.text.tokenizer import served_tokenizer

    inbox, outbox = child.connect()
    tokenizer = served_tokenizer(child.args)
    assert tokenizer is not None
    text = tokenizer.encode(TEXT, add_special_tokens=False)
    clock = Clock(work=json.loads(os.environ[WORK]), outbox=outbox, text=text)
    outbox.wait_connected()
    child.report(
        "ready",
        info={
            "max_total_num_tokens": 1 << 24,
            "max_context": 1 << 20,
            "max_running_requests": child.args.max_running_requests,
        },
    )
    while not child.should_stop():
        child.beat()
        inbox.wait(clock.patience())
        for message in inbox.receive():
            clock.take(message)
        clock.tick()


class Clock:
    """Gives each stream its next token at each tick, once all of them have had their first."""

    def __init__(self, work: dict[str, Any], outbox: Any, text: list[int]) -> None:
        self._streams: int = work["streams"]
        self._ticks: int = work["ticks"]
        self._seconds: float = work["seconds"]
        self._file = Path(work["file"])
        self._outbox = outbox
        self._text = text
        self._open: dict[int, list[Any]] = {}  # request and tokens sent, by stream
        self._made = 0
        self._due = 0.0
        self._run = 0  # ticks so far
        self._before: list[Figures] = []

    def patience(self) -> float:
        """Seconds until the next tick."""
        return max(0.0, self._due - time.monotonic()) if self._is_running() else 1.0

    def _is_running(self) -> bool:
        return self._made == self._streams and bool(self._open)

    def take(self, message: Any) -> None:
        """A new request, or the end of all that runs."""
        from radix_runtime import messages as m

        if isinstance(message, m.Generate):
            self._begin(message)
        elif isinstance(message, m.Control):
            raise SystemExit(f"the bench answers no {message.op}")

    def _begin(self, request: Any) -> None:
        from radix_runtime import messages as m

        is_alone = request.sampling.max_new_tokens == 1  # the server's warm-up
        first = m.TokenDelta(
            rid=request.rid,
            choice=0,
            ids=m.pack_ids(self._text[:1]),
            finish=m.FinishReason("length") if is_alone else None,
            completion_tokens=1,
            queue_seconds=0.001,
            stream=None if is_alone else self._made,
            sampling=request.sampling,
            input_ids=request.input_ids[-4 * m.CONTEXT_TOKENS :],
            **_origin(request),
        )
        self._outbox.send(m.TokenBatch([first]))
        if not is_alone:
            self._open[self._made] = [request, 1]
            self._made += 1

    def tick(self) -> None:
        """The next token of each stream, if it is time."""
        from radix_runtime import messages as m

        if not self._is_running() or time.monotonic() < self._due:
            return
        self._due = max(self._due + self._seconds, time.monotonic())
        self._note()
        going = []
        ends = []
        for stream, entry in list(self._open.items()):
            request, sent = entry
            entry[1] += 1
            if sent + 1 == request.sampling.max_new_tokens:
                del self._open[stream]
                ends.append(self._last(request, sent))
            else:
                going.append((stream, self._text[sent % len(self._text)]))
        tokens = None
        if going:
            streams, ids = np.array(going).T
            tokens = m.StreamTokens.pack(streams, np.ones(len(going), np.int32), ids)
        self._outbox.send(m.TokenBatch(ends, tokens))

    def _last(self, request: Any, sent: int) -> Any:
        from radix_runtime import messages as m

        return m.TokenDelta(
            rid=request.rid,
            choice=0,
            ids=m.pack_ids([self._text[sent % len(self._text)]]),
            finish=m.FinishReason("length"),
            completion_tokens=sent + 1,
        )

    def _note(self) -> None:
        """Takes the CPU time at both ends of what is measured."""
        self._run += 1
        if self._run == WARM_TICKS:
            self._before = _all_api_processes()
        elif self._run == WARM_TICKS + self._ticks:
            after = _all_api_processes()
            spent = [
                {name: now[name] - then[name] for name in now}
                for now, then in zip(after, self._before, strict=True)
            ]
            self._file.write_text(json.dumps(spent))


def _origin(request: Any) -> dict[str, Any]:
    """Which API process has sent a request; older checkouts have but one."""
    number = getattr(request, "api", 0)
    return {"api": number} if number else {}


def _all_api_processes() -> list[Figures]:
    """CPU time of each API process among the children of our parent."""
    parent = os.getppid()
    found = []
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"radix: api" in Path(f"/proc/{child}/cmdline").read_bytes():
            found.append(cpu_seconds(int(child)))
    return found


def cpu_seconds(pid: int) -> Figures:
    """CPU time of a process: of all threads, of the first one, and of all in system calls."""
    threads = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        threads[int(path.name)] = int((path / "schedstat").read_text().split()[0]) / 1e9
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {
        "process": sum(threads.values()),
        "loop": threads[pid],
        "kernel": int(stat[12]) / os.sysconf("SC_CLK_TCK"),
    }


if __name__ == "__main__":
    main()
