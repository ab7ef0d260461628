"""ChatRenderer: chat templates are programs of whoever made the model, and run where they can be
killed."""

# A thread could not be: Jinja's sandbox bounds neither time nor memory, and a loop within holds the
# GIL of its process.

import logging
import queue
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from ..errors import RequestError, refusal
from ..text.chat_template import ChatTemplate, Messages
from .helper_process import HelperDied, HelperProcess

SECONDS = 2.0  # for one conversation
MEMORY = 512 << 20  # bytes beside what the process needs for itself
_GRACE = 2.0  # seconds after which a process that has not ended a conversation itself is killed
_PROCESSES = 2
_MOST_KILLS = 3  # in a row, after which the template is given up

log = logging.getLogger(__name__)


class Hello(msgspec.Struct):
    """The first frame to a new process: the template, and its bound of memory in bytes."""

    source: str
    tool_source: str | None
    special_tokens: dict[str, str]
    memory: int


class Job(msgspec.Struct):
    """A conversation, the variables of the template, and the time that they have together."""

    messages: list[Any]
    options: dict[str, Any]
    seconds: float


class Rendered(msgspec.Struct):
    """The text; or arguments of the RequestError that refuses the conversation. `is_stopped`: it
    has met a bound, and there is neither."""

    text: str = ""
    error: dict[str, Any] | None = None
    is_stopped: bool = False


class ChatRenderer:
    """Renders conversations in two processes, whose forks end when one takes 2 s or 512 MiB. A
    template for which that happened three times in a row is refused from then on. `render` may be
    called on any thread; there are `pool` threads for it."""

    def __init__(self, template: ChatTemplate) -> None:
        hello = Hello(
            source=template.source,
            tool_source=template.tool_source,
            special_tokens=dict(template.special_tokens),
            memory=MEMORY,
        )
        self._idle: queue.SimpleQueue[HelperProcess] = queue.SimpleQueue()
        self._all = []
        for number in range(_PROCESSES):
            helper = HelperProcess(
                "radix_runtime.server.chat_process",
                f"radix: template {number}",
                hello=msgspec.json.encode(hello),
            )
            self._all.append(helper)
            self._idle.put(helper)
        self.pool = ThreadPoolExecutor(_PROCESSES, thread_name_prefix="templates")
        self._kills = 0

    def start(self) -> None:
        """Starts the processes, which the first conversations would otherwise do."""
        for helper in self._all:
            self.pool.submit(helper.start)

    def render(
        self, messages: Messages, options: Mapping[str, Any], param: str = "messages"
    ) -> str:
        """The prompt of a conversation; arguments as of ChatTemplate.render. Raises RequestError:
        `chat_template_error`, or `template_failed` where it was stopped; both name `param`, what
        the route calls the conversation."""
        if self._kills >= _MOST_KILLS:
            raise _failed("this model's chat template has failed too often", param)
        job = Job(messages=list(messages), options=dict(options), seconds=SECONDS)
        helper = self._idle.get()
        try:
            helper.start()
            head, _ = helper.ask(msgspec.json.encode(job), b"", job.seconds + _GRACE)
        except HelperDied as error:
            raise self._stopped(str(error), param) from None
        finally:
            self._idle.put(helper)
        answer = msgspec.json.decode(head, type=Rendered)
        if answer.is_stopped:
            raise self._stopped("a conversation has met a bound", param)
        if answer.error is not None:
            raise RequestError(**{**answer.error, "param": param})
        self._kills = 0
        return answer.text

    def _stopped(self, why: str, param: str) -> RequestError:
        """The error of a conversation that was stopped, which is counted."""
        self._kills += 1
        log.error("chat template: %s", why)
        return _failed("the chat template takes too long or too much memory", param)

    def close(self) -> None:
        """Ends the processes; conversations under way fail."""
        for helper in self._all:
            helper.close()
        self.pool.shutdown(wait=False, cancel_futures=True)


def _failed(message: str, param: str) -> RequestError:
    return refusal("template_failed", message, param)
