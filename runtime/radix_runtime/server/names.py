"""Names: what clients call their requests, in all API processes of a server."""

from collections.abc import Collection

from .. import messages as m
from ..channel import Outbox
from .auth import Caller
from .labels import Label, Labels, name_in_use
from .siblings import Siblings


class Names:
    """The labels of this process, and the same of its siblings. `link` sends to the engine."""

    def __init__(self, siblings: Siblings, link: Outbox) -> None:
        self.labels = Labels()
        self._siblings = siblings
        self._link = link
        siblings.register("abort", tuple[str, Caller], self._abort_here)
        siblings.register("abort_all", None, lambda _: self.labels.abort_all())
        siblings.register("is_in_use", tuple[list[Label], int], self._is_in_use)

    async def require_unique(self, labels: Collection[Label]) -> None:
        """Raises RequestError if another API process has an open request of one of these names,
        which are those of requests that this one has submitted."""
        if self._siblings.count == 1:
            return
        with self.labels.unsettled(labels):
            asked = (list(labels), self._siblings.number)
            found = await self._siblings.ask("is_in_use", asked, bool)
        if any(found.values()):
            raise name_in_use()

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

    async def abort_all(self) -> None:
        """Ends every request, also those not submitted yet."""
        self.labels.abort_all()
        self._link.send(m.Abort(""))
        if await self._siblings.ask("abort_all", None, type(None)):
            self._link.send(m.Abort(""))  # what they have sent before they knew
