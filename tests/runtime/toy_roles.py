"""A server with two more kinds of process: `toy`, which may die, and `asker`, which asks it.

`python -m tests.runtime.toy_roles` serves the demo model beside them. The log tells what becomes of
each question.
"""

from __future__ import annotations

import logging
import sys
from contextlib import closing

from radix_runtime.config import ServerArgs
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.log import setup_logging
from radix_runtime.messages import Control, ControlReply, ProcessDown, ProcessUp
from radix_runtime.processes.child import Child
from radix_runtime.processes.ipc import ProcessUnavailable, Sender
from radix_runtime.processes.roles import ROLES, Role
from radix_runtime.processes.supervisor import Supervisor
from radix_runtime.server.listener import bind_port

MODULE = "tests.runtime.toy_roles"
TOY_ROLES = (
    Role(name="toy", module="tests.runtime.toy", sends={"ControlReply": "asker"}, restartable=True),
    Role(name="asker", module=MODULE, sends={"Control": "toy"}),
)

log = logging.getLogger(__name__)


class Asker:
    """Asks a question every 20 ms, and again whenever the toy has been started again."""

    def __init__(self, outbox: Sender) -> None:
        self._outbox = outbox
        self._open: dict[int, Control] = {}
        self._count = 0

    def ask(self) -> None:
        question = Control(self._count, "pid")
        self._count += 1
        self._open[question.id] = question
        self._send(question)

    def _send(self, question: Control) -> None:
        try:
            self._outbox.send(question)
        except ProcessUnavailable:
            log.info("question %d waits", question.id)

    def take(self, message: object) -> None:
        match message:
            case ControlReply():
                del self._open[message.id]
                log.info("answer %d of pid %d", message.id, message.result(int))
            case ProcessDown():
                log.info("%s is down, gone: %s", message.process, message.gone)
            case ProcessUp():
                log.info("%s is up, generation %d", message.process, message.generation)
                for question in self._open.values():
                    self._send(question)
            case _:
                raise TypeError(message)


def serve(child: Child) -> None:
    """The work of the asker."""
    inbox, outbox = child.connect()
    asker = Asker(outbox)
    outbox.wait_connected()
    child.report("ready")
    while not child.should_stop():
        child.beat()
        asker.ask()
        inbox.wait(0.02)
        for message in inbox.receive():
            asker.take(message)


def main() -> int:
    args = ServerArgs(
        model_path=str(DEMO_MODEL_DIR),
        port=0,
        max_total_tokens=32768,
        num_threads=1,
        step_timeout=3,
    )
    args.validate()
    setup_logging("radix", "info")
    with closing(bind_port(args.host, args.port)) as listener:
        roles = (*TOY_ROLES, *ROLES)
        return Supervisor(args, listener, on_serving=lambda url, info: None, roles=roles).run()


if __name__ == "__main__":
    sys.exit(main())
