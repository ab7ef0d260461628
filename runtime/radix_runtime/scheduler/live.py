"""The requests that have not ended, and every way in which one ends."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ..errors import RequestError
from ..messages import FinishReason
from .figures import Counters
from .lifecycle import Lifecycle
from .output import Output
from .request import Request


class StopIds:
    """The ids that end some live request: few of the tokens of a step have to be looked up in the
    request's own set."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._uses = np.zeros(vocab_size + 1, np.int32)
        self._uses[vocab_size] = 1  # stands for all that are no ids

    def add(self, ids: Iterable[int]) -> None:
        """A request begins that each of `ids` ends."""
        self._uses[list(ids)] += 1

    def remove(self, ids: Iterable[int]) -> None:
        """A request with these ids has ended."""
        self._uses[list(ids)] -= 1

    def among(self, tokens: np.ndarray) -> np.ndarray:
        """[n], not 0 for those of `tokens` (int32) that end some request or are not in the
        vocabulary."""
        # As an unsigned number a negative one is beyond the vocabulary.
        return self._uses[np.minimum(tokens.view(np.uint32), self.vocab_size)]


class LiveRequests(Mapping[str, Sequence[Request]]):
    """Request id -> its choices that have not ended; an id without such choices is not there.

    Ending a choice sends its last delta, counts it and hands it to the lifecycle, which keeps its
    row and pages until the last step that contains it has completed. No token is accepted for it
    any more."""

    def __init__(
        self, life: Lifecycle, output: Output, counters: Counters, vocab_size: int
    ) -> None:
        self.stop_ids = StopIds(vocab_size)  # of all live requests
        self._choices: dict[str, list[Request]] = {}
        self._life = life
        self._output = output
        self._counters = counters

    def __getitem__(self, rid: str) -> Sequence[Request]:
        return self._choices[rid]

    def __iter__(self) -> Iterator[str]:
        return iter(self._choices)

    def __len__(self) -> int:
        return len(self._choices)

    def add(self, requests: list[Request]) -> None:
        """All choices of one new request."""
        first = requests[0]
        self._choices[first.rid] = requests
        self.stop_ids.add(first.stop_ids)
        self._counters.num_requests_total += len(requests)
        self._counters.prompt_tokens_total += first.prompt_len * len(requests)

    def find(self, rid: str, choice: int) -> Request | None:
        for request in self.get(rid, ()):
            if request.choice == choice:
                return request
        return None

    def finish(self, request: Request, reason: FinishReason) -> None:
        """The choice has come to its own end: a stop id or its length."""
        self._output.add(request, reason)
        self._end(request)
        self._counters.num_finished_requests_total += 1

    def cut(self, request: Request, num_tokens: int) -> None:
        """The detokenizer found a stop string after `num_tokens` output tokens and has sent the
        last delta itself."""
        request.keep_len = request.prompt_len + num_tokens
        self._end(request)
        self._counters.num_finished_requests_total += 1

    def abort(self, rid: str, reason: str) -> None:
        """Ends all choices of `rid`, or everything if it is empty. Idempotent."""
        for name in [rid] if rid else list(self):
            for request in list(self.get(name, ())):
                self._output.add(request, FinishReason("abort", message=reason))
                self._end(request)
                self._counters.num_aborted_requests_total += 1

    def fail(self, rid: str, error: RequestError) -> None:
        """The whole request ends with an error. Only the detokenizer gets a last delta of the
        choices that had started, so that it forgets them."""
        self._output.fail(self[rid][0].source, error)
        reason = FinishReason("abort", message=error.message, status=error.status)
        for request in list(self[rid]):
            if request.started:
                self._output.add(request, reason)
            self._end(request)
            self._counters.num_failed_requests_total += 1

    def _end(self, request: Request) -> None:
        request.ended = True
        if request.params.stop:  # others were counted token by token
            dropped = 0
            if request.keep_len is not None:
                dropped = max(0, request.num_ids - request.keep_len)
            self._counters.generation_tokens_total += request.num_output - dropped
            self._counters.dropped_tokens_total += dropped
        choices = self._choices[request.rid]
        choices.remove(request)
        if not choices:
            del self._choices[request.rid]
            self.stop_ids.remove(request.stop_ids)
        self._life.end(request)
