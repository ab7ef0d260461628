"""The demo data as conversations: the mix of families, system messages, several topics in a row.

Everything follows from `random.Random(seed)`; `fingerprint` names the data.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import arithmetic
import chat
import extract
import identity
import knowledge
import language
import stories
import unknown
from core import TOKEN_EDGE, Item, Phrases, Split

Family = Callable[[random.Random, Split], Item]

BOTH = (Split.ITEMS, Split.PHRASES)
ONLY_PHRASES = (Split.PHRASES,)

FAMILIES: dict[str, tuple[Family, float, tuple[Split, ...]]] = {
    "greetings": (chat.greeting, 4.0, ONLY_PHRASES),
    "about itself": (identity.identity, 3.0, ONLY_PHRASES),
    "not known": (unknown.unknown, 4.0, ONLY_PHRASES),
    "addition": (arithmetic.add, 15.0, BOTH),
    "subtraction": (arithmetic.sub, 15.0, BOTH),
    "multiplication": (arithmetic.mul, 5.0, ONLY_PHRASES),
    "unit conversion": (arithmetic.convert, 6.0, BOTH),
    "comparison": (arithmetic.compare, 3.0, BOTH),
    "counting": (arithmetic.count, 3.0, BOTH),
    "capitals": (knowledge.capital, 4.0, ONLY_PHRASES),
    "small facts": (knowledge.small_fact, 7.0, ONLY_PHRASES),
    "spelling": (language.spell, 7.0, BOTH),
    "reversing": (language.reverse, 9.0, BOTH),
    "counting letters": (language.letters, 3.0, BOTH),
    "sorting numbers": (language.sort_numbers, 7.0, BOTH),
    "sorting words": (language.sort_words, 7.0, BOTH),
    "repeating": (language.repeat, 7.0, BOTH),
    "JSON extraction": (extract.extract, 7.0, BOTH),
    "stories": (stories.story, 4.0, BOTH),
    "follow-ups": (knowledge.follow_up, 12.0, BOTH),
    "plain text": (knowledge.plain_text, 3.0, ()),
}

SYSTEM = Phrases(
    (
        "You are a helpful assistant.",
        "You are a helpful assistant",
        "You are Radix, a small demo model.",
        "You are a friendly assistant.",
        "Answer the questions of the user.",
        "Be brief.",
        "Answer briefly.",
        "You are a careful assistant who answers in one sentence.",
        "You are a chatbot.",
        "Be polite and helpful.",
        "You help children with their homework.",
        "You are an expert.",
        "Always answer in English.",
        "You are a helpful, honest and harmless assistant.",
        "Use simple words.",
        "You are an AI model.",
    ),
    (
        "You are a polite and helpful assistant.",
        "Answer in simple English.",
        "You are a friendly teacher.",
        "Please answer the questions of the user briefly.",
    ),
)


@dataclass(frozen=True)
class Conversation:
    """An optional system message and the turns of one or several items."""

    system: str | None
    items: tuple[Item, ...]

    @property
    def turns(self) -> list[tuple[str, str]]:
        """Questions and answers of all items in a row."""
        return [turn for item in self.items for turn in item.turns]

    def messages(self) -> list[dict[str, str]]:
        """All messages up to the last question, as a chat request has them."""
        result = [] if self.system is None else [{"role": "system", "content": self.system}]
        for question, answer in self.turns:
            result.append({"role": "user", "content": question})
            result.append({"role": "assistant", "content": answer.replace(TOKEN_EDGE, "")})
        return result[:-1]


_NAMES = tuple(FAMILIES)
_CUMULATIVE = []
for _weight in (FAMILIES[name][1] for name in _NAMES):
    _CUMULATIVE.append(_weight + (_CUMULATIVE[-1] if _CUMULATIVE else 0.0))


def draw(rng: random.Random, chat_only: bool = False) -> Item:
    """One training item of a family drawn by weight."""
    while True:
        point = rng.random() * _CUMULATIVE[-1]
        name = next(n for n, top in zip(_NAMES, _CUMULATIVE, strict=True) if point < top)
        if not (chat_only and name == "plain text"):
            return FAMILIES[name][0](rng, Split.TRAIN)


def system_message(rng: random.Random, split: Split) -> str | None:
    """A system message in three of ten conversations."""
    return SYSTEM.pick(rng, split) if rng.random() < 0.3 else None


def short_conversation(rng: random.Random) -> Conversation:
    """One item, with or without a system message."""
    return Conversation(system_message(rng, Split.TRAIN), (draw(rng),))


def long_conversation(rng: random.Random, items: int) -> Conversation:
    """`items` items one after the other in one chat."""
    chosen = tuple(draw(rng, chat_only=True) for _ in range(items))
    return Conversation(system_message(rng, Split.TRAIN), chosen)


def unseen(family: str, split: Split, n: int, seed: int = 1) -> list[Conversation]:
    """`n` different conversations of one family that training never draws."""
    make, _, splits = FAMILIES[family]
    if split not in splits:
        raise ValueError(f"family {family!r} has no {split.value}")
    rng = random.Random(f"{seed} {family} {split.value}")
    found: dict[tuple[tuple[str, str], ...], Conversation] = {}
    for _ in range(50 * n):
        item = make(rng, split)
        found.setdefault(item.turns, Conversation(system_message(rng, split), (item,)))
        if len(found) == n:
            break
    return list(found.values())


def correct(item: Item, answer: str) -> bool:
    """The checker: stories by their form, everything else by exact match."""
    if item.family == "stories":
        return stories.is_story(item.turns[-1][0], answer)
    return answer == item.expected


def training_samples(seed: int) -> Iterator[Conversation]:
    """The endless stream of short conversations of `seed`."""
    rng = random.Random(seed)
    while True:
        yield short_conversation(rng)


def fingerprint(seed: int, n: int) -> str:
    """sha256 over the first `n` training conversations as JSON lines."""
    digest = hashlib.sha256()
    for sample in itertools.islice(training_samples(seed), n):
        line = json.dumps([sample.system, [[item.family, item.turns] for item in sample.items]])
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Print samples of the demo data and their fingerprint."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, default=20)
    args = parser.parse_args()
    for sample in itertools.islice(training_samples(args.seed), args.n):
        print(json.dumps([sample.system, *sample.turns], ensure_ascii=False))
    print(fingerprint(args.seed, 2000))


if __name__ == "__main__":
    main()
