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
from typing import Any

import uvloop

from .figures import Record
from .http_stream import EventReader
from .load_backends import Backend, StreamReader, error_text
from .raw_client import Target
from .raw_connection import Ending, RawConnection
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
        self._idle: list[RawConnection] = []
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
        reader = _AnswerReader(self._job.backend, record)
        reader.finish(await connection.exchange(call, reader.take))
        if connection.is_open:
            self._idle.append(connection)

    def _idle_connection(self) -> RawConnection | None:
        """One that the server has not closed meanwhile; None: there is none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> RawConnection:
        target = self._job.target
        opening = asyncio.get_running_loop().create_connection(
            RawConnection, target.host, target.port, ssl=self._tls
        )
        _, connection = await asyncio.wait_for(opening, _CONNECT_SECONDS)
        return connection


class _AnswerReader:
    """Fills the record of one request with its answer, piece by piece."""

    def __init__(self, backend: Backend, record: Record) -> None:
        self._record = record
        self._events = EventReader()
        self._reader = StreamReader(backend, record)
        self._error_body = b""

    def take(self, status: int, piece: bytes, now: float) -> None:
        """Some bytes of the body, which came at `now`."""
        if status == 200:
            self._reader.take(self._events.feed(piece), now)
        else:
            self._error_body += piece

    def finish(self, ending: Ending) -> None:
        """The answer has ended, which is the end of the request."""
        self._record.end = ending.time
        if ending.status == 200:
            self._reader.finish()
        else:
            self._record.error = self._refusal(ending.status)

    def _refusal(self, status: int) -> str:
        try:
            return error_text(json.loads(self._error_body))
        except ValueError:  # not of this server, but of something before it
            return f"unknown: the server answered with status {status}"


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
