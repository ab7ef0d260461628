"""A process that renders chat templates for the API process (chat_renderer.py), in a fork that may
be lost."""

# A conversation that takes too long or too much costs a fork, and not a new process: that would
# import and compile everything again, a quarter of a second of CPU beside those who wait.

import gc
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import msgspec

from ..errors import RequestError
from ..spawn import die_with_parent
from ..text.chat_template import ChatTemplate
from .chat_renderer import Hello, Job, Rendered
from .helper_process import read_frame, write_frame

_OUT_OF_MEMORY = 3  # the exit code of a fork


def main() -> None:
    """Has forks answer frame by frame until the API process has gone."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code = 0
    try:
        code = _run()
    except (EOFError, BrokenPipeError):
        pass
    os._exit(code)  # a normal exit would complain of what nobody reads any more


def _run() -> int:
    """The exit code of this process: that of the last fork, or of a shell where a signal ended it.
    A fork that no bound has ended may have left a part of a frame."""
    hello = msgspec.json.decode(read_frame(sys.stdin.buffer)[0], type=Hello)
    template = ChatTemplate(
        hello.source, special_tokens=hello.special_tokens, tool_source=hello.tool_source
    )
    write_frame(sys.stdout.buffer, b"", b"")
    gc.collect()
    gc.freeze()  # a collection in a fork need not write to pages that it shares
    while (code := _run_fork(template, hello)) in (-signal.SIGALRM, _OUT_OF_MEMORY):
        write_frame(sys.stdout.buffer, msgspec.json.encode(Rendered(is_stopped=True)), b"")
    return code if code >= 0 else 128 - code


def _run_fork(template: ChatTemplate, hello: Hello) -> int:
    """Waits for a process that renders; its exit code, or less than 0 for a signal."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _serve(template, hello, parent)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _serve(template: ChatTemplate, hello: Hello, parent: int) -> NoReturn:
    """What a fork does until the API process has gone, or a bound is met."""
    code = 1
    try:
        die_with_parent()
        _bound_memory(hello.memory)
        while os.getppid() == parent:
            job = msgspec.json.decode(read_frame(sys.stdin.buffer)[0], type=Job)
            write_frame(sys.stdout.buffer, _rendered(template, job), b"")
    except (EOFError, BrokenPipeError):
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def _rendered(template: ChatTemplate, job: Job) -> bytes:
    """The answer to a conversation. One that takes too long or too much ends the process, while
    nothing of a frame has been written."""
    signal.setitimer(signal.ITIMER_REAL, job.seconds)
    try:
        answer = msgspec.json.encode(_render(template, job))
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return answer


def _render(template: ChatTemplate, job: Job) -> Rendered:
    try:
        return Rendered(text=template.render(job.messages, **job.options))
    except RequestError as error:
        return Rendered(
            error={
                "status": error.status,
                "code": error.code,
                "message": error.message,
                "param": error.param,
            }
        )


def _bound_memory(beyond: int) -> None:
    """Lets this process take so many bytes more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + beyond
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
