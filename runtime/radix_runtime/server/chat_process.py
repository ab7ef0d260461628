"""A process that renders chat templates for the API process (chat_renderer.py)."""

import os
import resource
import signal
import sys
from pathlib import Path

import msgspec

from ..errors import RequestError
from ..text.chat_template import ChatTemplate
from .chat_renderer import Hello, Job, Rendered
from .helper_process import read_frame, write_frame

_OUT_OF_MEMORY = 3  # its exit code


def main() -> None:
    """Answers frame by frame until the API process has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when to stop
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        _serve()
    except (EOFError, BrokenPipeError):
        os._exit(0)  # a normal exit would complain of what nobody reads any more
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)


def _serve() -> None:
    requests = sys.stdin.buffer
    answers = sys.stdout.buffer
    hello = msgspec.json.decode(read_frame(requests)[0], type=Hello)
    _bound_memory(hello.memory)
    template = ChatTemplate(
        hello.source, special_tokens=hello.special_tokens, tool_source=hello.tool_source
    )
    write_frame(answers, b"", b"")
    while True:
        job = msgspec.json.decode(read_frame(requests)[0], type=Job)
        try:
            answer = Rendered(text=template.render(job.messages, **job.options))
        except RequestError as error:
            answer = Rendered(
                error={
                    "status": error.status,
                    "code": error.code,
                    "message": error.message,
                    "param": error.param,
                }
            )
        write_frame(answers, msgspec.json.encode(answer), b"")


def _bound_memory(beyond: int) -> None:
    """Lets this process take so many bytes more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + beyond
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
