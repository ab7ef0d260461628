"""Names: what clients call their requests, in all API processes of a server."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from .. import messages as m
from ..channel import Outbox
from .auth import Caller
from .labels import Label, Labels, name_in_use
from .siblings import Siblings


class Names:
    """The labels of this process, and questions to its siblings about theirs. `link` sends to the
    engine."""

    def __init__(self, siblings: Siblings, link: Outbox) -> None:
        self.labels = Labels()
        self._siblings = siblings
        self._link = link
        siblings.register("abort", tuple[str, Caller], self._abort_here)
        siblings.register("abort_all", None, lambda _: self._abort_all_here())
        siblings.register("is_in_use", tuple[list[Label], int], self._is_in_use)

    @asynccontextmanager
    async def claimed(self, labels: Collection[Label]) -> AsyncIterator[None]:
        """No other API process takes these names before the `with` block has ended, which submits
        the requests that have them. Raises RequestError if one of them is in use in any process;
        one that does not answer in time is not waited for."""
        if not labels or self._siblings.count == 1:
            yield
            return
        with self.labels.claimed(labels):
            asked = (list(labels), self._siblings.number)
            found = await self._siblings.ask("is_in_use", asked, bool)
            if any(found.values()) or self.labels.has_yielded(labels):
                raise name_in_use()
            yield

    def _is_in_use(self, asked: tuple[list[Label], int]) -> bool:
        labels, process = asked
        return self.labels.are_in_use(labels, is_first=self._siblings.number < process)

    async def abort(self, name: str, caller: Caller) -> int:
        """Ends what the caller means by `name`: a request or a call, also one not submitted yet.
        How many of its requests are open."""
        count = self._abort_here((name, caller))
        elsewhere = await self._siblings.ask("abort", (name, caller), int)
        return count + sum(elsewhere.values())

    def _abort_here(self, asked: tuple[str, Caller]) -> int:
        found = self.labels.abort(*asked)
        for rid in found:
            self._link.send(m.Abort(rid))
        return len(found)

    async def abort_all(self) -> int:
        """Ends every request, also those not submitted yet. How many are open."""
        count = self._abort_all_here()
        elsewhere = await self._siblings.ask("abort_all", None, int)
        return count + sum(elsewhere.values())

    def _abort_all_here(self) -> int:
        """Each process sends its own Abort, which comes behind the requests that it has sent: those
        of different senders overtake each other."""
        self.labels.abort_all()
        self._link.send(m.Abort(""))
        return self.labels.num_requests
