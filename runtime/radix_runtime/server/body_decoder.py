"""BodyDecoder: large request bodies are decoded in a process of their own."""

# The parser holds the GIL from the first byte of a body to the last, so a thread would not free the
# event loop.

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import numpy as np

from ..errors import RequestError
from ..messages import unpack_ids
from . import logprob_bound
from .decode import decode_checked
from .helper_process import HelperDied, HelperProcess
from .json_scan import check_shape_aside
from .request_rules import RequestRules

INLINE_BYTES = 256 << 10  # a body of at most so many bytes,
INLINE_PARTS = 8192  # arrays, objects and commas is decoded on the event loop's thread
_SECONDS = 60.0  # for one body; then the process is killed

B = TypeVar("B", bound=msgspec.Struct)


class Job(msgspec.Struct):
    """The head of a frame to the process; its data is the body. `kind` names a class of
    protocol.py; `lenient` is `decode_body`'s. By `rules` it knows whether the answer could have
    more than `most_logprobs` log-probabilities."""

    kind: str
    lenient: bool
    rules: RequestRules
    most_logprobs: int


class Decoded(msgspec.Struct):
    """The head of a frame back; its data is the body as MessagePack.

    `ids_field` names a field whose token ids travel packed: `ids` has one entry a prompt;
    `is_listed`: the client gave a list of prompts. `error`: arguments of the RequestError that
    refuses the body instead."""

    warnings: list[str] = []
    ids_field: str = ""
    ids: list[bytes] = []
    is_listed: bool = False
    error: dict[str, Any] | None = None


class BodyDecoder:
    """Turns bytes into a body: a small one at once, a large one in a child process, which the
    first of them starts. Large bodies take their turns there. Token ids of a large body are int32
    arrays instead of lists. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._turns = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")
        self.helper = HelperProcess("radix_runtime.server.body_process", "radix: bodies")

    async def decode(
        self, kind: type[B], data: bytes, lenient: bool, rules: RequestRules
    ) -> tuple[B, list[str]]:
        """The body and its warnings; arguments as of `decode_body`, whose defaults are among the
        rules. Raises RequestError: 400, or 503 where the machine is too busy to decode it in time;
        HelperDied."""
        if len(data) <= INLINE_BYTES:
            shape = await check_shape_aside(data)
            if shape.parts <= INLINE_PARTS:
                return decode_checked(kind, data, lenient, rules.defaults)
        job = Job(
            kind=kind.__name__,
            lenient=lenient,
            rules=rules,
            most_logprobs=logprob_bound.MAX_LOGPROBS,
        )
        loop = asyncio.get_running_loop()
        answer, packed = await loop.run_in_executor(self._turns, self._ask, job, data)
        if answer.error is not None:
            raise RequestError(**answer.error)
        body = msgspec.msgpack.decode(packed, type=kind)
        if answer.ids_field:
            prompts = [unpack_ids(ids) for ids in answer.ids]
            setattr(body, answer.ids_field, prompts if answer.is_listed else prompts[0])
        return body, answer.warnings

    def close(self) -> None:
        """Ends the process; a body that is being decoded fails."""
        self.helper.close()
        self._turns.shutdown()

    def _ask(self, job: Job, data: bytes) -> tuple[Decoded, bytes]:
        """Runs on the executor's thread."""
        try:
            head, packed = self.helper.ask(msgspec.msgpack.encode(job), data, _SECONDS)
        except HelperDied as error:
            if error.was_killed:
                raise _too_late() from error
            raise
        return msgspec.msgpack.decode(head, type=Decoded), packed


def _too_late() -> RequestError:
    return RequestError(
        status=503,
        code="engine_overloaded",
        message=f"the body could not be decoded within {_SECONDS:g} s",
        retry_after=5,
    )


def is_one_prompt(prompt: Any) -> bool:
    """Whether token ids, or texts, of a body are those of a single prompt and not a list of
    prompts."""
    if isinstance(prompt, str | np.ndarray):
        return True
    return isinstance(prompt[0], int)
