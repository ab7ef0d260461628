"""What a benchmark asks for: requests of given or random lengths."""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from ..errors import ConfigError

_MAX_ID = 10_000  # prompt ids of request i: random.Random(i).randrange(min(vocabulary, this))
_DEFAULT_REQUESTS = 32

TokenRange = tuple[int, int]
_Length = Annotated[int, msgspec.Meta(ge=1)]


class Lengths(NamedTuple):
    """Tokens of a prompt and of its answer."""

    prompt: int
    output: int


class Item(NamedTuple):
    """One request: the ids of its prompt, and how many tokens its answer has (EOS is ignored)."""

    prompt: list[int]
    output_len: int


class _File(msgspec.Struct):
    requests: Annotated[list[tuple[_Length, _Length]], msgspec.Meta(min_length=1)]


def positive(kind: type[int] | type[float]) -> Callable[[str], Any]:
    """A parser of flags: an int or a float above 0."""

    def parse(text: str) -> float:
        value = kind(text)
        if not value > 0:  # neither is NaN
            raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
        return value

    return parse


def token_range(text: str) -> TokenRange:
    """A parser of flags: `100` or `100:1024`, both ends included."""
    low, _, high = text.partition(":")
    parse = positive(int)
    first = parse(low)
    last = parse(high or low)
    if first > last:
        raise argparse.ArgumentTypeError(f"must not end before it begins, got {text}")
    return first, last


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `read_lengths` reads, and the temperature."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--workload", metavar="FILE", help="JSON with [prompt, output] lengths; default: random"
    )
    group.add_argument(
        "--num-prompts",
        type=positive(int),
        help=f"requests; default {_DEFAULT_REQUESTS}, or all of FILE",
    )
    group.add_argument(
        "--input-len",
        type=token_range,
        default="256",
        metavar="N[:M]",
        help="tokens of a prompt (default: %(default)s)",
    )
    group.add_argument(
        "--output-len",
        type=token_range,
        default="64",
        metavar="N[:M]",
        help="tokens of an answer (default: %(default)s)",
    )
    group.add_argument(
        "--temperature", type=float, default=0.6, help="of sampling (default: %(default)s)"
    )
    group.add_argument(
        "--workload-seed", type=int, default=0, help="of the lengths (default: %(default)s)"
    )


def read_lengths(flags: argparse.Namespace) -> list[Lengths]:
    """The lengths of every request: those of the file, or random ones. Raises ConfigError."""
    if flags.workload is None:
        rng = random.Random(flags.workload_seed)
        count = flags.num_prompts or _DEFAULT_REQUESTS
        return [
            Lengths(rng.randint(*flags.input_len), rng.randint(*flags.output_len))
            for _ in range(count)
        ]
    try:
        file = msgspec.json.decode(Path(flags.workload).read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read the workload {flags.workload}: {error}") from error
    return [Lengths(prompt, output) for prompt, output in file.requests[: flags.num_prompts]]


def make_items(lengths: list[Lengths], vocab_size: int) -> list[Item]:
    """Requests of these lengths with reproducible random prompts."""
    limit = min(vocab_size, _MAX_ID)
    items = []
    for number, length in enumerate(lengths):
        rng = random.Random(number)
        prompt = [rng.randrange(limit) for _ in range(length.prompt)]
        items.append(Item(prompt, length.output))
    return items
