"""The queue of requests that wait for a row."""

from collections import OrderedDict
from collections.abc import Collection, Iterator

from .request import Request


class WaitingQueue(Collection[Request]):
    """Requests in order of arrival, retracted ones first. `num_tokens` counts the tokens that they
    have. To add or remove one takes the same time at any length."""

    def __init__(self) -> None:
        self._requests: OrderedDict[Request, None] = OrderedDict()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def append(self, request: Request) -> None:
        """At the end."""
        self._requests[request] = None
        self.num_tokens += request.num_ids

    def push_front(self, request: Request) -> None:
        """At the head."""
        self.append(request)
        self._requests.move_to_end(request, last=False)

    def remove(self, request: Request) -> None:
        """Raises KeyError unless the request waits."""
        del self._requests[request]
        self.num_tokens -= request.num_ids

    def clear(self) -> None:
        """Forgets all of them."""
        self._requests.clear()
        self.num_tokens = 0
