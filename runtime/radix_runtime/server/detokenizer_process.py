"""The detokenizer process of `radix serve`."""

from .. import hf
from .child import Child
from .detokenizer import Detokenizer


def serve(child: Child) -> None:
    inbox, outbox = child.connect()
    path = hf.resolve_model_path(child.args.tokenizer_path or child.args.model_path, weights=False)
    detokenizer = Detokenizer(hf.load_tokenizer(path), inbox, outbox)
    child.report("ready")
    detokenizer.run(child.should_stop, child.beat)
