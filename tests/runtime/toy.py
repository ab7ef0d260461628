"""The process of the role `toy`: answers each question with its process id."""

from __future__ import annotations

import os

from radix_runtime.messages import Control, ControlReply, pack_body
from radix_runtime.processes.child import Child


def serve(child: Child) -> None:
    """Runs until the supervisor asks this process to stop."""
    inbox, outbox = child.connect()
    outbox.wait_connected()
    child.report("ready")
    while not child.should_stop():
        child.beat()
        inbox.wait(0.5)
        for message in inbox.receive():
            assert isinstance(message, Control) and message.op == "pid"
            outbox.send(ControlReply(message.id, body=pack_body(os.getpid())))
