"""Compilers: tries a grammar in a process that may be killed, before anybody depends on it."""

from concurrent.futures import Future
from dataclasses import dataclass

from ..constraint import Constraint
from ..errors import RequestError
from .child import GrammarChild, unavailable
from .frames import Accepted, Compile, Frame, Hello, Refused

_REMEMBERED = 4_096  # outcomes
_MAX_TRIES = 2  # times that the process may die over a grammar
_CRASH = RequestError(
    status=400, code="grammar_too_complex", message="the grammar is too complex to be compiled"
)


@dataclass(slots=True)
class _Job:
    constraint: Constraint
    outcome: Future[list[str]]
    deaths: int = 0


class Compilers(GrammarChild):
    """Compiles grammars for their verdict alone. Thread-safe; remembers what it was."""

    def __init__(self, hello: Hello) -> None:
        super().__init__("radix_runtime.grammar.compiler_process", "radix: grammar compiler", hello)
        self._jobs: dict[int, _Job] = {}
        self._by_key: dict[bytes, Future[list[str]]] = {}
        self._number = 0

    def compile(self, constraint: Constraint) -> Future[list[str]]:
        """The warnings for the client; the future raises RequestError for a grammar that is
        refused. Equal constraints share it. Raises RequestError 503."""
        key = constraint.key
        with self._lock:
            known = self._by_key.get(key)
            if known is not None:
                self._by_key[key] = self._by_key.pop(key)  # the newest of all
                return known
            self.begin()
            self._number += 1
            outcome: Future[list[str]] = Future()
            self._jobs[self._number] = _Job(constraint, outcome)
            self._by_key[key] = outcome
            if len(self._by_key) > _REMEMBERED:
                del self._by_key[next(iter(self._by_key))]
            self._send(Compile(self._number, constraint))
            return outcome

    def _replay(self) -> None:
        for number, job in self._jobs.items():
            self._send(Compile(number, job.constraint))

    def _take(self, frame: Frame) -> None:
        assert isinstance(frame, Accepted | Refused)
        job = self._jobs.pop(frame.job)
        if isinstance(frame, Accepted):
            job.outcome.set_result(frame.warnings)
        else:
            job.outcome.set_exception(frame.to_error())

    def _lost(self) -> None:
        for number, job in list(self._jobs.items()):
            job.deaths += 1
            if job.deaths >= _MAX_TRIES:
                self._jobs.pop(number).outcome.set_exception(_CRASH)

    def _give_up(self) -> None:
        for job in self._jobs.values():
            self._by_key.pop(job.constraint.key, None)  # to be tried again
            job.outcome.set_exception(unavailable())
        self._jobs.clear()

    def _tick(self) -> None:
        """The process enforces its own limits."""
