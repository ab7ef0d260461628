"""`radix bench profile`: where the time of a decode step goes, by number of rows."""

import argparse
import json
import random
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..offline import Engine
from ..step_plan import Profile
from .figures import machine
from .flags import engine_args
from .step_profile import StepProfile, lines, read_step_profile

_SEED = 0  # of the prompts


def profile(namespace: argparse.Namespace) -> None:
    """Prints a table for each number of rows, and writes them. Raises ConfigError."""
    found = {}
    with Engine(**engine_args(namespace)) as engine:
        for rows in namespace.rows:
            trace = namespace.keep_traces
            with tempfile.TemporaryDirectory() as temporary:
                folder = temporary if trace is None else trace
                measured = _profiled(engine, rows, namespace.context, namespace.steps, folder)
            found[rows] = measured
            heading = f"{rows} rows of {namespace.context} tokens:"
            print("\n".join([heading, *lines(measured)]), flush=True)
    if namespace.json is not None:
        report: dict[str, Any] = {
            "machine": machine(),
            "context": namespace.context,
            "rows": {rows: asdict(measured) for rows, measured in found.items()},
        }
        namespace.json.write_text(json.dumps(report, indent=1) + "\n")


def _profiled(engine: Engine, rows: int, context: int, steps: int, folder: str) -> StepProfile:
    rng = random.Random(_SEED)
    limit = engine.config.vocab_size
    prompts = [[rng.randrange(limit) for _ in range(context)] for _ in range(rows)]
    _complete(engine, prompts, 1)  # the prompts into the cache: later steps decode
    engine.executor.call(Profile("start", directory=folder)).result()
    try:
        _complete(engine, prompts, steps)
    finally:
        files = engine.executor.call(Profile("stop")).result()
    return read_step_profile(Path(files[0]))


def _complete(engine: Engine, prompts: list[list[int]], count: int) -> None:
    params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    try:
        engine.generate(input_ids=prompts, sampling_params=params)
    except ValueError as error:  # as a context that is too long
        raise ConfigError(str(error)) from error
