"""What every family of the demo data shares: items, phrasings and the train/unseen split."""

from __future__ import annotations

import enum
import hashlib
import random
from dataclasses import dataclass

TOKEN_EDGE = "\x1f"
"""Inside an answer: the tokenizer may not merge across this point. It is not part of the text."""


class Split(enum.Enum):
    """Which side of the split an item is drawn from."""

    TRAIN = "train"
    ITEMS = "unseen items"
    PHRASES = "unseen phrasings"


@dataclass(frozen=True)
class Phrases:
    """Ways to ask: those seen in training and those kept back."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    def pick(self, rng: random.Random, split: Split) -> str:
        """One phrasing of the split."""
        return rng.choice(self.held_out if split is Split.PHRASES else self.train)


def combined(questions: tuple[str, ...], objects: tuple[str, ...]) -> tuple[str, ...]:
    """Every question with every object in the place of `{o}`."""
    return tuple(question.replace("{o}", thing) for question in questions for thing in objects)


@dataclass(frozen=True)
class Item:
    """One exchange or several that belong together: (user, assistant) turns of one family."""

    family: str
    turns: tuple[tuple[str, str], ...]
    plain: bool = False  # a text to complete without the chat template

    @property
    def expected(self) -> str:
        """The last answer as text."""
        return self.turns[-1][1].replace(TOKEN_EDGE, "")


def held_out(key: str) -> bool:
    """True for the one item in twelve that training never sees; depends on the content only."""
    return hashlib.sha256(key.encode()).digest()[0] < 21


def accept(split: Split, key: str) -> bool:
    """Whether the item named by `key` may be drawn for `split`."""
    return held_out(key) == (split is Split.ITEMS)


def letter_by_letter(word: str) -> str:
    """The word with a token edge between all letters, so that it is written one at a time."""
    return TOKEN_EDGE + TOKEN_EDGE.join(word) + TOKEN_EDGE


def with_article(noun: str) -> str:
    """The noun with 'a' or 'an' in front."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


_OPENINGS = ("Hi! ", "Hello! ", "Hey, ", "Please: ", "Okay. ", "Now: ", "Next question. ", "So, ")
_CLOSINGS = (" Thanks!", " Please.", " Thank you.", " Please answer.", " Thanks.")


def vary(rng: random.Random, text: str) -> str:
    """Everyday variations of a question that do not change its answer."""
    dice = rng.random()
    if dice < 0.10:
        return text.lower()
    if dice < 0.16:
        return text[0].lower() + text[1:]
    if dice < 0.24 and text[-1] in ".?!":
        return text[:-1]
    if dice < 0.32:
        return rng.choice(_OPENINGS) + text
    if dice < 0.37 and text[-1] in ".?!":
        return text + rng.choice(_CLOSINGS)
    return text
