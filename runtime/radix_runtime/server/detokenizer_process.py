"""The detokenizer process of `radix serve`."""

from __future__ import annotations

import zmq

from .. import hf
from .child import Child, Report, run_child
from .detokenizer import Detokenizer
from .ipc import DETOKENIZER, Receiver, Sender


def main(child: Child) -> None:
    wake = child.stop_on_sigterm()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = Receiver(context, child.directory, DETOKENIZER, child.token, wake)
    outbox = Sender(context, child.directory, DETOKENIZER, child.token)
    args = child.args
    path = hf.resolve_model_path(args.tokenizer_path or args.model_path, weights=False)
    detokenizer = Detokenizer(hf.load_tokenizer(path), inbox, outbox)
    child.report(Report("ready"))
    detokenizer.run(child.should_stop, child.beat)


if __name__ == "__main__":
    run_child(main)
