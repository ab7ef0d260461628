"""The detokenizer process of `radix serve`."""

from ..text.detokenizer import Detokenizer
from ..text.tokenizer import served_tokenizer
from .child import Child


def serve(child: Child) -> None:
    """Runs until the supervisor asks this process to stop."""
    inbox, outbox = child.connect()
    tokenizer = served_tokenizer(child.args)
    detokenizer = Detokenizer(tokenizer=tokenizer, inbox=inbox, outbox=outbox)
    child.report("ready")
    detokenizer.run(child.should_stop, child.beat)
