"""`radix bench workload`: the lengths of a dataset, in a file that `--workload` takes."""

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path

from ..hub import resolve_model_path
from ..text.tokenizer import load_tokenizer
from .workload import read_workload

_ANY_VOCABULARY = 1 << 31


def write(namespace: argparse.Namespace) -> None:
    """Writes the file, and says what is in it. Raises ConfigError."""
    workload = read_workload(namespace)
    tokenizer = None
    if namespace.tokenizer is not None:
        tokenizer = load_tokenizer(resolve_model_path(namespace.tokenizer))
    items = workload.items(_ANY_VOCABULARY, tokenizer)
    lengths = [(len(item.prompt), item.output_len) for item in items]
    by = "" if tokenizer is None else f", tokens of {Path(namespace.tokenizer).name}"
    today = datetime.now(timezone.utc).date()
    what = (
        f"{len(items)} requests of {workload.name}{by}, seed {namespace.workload_seed}, {today}: "
        "[prompt tokens, output tokens]"
    )
    file: Path = namespace.output
    file.write_text(json.dumps({"what": what, "requests": lengths}) + "\n")
    prompt = sum(length for length, _ in lengths)
    output = sum(length for _, length in lengths)
    print(f"{file}: {len(items)} requests, {prompt} prompt and {output} output tokens")
