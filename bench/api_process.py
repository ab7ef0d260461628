"""`python -m bench.api_process`: what a streamed token costs the API process of a server.

    python -m bench.api_process                         # chat completions, 256 streams
    python -m bench.api_process --against ../before     # beside another checkout, in turns
    python -m bench.api_process --routes chat completions generate --json out.json

Supervisor, API process and detokenizer are those of `radix serve`. In place of the scheduler a
process gives every stream one token of English text at each tick. A client that only counts events
reads the streams. When all of them run, CPU time of the API process is taken over some hundred
ticks, all of its threads included:

    process     microseconds of all threads a token
    loop        of these the event loop's thread
    kernel      of all threads, in system calls: sending is most of it
    events      a token; below 1 the API process, or the machine, could not keep up: raise --tick-ms
    write only  the loop's thread where it writes the same events ready-made and does nothing else:
                what the kernel takes for one send a token

Each figure is the median of the rounds. With --against the checkouts take turns, and each figure is
followed by the other's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import uvloop

ROOT = Path(__file__).resolve().parents[1]
WARM_TICKS = 20  # before those that are measured, and about as many behind them
TEXT = (
    "The harbour was quiet in the early morning. A few boats lay at the pier, and the smell of "
    "tar and salt hung over the water while the first gulls came in from the open sea. "
)
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
Figures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.api_process", description=__doc__)
    parser.add_argument("--routes", nargs="+", choices=sorted(PATHS), default=["chat"])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--ticks", type=int, default=200, help="that are measured")
    parser.add_argument("--tick-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--json", type=Path, help="where the figures go too")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        _serve_instance(json.loads(args.serve))
        return
    checkouts = [ROOT] if args.against is None else [ROOT, args.against.resolve()]
    found = {route: _measure(route, args, checkouts) for route in args.routes}
    print("\n".join(_table(found)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


# Parent and client ----------------------------------------------------------------------------


def _measure(route: str, args: argparse.Namespace, checkouts: list[Path]) -> list[Figures]:
    """The medians of each checkout."""
    runs: list[list[Figures]] = [[] for _ in checkouts]
    for _ in range(args.rounds):
        for checkout, found in zip(checkouts, runs, strict=True):
            found.append(_run(route, args, checkout))
    medians = []
    for found in runs:
        medians.append({name: statistics.median(run[name] for run in found) for name in found[0]})
    print(f"{route}: done", file=sys.stderr)
    return medians


def _run(route: str, args: argparse.Namespace, checkout: Path) -> Figures:
    """One server of a checkout and one client."""
    paths = [checkout / "runtime", checkout / "kernel" / "python", ROOT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with tempfile.TemporaryDirectory() as folder:
        work = {
            "streams": args.streams,
            "ticks": args.ticks,
            "seconds": args.tick_ms / 1e3,
            "file": str(Path(folder) / "figures.json"),
        }
        environment["RADIX_BENCH_WORK"] = json.dumps(work)
        command = [sys.executable, "-m", "bench.api_process", "--serve", json.dumps(work)]
        server = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            client = Client(route, streams=args.streams, tokens=_tokens(work))
            events, piece = uvloop.run(client.run(port))
            cpu = json.loads(Path(work["file"]).read_text())
        finally:
            server.terminate()
            server.wait()
    tokens = args.streams * args.ticks
    return {
        "process": 1e6 * cpu["process"] / tokens,
        "loop": 1e6 * cpu["loop"] / tokens,
        "kernel": 1e6 * cpu["kernel"] / tokens,
        "events": events / (args.streams * _tokens(work)),
        "write only": 1e6 * uvloop.run(_write_only(piece, args)),
    }


def _tokens(work: dict[str, Any]) -> int:
    """Of each answer; some are not measured."""
    return int(work["ticks"]) + 2 * WARM_TICKS


class Client:
    """Counts the events of answers."""

    def __init__(self, route: str, streams: int, tokens: int) -> None:
        self._path = PATHS[route]
        self._streams = streams
        self._body = _body(route, tokens)

    async def run(self, port: int) -> tuple[int, int]:
        """All answers: how many events they had, and the bytes of a usual one."""
        counts = await asyncio.gather(*(self._answer(port) for _ in range(self._streams)))
        return sum(count for count, _ in counts), counts[0][1]

    async def _answer(self, port: int) -> tuple[int, int]:
        body = json.dumps(self._body).encode()
        head = f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        done: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: _Reader(done), "127.0.0.1", port
        )
        transport.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            return await done
        finally:
            transport.close()


class _Reader(asyncio.Protocol):
    """Counts events up to the end of a chunked answer."""

    def __init__(self, done: asyncio.Future[tuple[int, int]]) -> None:
        self._done = done
        self._events = 0
        self._sizes: list[int] = []
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        self._events += data.count(b"data: {")
        self._sizes.append(len(data))
        self._tail = (self._tail + data)[-5:]
        if self._tail == b"0\r\n\r\n" and not self._done.done():
            self._done.set_result((self._events, int(statistics.median(self._sizes))))

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(error or ConnectionError("the answer has no end"))


def _body(route: str, tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "ignore_eos": True}
    message = [{"role": "user", "content": "Tell me of the sea."}]
    return {
        "chat": {"messages": message, "max_tokens": tokens, "stream": True, **sampling},
        "completions": {"prompt": "The sea", "max_tokens": tokens, "stream": True, **sampling},
        "generate": {
            "text": "The sea",
            "stream": True,
            "incremental_streaming_output": True,
            "sampling_params": {"max_new_tokens": tokens, **sampling},
        },
        "messages": {
            "model": "default",
            "messages": message,
            "max_tokens": tokens,
            "stream": True,
            "temperature": 0.0,
        },
        "responses": {
            "input": "Tell me of the sea.",
            "max_output_tokens": tokens,
            "stream": True,
            "temperature": 0.0,
        },
    }[route]


async def _write_only(size: int, args: argparse.Namespace) -> float:
    """Seconds of this thread for a write of so many bytes to one of many connections, whose other
    ends a process reads."""
    piece = b"x" * size
    accepted: list[asyncio.Transport] = []

    class Writer(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.append(cast(asyncio.Transport, transport))

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Writer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _DRAIN, str(port), str(args.streams))
    )
    while len(accepted) < args.streams:
        await asyncio.sleep(0.01)
    began = time.thread_time()
    for _ in range(args.ticks):
        for transport in accepted:
            transport.write(piece)
        await asyncio.sleep(args.tick_ms / 1e3)  # the loop sends when it has its turn
    spent = time.thread_time() - began
    reader.kill()
    await reader.wait()
    return spent / (args.ticks * args.streams)


_DRAIN = """
import asyncio, sys, uvloop

