"""The processes of a load generator, started together, and their records put together."""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from ..errors import RequestError
from .figures import Record
from .load_client import Job, Report, run_job, split

_START_DELAY = 0.05  # seconds from the last process's readiness to the first request


def run_load(job: Job, processes: int, on_done: Callable[[int], None]) -> Report:
    """Sends the job from so many processes. The records are in the order of its items; `cpu_share`
    is that of the busiest process. `on_done` hears how many requests are done, now and then. Raises
    RequestError when a process dies."""
    context = multiprocessing.get_context("spawn")  # a fork would copy threads' locks
    jobs = split(job, processes)
    children: list[tuple[BaseProcess, Connection]] = []
    try:
        for part in jobs:
            ours, theirs = context.Pipe()
            child = context.Process(target=run_job, args=(theirs, part), daemon=True)
            child.start()
            theirs.close()
            children.append((child, ours))
        pipes = [pipe for _, pipe in children]
        for pipe in pipes:
            _receive(pipe)
        start = time.perf_counter() + _START_DELAY
        for pipe in pipes:
            pipe.send(start)
        reports = _collect(pipes, on_done)
    finally:
        for process, pipe in children:
            pipe.close()
            process.terminate()
            process.join()
    records: dict[int, Record] = {}
    for number, report in enumerate(reports):
        places = range(number, len(job.items), len(jobs))
        records.update(zip(places, report.records, strict=True))
    return Report(
        records=[records[place] for place in range(len(job.items))],
        cpu_share=max(report.cpu_share for report in reports),
    )


def _collect(pipes: list[Connection], on_done: Callable[[int], None]) -> list[Report]:
    """The reports, in the order of the pipes."""
    done = dict.fromkeys(range(len(pipes)), 0)
    reports: dict[int, Report] = {}
    while len(reports) < len(pipes):
        waiting = [pipe for number, pipe in enumerate(pipes) if number not in reports]
        for pipe in wait(waiting):
            assert isinstance(pipe, Connection)
            number = pipes.index(pipe)
            news = _receive(pipe)
            if isinstance(news, Report):
                reports[number] = news
            else:
                assert isinstance(news, int)
                done[number] = news
                on_done(sum(done.values()))
    return [reports[number] for number in range(len(pipes))]


def _receive(pipe: Connection) -> object:
    try:
        return pipe.recv()
    except EOFError:
        message = "a process of the load generator has died"
        raise RequestError(500, "client_died", message=message) from None
