"""Each bad input beside a stream of another client: what the stream's tokens wait for.

`python -m tests.torture --only neighbours`. Quiet stretches, stretches with the input sent again
and again, and stretches with as many ordinary calls take turns, so that what else the machine does
falls on all three: a bad input should cost a neighbour no more than an ordinary call.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from tests.runtime.server_process import Server
from tests.torture.bad_inputs import CHAT, TEMPLATE, TIMEOUT, BadInput, answer_of, bad_inputs, chat

CONTEXT = 2048  # of the embedded model
_STRETCH = 2.0  # seconds
_PAUSE = 0.02  # between an answer and the next request: one bad client, and no flood


@dataclass
class Row:
    """What was seen of one input; seconds."""

    name: str
    answers: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    ordinary: list[float] = field(default_factory=list)  # beside as many ordinary calls

    def line(self) -> str:
        """A row of the table, in milliseconds."""
        cells = [str(len(self.answers))]
        times = (self.answers, self.quiet, self.beside, self.ordinary)
        cells += [_spread(each) for each in times]
        return f"| {self.name} | {' | '.join(cells)} |"


def _spread(times: list[float]) -> str:
    if len(times) < 2:
        return "-"
    cuts = statistics.quantiles(times, n=100)
    return f"{1e3 * cuts[49]:.1f} / {1e3 * cuts[98]:.1f}"


class Neighbour:
    """Reads one stream after the other; the gaps between two tokens of a stream go to `gaps`."""

    def __init__(self, port: int) -> None:
        self.gaps: list[float] = []
        self.broken = 0
        self._port = port
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(TIMEOUT)

    def _run(self) -> None:
        sampling = {"max_new_tokens": CONTEXT - 16, "ignore_eos": True}
        body = json.dumps({"text": "a", "stream": True, "sampling_params": sampling}).encode()
        while not self._stopping:
            try:
                self._read(_post(self._port, "/generate", body))
            except OSError:
                self.broken += 1

    def _read(self, connection: socket.socket) -> None:
        """To the end of a stream, which the server closes."""
        last = 0.0
        with connection:
            while data := connection.recv(1 << 16):
                now = time.perf_counter()
                if b'"error"' in data:
                    self.broken += 1
                events = data.count(b"data: ")
                if last and events:
                    self.gaps += [(now - last) / events] * events
                last = now if events else last
                if self._stopping:
                    return


def _post(port: int, path: str, body: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def _attack(pipe: Connection, port: int) -> None:
    """A process of its own, so that the reader of the stream is not held up by what it sends:
    answers each (input, seconds) with the times of its answers and what was wrong with them, and
    each (number, seconds) when so many ordinary calls have been spread over that time. A real
    client has a machine of its own, so this one yields the CPU to the server and to the reader."""
    os.nice(19)
    while (order := pipe.recv()) is not None:
        what, seconds = order
        if isinstance(what, BadInput):
            pipe.send(_bad_calls(port, what, seconds))
        else:
            _ordinary_calls(port, what, seconds)
            pipe.send(None)


def _bad_calls(port: int, bad: BadInput, seconds: float) -> tuple[list[float], list[str]]:
    data = bad.raw(f"localhost:{port}")
    times: list[float] = []
    wrong: list[str] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        answer = answer_of(port, data)
        times.append(time.perf_counter() - start)
        if f" {bad.status} ".encode() not in answer[:16] or bad.code.encode() not in answer:
            wrong.append(f"{bad.name}: {answer[:300]!r}")
        if bad.kills_template:  # three in a row, and the template is given up
            _ordinary_call(port)
        time.sleep(_PAUSE)
    return times, wrong


def _ordinary_calls(port: int, count: int, seconds: float) -> None:
    begin = time.monotonic()
    for i in range(count):
        time.sleep(max(0.0, begin + seconds * i / count - time.monotonic()))
        _ordinary_call(port)
    time.sleep(max(0.0, begin + seconds - time.monotonic()))


def _ordinary_call(port: int) -> None:
    with _post(port, CHAT, json.dumps(chat("hello")).encode()) as connection:
        while connection.recv(1 << 16):
            pass


def neighbours(seconds: float) -> list[str]:
    """Prints the table; what was not refused as it should be, and streams that broke."""
    inputs = bad_inputs(CONTEXT)
    rows = {bad.name: Row(bad.name) for bad in inputs}
    broken: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        with Server("--chat-template", str(template)) as server:
            port = int(server.url.rpartition(":")[2])
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            attacker = multiprocessing.get_context("spawn").Process(
                target=_attack, args=(theirs, port), daemon=True
            )
            attacker.start()
            neighbour = Neighbour(port)
            end = time.monotonic() + seconds
            first = True
            while first or time.monotonic() < end:
                for bad in inputs:
                    broken += _turns(bad, rows[bad.name], neighbour, ours)
                first = False
            neighbour.stop()
            ours.send(None)
            attacker.join(TIMEOUT)
            if neighbour.broken:
                broken.append(f"neighbours: {neighbour.broken} broken streams")
    _print_table(rows)
    return broken


def _turns(bad: BadInput, row: Row, neighbour: Neighbour, pipe: Connection) -> list[str]:
    """A quiet stretch, one beside the input, one beside as many ordinary calls."""
    neighbour.gaps = []
    time.sleep(_STRETCH)
    row.quiet += neighbour.gaps
    neighbour.gaps = []
    pipe.send((bad, _STRETCH))
    times, wrong = pipe.recv()
    row.beside += neighbour.gaps
    row.answers += times
    neighbour.gaps = []
    calls = 2 * len(times) if bad.kills_template else len(times)
    pipe.send((calls, _STRETCH))
    pipe.recv()
    row.ordinary += neighbour.gaps
    return list(wrong)


def _print_table(rows: dict[str, Row]) -> None:
    columns = ("sent", "answered in, ms", "neighbour's token, ms", "beside it, ms")
    print(f"| bad input | {' | '.join(columns)} | beside ordinary calls, ms |")
    print("|---|--:|--:|--:|--:|--:|")
    for row in rows.values():
        print(row.line())
    print("\np50 / p99; `answered in` from the first byte sent to the last one read")
