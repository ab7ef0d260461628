"""The detokenizer process of `radix serve`."""

from ..text.detokenizer import Detokenizer
from ..text.tokenizer import load_tokenizer
from .child import Child


def serve(child: Child) -> None:
    """Runs until the supervisor asks this process to stop."""
    inbox, outbox = child.connect()
    tokenizer = load_tokenizer(child.args.tokenizer_path or child.args.model_path or "")
    detokenizer = Detokenizer(tokenizer=tokenizer, inbox=inbox, outbox=outbox)
    child.report("ready")
    detokenizer.run(child.should_stop, child.beat)