async def main():
    connect = asyncio.get_running_loop().create_connection
    for _ in range(int(sys.argv[2])):
        await connect(asyncio.Protocol, "127.0.0.1", int(sys.argv[1]))
    await asyncio.sleep(3600)

uvloop.run(main())
"""


def _table(found: dict[str, list[Figures]]) -> Iterator[str]:
    """The figures in Markdown."""
    for number, (route, sides) in enumerate(found.items()):
        if number == 0:
            yield "| route | " + " | ".join(sides[0]) + " |"
            yield "|---|" + " --: |" * len(sides[0])
        cells = [" / ".join(f"{side[name]:.2f}" for side in sides) for name in sides[0]]
        yield f"| {route} | " + " | ".join(cells) + " |"


# Server: everything below runs on the checkout that is measured ---------------------------------


def _serve_instance(work: dict[str, Any]) -> None:
    """An instance with `serve` below in place of the scheduler; prints its port."""
    from radix_runtime.config import ServerArgs
    from radix_runtime.hub import DEMO_MODEL_DIR
    from radix_runtime.processes.roles import ROLES, SCHEDULER
    from radix_runtime.processes.supervisor import Supervisor
    from radix_runtime.server.listener import bind_port

    args = ServerArgs(
        model_path=str(DEMO_MODEL_DIR),
        port=0,
        max_running_requests=work["streams"],
    )
    args.validate()
    roles = []
    for role in ROLES:
        if role.name == SCHEDULER:
            role = type(role)(
                name=role.name,
                module="bench.api_process",
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


def serve(child: Any) -> None:
    """The process in the scheduler's place."""
    from radix_runtime.text.tokenizer import served_tokenizer

    inbox, outbox = child.connect()
    ids = served_tokenizer(child.args).encode(TEXT, add_special_tokens=False)
    clock = Clock(json.loads(os.environ["RADIX_BENCH_WORK"]), outbox, ids)
    outbox.wait_connected()
    child.report(
        "ready",
        info={
            "max_total_num_tokens": 1 << 24,
            "max_context": 2048,
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
        self._before: Figures = {}

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
            self._before = cpu_seconds(_api_process())
        elif self._run == WARM_TICKS + self._ticks:
            after = cpu_seconds(_api_process())
            spent = {name: after[name] - self._before[name] for name in after}
            self._file.write_text(json.dumps(spent))


def _api_process() -> int:
    """The API process among the children of our parent."""
    parent = os.getppid()
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"radix: api" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise SystemExit("there is no API process")


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
