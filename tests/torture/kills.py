"""Processes that are killed, stopped or signalled, in each phase of their life."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx

from tests.runtime.server_process import Call, Server, start_load

ERROR_SECONDS = 2.0  # until the last open request has its error
EXIT_SECONDS = 5.0  # until every process has gone
STEP_TIMEOUT = 3
LONG_PROMPT = "the quick brown fox " * 250  # 1,750 tokens
ROLES: dict[int, tuple[str, ...]] = {
    1: ("supervisor", "radix: api", "radix: scheduler", "radix: detokenizer")
}
# With two ranks there are two API processes too.
ROLES[2] = ("supervisor", "radix: api/1", "radix: scheduler", "radix: rank 1")
ROLES[4] = ("radix: rank 2",)
Case = tuple[str, int, str, str]  # name, ranks, role or signals, phase
PHASES = ("idle", "prefill", "decode")


@dataclass
class Row:
    """What was seen of one role in one phase; seconds."""

    name: str
    errors: list[float] = field(default_factory=list)
    exits: list[float] = field(default_factory=list)
    codes: set[int] = field(default_factory=set)
    clients: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        """A row of the table."""
        codes = " ".join(str(code) for code in sorted(self.codes))
        clients = ", ".join(f"{name} {count}" for name, count in sorted(self.clients.items()))
        cells = (str(len(self.exits)), _spread(self.errors), _spread(self.exits), codes, clients)
        return f"| {self.name} | {' | '.join(cells)} |"


def _spread(times: list[float]) -> str:
    if not times:
        return "-"
    return f"{min(times):.2f}/{statistics.median(times):.2f}/{max(times):.2f}"


def print_table(rows: list[Row]) -> None:
    print("| process, phase | runs | last error, s | all gone, s | code | clients saw |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(row.line())


def load(server: Server, phase: str) -> list[Call]:
    """Open requests as the phase has them; in `prefill` most of them wait for their prompts."""
    if phase == "idle":
        return []
    if phase == "decode":
        return start_load(server, 8, 4)
    prompts = [f"{i}: {LONG_PROMPT}" for i in range(40)]
    calls = [Call(server.url, i % 2 == 0, tokens=4, prompt=text) for i, text in enumerate(prompts)]
    deadline = time.monotonic() + 60
    while open_requests(server) < 30:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return calls


def open_requests(server: Server) -> int:
    """Requests that the server has taken and not answered."""
    text = httpx.get(f"{server.url}/metrics", timeout=30, verify=False).text
    found = re.search(r"^radix:open_requests\S* (\S+)$", text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def seen(call: Call) -> str:
    if call.broken:
        return "cut"
    if call.code is not None:
        return call.code
    return "whole"


def one_run(row: Row, server: Server, phase: str, act: Callable[[], None], limit: float) -> str:
    """Acts in the phase; what did not hold, or ""."""
    try:
        calls = load(server, phase)
    except AssertionError:
        return f"{row.name}: the load did not start"
    start = time.monotonic()
    act()
    try:
        row.codes.add(server.wait_exit(limit))
    except subprocess.TimeoutExpired:
        return f"{row.name}: still there after {limit:g} s"
    for call in calls:
        call.join(30)
        if call.is_alive():
            return f"{row.name}: a client hangs"
        row.clients[seen(call)] += 1
    if calls:
        row.errors.append(max(call.ended for call in calls) - start)
    try:
        server.assert_nothing_left(EXIT_SECONDS)
    except AssertionError as error:
        return f"{row.name}: something is left: {str(error)[:200]}"
    row.exits.append(time.monotonic() - start)
    return ""


def rounds(
    seconds: float, cases: list[tuple[str, int, str, str]]
) -> Iterator[tuple[str, int, str, str]]:
    """The cases again and again until the time is over, each once at least."""
    end = time.monotonic() + seconds
    first = True
    while first or time.monotonic() < end:
        for case in cases:
            if not first and time.monotonic() >= end:
                return
            yield case
        first = False


def _flags(ranks: int, *more: str) -> list[str]:
    processes = ["--tp-size", str(ranks), "--num-threads", str(ranks)]
    return [*processes, "--api-processes", str(ranks), *more]


def kills(seconds: float) -> list[str]:
    """SIGKILL to each process in each phase."""
    cases = [
        (f"{ranks} ranks, {role.removeprefix('radix: ')}, {phase}", ranks, role, phase)
        for ranks, roles in ROLES.items()
        for role in roles
        for phase in PHASES
    ]
    rows = {case[0]: Row(case[0]) for case in cases}
    broken = []
    for name, ranks, role, phase in rounds(seconds, cases):
        with Server(*_flags(ranks)) as server:
            victim = server.find(role).pid
            fault = one_run(
                rows[name],
                server,
                phase,
                lambda victim=victim: os.kill(victim, signal.SIGKILL),  # type: ignore[misc]
                EXIT_SECONDS,
            )
        broken += [fault] if fault else []
        slow = [time for time in rows[name].errors[-1:] if time > ERROR_SECONDS]
        broken += [f"{name}: the last error came after {time:.1f} s" for time in slow]
    print_table(list(rows.values()))
    return broken


def stops(seconds: float) -> list[str]:
    """SIGSTOP to each process that the supervisor watches, with a short --step-timeout."""
    cases = [
        (f"{ranks} ranks, {role.removeprefix('radix: ')}, {phase}", ranks, role, phase)
        for ranks, roles in ROLES.items()
        for role in roles
        for phase in ("idle", "decode")
        if role != "supervisor"
    ]
    rows = {case[0]: Row(case[0]) for case in cases}
    broken = []
    for name, ranks, role, phase in rounds(seconds, cases):
        with Server(*_flags(ranks, "--step-timeout", str(STEP_TIMEOUT))) as server:
            victim = server.find(role).pid
            fault = one_run(
                rows[name],
                server,
                phase,
                lambda victim=victim: os.kill(victim, signal.SIGSTOP),  # type: ignore[misc]
                STEP_TIMEOUT + 2 + EXIT_SECONDS,
            )
        broken += [fault] if fault else []
        expected = 70 if role.startswith("radix: rank") else 75  # rank 0 misses the others itself
        if rows[name].codes - {expected}:
            broken.append(f"{name}: exit codes {rows[name].codes}")
    print_table(list(rows.values()))
    return broken


def signals(seconds: float) -> list[str]:
    """SIGINT, SIGTERM with a short drain, and SIGTERM twice."""
    cases = [
        (f"{ranks} ranks, {name}, {phase}", ranks, name, phase)
        for ranks in (1, 2)
        for name in ("INT", "TERM", "TERM TERM")
        for phase in PHASES
    ]
    rows = {case[0]: Row(case[0]) for case in cases}
    broken = []
    for name, ranks, sent, phase in rounds(seconds, cases):
        with Server(*_flags(ranks, "--drain-timeout", "1")) as server:

            def send(sent: str = sent, server: Server = server) -> None:
                for word in sent.split():
                    server.process.send_signal(signal.Signals[f"SIG{word}"])
                    time.sleep(0.1)

            fault = one_run(rows[name], server, phase, send, 1 + EXIT_SECONDS)
        broken += [fault] if fault else []
        # A second signal may find the end begun: then it says so, and everything is killed.
        allowed = {0, 128 + signal.SIGTERM} if sent == "TERM TERM" else {0}
        if rows[name].codes - allowed:
            broken.append(f"{name}: exit codes {rows[name].codes}")
        if rows[name].clients["cut"]:
            broken.append(f"{name}: a client was cut off without an error")
    print_table(list(rows.values()))
    return broken
