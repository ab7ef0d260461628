"""The detokenizer process of `radix serve`."""

from ..text.tokenizer import load_tokenizer
from .child import Child
from .detokenizer import Detokenizer


def serve(child: Child) -> None:
    inbox, outbox = child.connect()
    tokenizer = load_tokenizer(child.args.tokenizer_path or child.args.model_path or "")
    detokenizer = Detokenizer(tokenizer, inbox, outbox)
    child.report("ready")
    detokenizer.run(child.should_stop, child.beat)
