"""One process of a load generator: sends requests when they are due, over connections of its own,
and notes when each piece of each answer came.

Reads sockets itself (`http_stream`): a client that spends more on an event than the server would
measure itself.
"""

import asyncio
import gc
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import uvloop

from .figures import Record
from .http_stream import EventReader, HttpAnswer
from .load_backends import Backend, StreamReader, error_text
from .raw_client import Target
from .workload import Item

_CONNECT_SECONDS = 30


@dataclass(frozen=True, slots=True)
class Job:
    """What one process sends. `due`: seconds after the start, of each item; `concurrency`: how many
    requests may be open, 0 for all."""

    target: Target
    backend: Backend
    items: list[Item]
    due: list[float]
    concurrency: int


@dataclass(frozen=True, slots=True)
class Report:
    """A record of each item of a job, in their order, and the share of a core that sending and
    reading them took."""

    records: list[Record]
    cpu_share: float


def run_job(pipe: Any, job: Job) -> None:
    """The body of the process. `pipe` takes "ready", gives the start (time.perf_counter), then
    takes how many requests are done, now and then, and a Report at the end."""
    calls = [_request(job, item) for item in job.items]
    gc.collect()
    gc.disable()  # a pause would be noted as a late token
    pipe.send("ready")
    start = pipe.recv()
    cpu = time.process_time()
    client = _LoadClient(job, calls=calls, start=start)
    records = uvloop.run(client.run(pipe.send))
    seconds = time.perf_counter() - start
    pipe.send(Report(records, (time.process_time() - cpu) / max(seconds, 1e-9)))


def _request(job: Job, item: Item) -> bytes:
    backend = job.backend
    return job.target.request("POST", backend.path, backend.body(item), accept="text/event-stream")


class _LoadClient:
    """Runs a job on an event loop."""

    def __init__(self, job: Job, calls: list[bytes], start: float) -> None:
        self._job = job
        self._calls = calls
        self._start = start
        self._idle: list[_Connection] = []
        self._slots = asyncio.Semaphore(job.concurrency or max(1, len(job.items)))
        self._tls = ssl.create_default_context() if job.target.is_tls else None

    async def run(self, news: Callable[[int], None]) -> list[Record]:
        tasks = [asyncio.ensure_future(self._request(number)) for number in range(len(self._calls))]
        done: set[asyncio.Task[Record]] = set()
        while len(done) < len(tasks):
            await asyncio.wait([task for task in tasks if task not in done], timeout=0.2)
            done = {task for task in tasks if task.done()}
            news(len(done))
        return [task.result() for task in tasks]

    async def _request(self, number: int) -> Record:
        await asyncio.sleep(self._start + self._job.due[number] - time.perf_counter())
        async with self._slots:
            item = self._job.items[number]
            record = Record(prompt_tokens=len(item.prompt), start=time.perf_counter())
            record.output_tokens = item.output_len
            try:
                await self._exchange(self._calls[number], record)
            except (OSError, ValueError, asyncio.TimeoutError) as error:
                record.error = f"unreachable: {error or type(error).__name__}"
            return record

    async def _exchange(self, call: bytes, record: Record) -> None:
        connection = self._idle_connection() or await self._connect()
        await connection.exchange(call, record)
        if connection.is_open:
            self._idle.append(connection)

    def _idle_connection(self) -> "_Connection | None":
        """One that the server has not closed meanwhile; None: there is none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> "_Connection":
        target = self._job.target
        opening = asyncio.get_running_loop().create_connection(
            lambda: _Connection(self._job.backend), target.host, target.port, ssl=self._tls
        )
        _, connection = await asyncio.wait_for(opening, _CONNECT_SECONDS)
        return connection


class _Connection(asyncio.Protocol):
    """A connection on which one answer after the other is read."""

    def __init__(self, backend: Backend) -> None:
        self.is_open = False
        self._backend = backend
        self._transport: asyncio.Transport
        self._answer = HttpAnswer()
        self._events = EventReader()
        self._error_body = b""
        self._record: Record | None = None
        self._reader: StreamReader
        self._ended: asyncio.Future[None]

    async def exchange(self, call: bytes, record: Record) -> None:
        """Sends a request and fills the record with its answer. Raises OSError, ValueError."""
        self._answer = HttpAnswer()
        self._events = EventReader()
        self._error_body = b""
        self._record = record
        self._reader = StreamReader(self._backend, record)
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(call)
        await self._ended

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._record is None:  # bytes that nobody has asked for
            self._close()
            return
        try:
            body = self._answer.feed(data)
        except ValueError as error:
            self._fail(error)
            return
        if self._answer.status == 200:
            if body:
                self._reader.take(self._events.feed(body), now)
        else:
            self._error_body += body
        if self._answer.is_complete:
            self._finish(now)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._record is None:
            return
        try:
            self._answer.end()
        except ValueError as broken:
            self._fail(error or broken)
            return
        self._finish(time.perf_counter())

    def _finish(self, now: float) -> None:
        record = self._record
        assert record is not None
        self._record = None
        record.end = now
        if self._answer.status == 200:
            self._reader.finish()
        else:
            record.error = self._refusal()
        if not self._answer.keeps_alive:
            self._close()
        self._ended.set_result(None)

    def _refusal(self) -> str:
        try:
            return error_text(json.loads(self._error_body))
        except ValueError:  # not of this server, but of something before it
            return f"unknown: the server answered with status {self._answer.status}"

    def _fail(self, error: Exception) -> None:
        self._record = None
        self._close()
        self._ended.set_exception(error)

    def _close(self) -> None:
        self.is_open = False
        self._transport.close()


def split(job: Job, parts: int) -> list[Job]:
    """`job` cut into so many for as many processes, or fewer where it is small: every part has
    requests, and at least one of the slots."""
    most = min(parts, len(job.items), job.concurrency or len(job.items))
    jobs = []
    for part in range(most):
        concurrency = 0
        if job.concurrency:
            concurrency = len(range(part, job.concurrency, most))
        piece = replace(
            job, items=job.items[part::most], due=job.due[part::most], concurrency=concurrency
        )
        jobs.append(piece)
    return jobs
