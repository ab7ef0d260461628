"""The family of small facts, follow-up questions, and plain texts to complete."""

from __future__ import annotations

import random

import arithmetic
import chat
import language
import stories
from core import Item, Phrases, Split, accept, vary
from facts import FACT_KINDS, KIND_BY_NAME, FactKind
from words import DAYS, MONTHS

OFTEN = (
    "capital",
    "capital",
    "capital",
    "capital",
    "opposite",
    "plural",
    "past",
    "count",
    "thing",
    "symbol",
)

TWICE = Phrases(
    (
        "and twice that?",
        "And twice that?",
        "Twice that?",
        "What is twice that?",
        "And double that?",
        "Now double it.",
        "And what is that times two?",
        "Double that.",
        "How much is twice that?",
    ),
    ("And what is twice that?", "And double it?", "What is double that?", "Now twice that."),
)
HALF = Phrases(
    (
        "and half of that?",
        "And half of that?",
        "What is half of that?",
        "Now halve it.",
        "And half?",
        "How much is half of that?",
    ),
    ("And what is half of that?", "Half of that?", "Now half of that."),
)
PLUS = Phrases(
    (
        "and plus {n}?",
        "And {n} more?",
        "Add {n}.",
        "Now add {n}.",
        "plus {n}",
        "And if you add {n}?",
        "And plus {n}?",
    ),
    ("And what if you add {n}?", "Now plus {n}.", "Now add {n} more."),
)
MINUS = Phrases(
    (
        "and minus {n}?",
        "And {n} less?",
        "Subtract {n}.",
        "Now subtract {n}.",
        "minus {n}",
        "And if you take away {n}?",
        "And minus {n}?",
    ),
    ("And what if you subtract {n}?", "Now minus {n}.", "Now take away {n}."),
)
OTHER = Phrases(
    (
        "And {s}?",
        "What about {s}?",
        "And of {s}?",
        "and {s}",
        "And what about {s}?",
        "How about {s}?",
        "Now {s}.",
        "Then what about {s}?",
        "And {s} then?",
        "What about {s} now?",
        "Okay, what about {s}?",
        "Okay, now {s}.",
        "Good, and {s}?",
        "Thanks, and {s}?",
        "And how is it for {s}?",
    ),
    (
        "And how about {s}?",
        "What about {s} then?",
        "Okay, and {s}?",
        "Thank you, and what about {s}?",
    ),
)
TURNED = Phrases(
    (
        "And backwards?",
        "Now backwards.",
        "And in reverse?",
        "and reversed?",
        "Can you reverse it?",
        "Reverse it.",
    ),
    ("And now backwards?", "Now reverse it.", "And what is it backwards?"),
)
AGAIN = Phrases(
    (
        "Again.",
        "And again?",
        "Say it again.",
        "Once more.",
        "Repeat that.",
        "One more time, please.",
        "Can you repeat that?",
    ),
    ("And once more?", "Please say it again.", "Repeat that, please."),
)
DESCENDING = Phrases(
    (
        "And in descending order?",
        "Now from largest to smallest.",
        "And the other way around?",
        "And in reverse order?",
        "Now in reverse.",
    ),
    ("And now in reverse order?", "Now in descending order.", "And from largest to smallest?"),
)


def _subject(rng: random.Random, kind: FactKind) -> tuple[str, str]:
    return rng.choice(kind.pairs)


def fact(rng: random.Random, split: Split) -> Item:
    """A question of any kind of small fact."""
    kind = KIND_BY_NAME[rng.choice(OFTEN)] if rng.random() < 0.5 else rng.choice(FACT_KINDS)
    subject, answer = _subject(rng, kind)
    question = Phrases(kind.train, kind.held_out).pick(rng, split).format(s=subject)
    family = "capitals" if kind.name == "capital" else "small facts"
    return Item(family, ((vary(rng, question), kind.answer.format(s=subject, a=answer)),))


def capital(rng: random.Random, split: Split) -> Item:
    """A question for a capital."""
    return _until(rng, split, "capitals")


def small_fact(rng: random.Random, split: Split) -> Item:
    """A question for any fact but a capital."""
    return _until(rng, split, "small facts")


def _until(rng: random.Random, split: Split, family: str) -> Item:
    while True:
        item = fact(rng, split)
        if item.family == family:
            return item


def _number_follow_up(rng: random.Random, split: Split) -> Item | None:
    first = rng.choice((arithmetic.add, arithmetic.add, arithmetic.sub, arithmetic.mul))
    base = first(rng, Split.TRAIN if first is arithmetic.mul else split)
    question, text = base.turns[0]
    result = int(text.rstrip(".").split("= ")[1])
    dice = rng.random()
    if result < 0 or result > 999:
        return None
    if dice < 0.45:
        if not accept(split, f"2x{result}"):
            return None
        turn = (TWICE.pick(rng, split), f"2 x {result} = {2 * result}.")
    elif dice < 0.6:
        if result % 2 or not accept(split, f"half {result}"):
            return None
        turn = (HALF.pick(rng, split), f"{result} / 2 = {result // 2}.")
    elif dice < 0.8:
        n = rng.choice((10, 100, 1, rng.randrange(1, 100)))
        turn = (PLUS.pick(rng, split).format(n=n), f"{result} + {n} = {result + n}.")
        if not accept(split, f"{result}+{n}"):
            return None
    else:
        n = rng.choice((10, 1, 5, rng.randrange(1, 100)))
        turn = (MINUS.pick(rng, split).format(n=n), f"{result} - {n} = {result - n}.")
        if result < n or not accept(split, f"{result}-{n}"):
            return None
    return Item("follow-ups", ((question, text), turn))


def _fact_follow_up(rng: random.Random, split: Split) -> Item:
    kind = (
        KIND_BY_NAME["capital"]
        if rng.random() < 0.5
        else rng.choice([k for k in FACT_KINDS if k.name not in ("count", "thing")])
    )
    phrases = Phrases(kind.train, kind.held_out)
    turns = []
    for index in range(2):
        subject, answer = _subject(rng, kind)
        how = OTHER if index else phrases
        question = how.pick(rng, split).format(s=subject)
        turns.append((question, kind.answer.format(s=subject, a=answer)))
    return Item("follow-ups", tuple(turns))


def _word_follow_up(rng: random.Random, split: Split) -> Item:
    dice = rng.random()
    if dice < 0.4:
        base = language.spell(rng, split)
        word = base.expected.replace("-", "")
        return Item(
            "follow-ups", (*base.turns, (TURNED.pick(rng, split), language.reversed_answer(word)))
        )
    if dice < 0.7:
        base = language.repeat(rng, split)
        return Item("follow-ups", (*base.turns, (AGAIN.pick(rng, split), base.expected)))
    numbers = language.number_list(rng, split)
    question = language.SORT_NUMBERS.pick(rng, split).format(x=language.join(numbers))
    up = sorted(numbers)
    down = sorted(numbers, reverse=True)
    return Item(
        "follow-ups",
        ((question, language.join(up)), (DESCENDING.pick(rng, split), language.join(down))),
    )


def follow_up(rng: random.Random, split: Split) -> Item:
    """Two turns; the second only makes sense after the first."""
    while True:
        dice = rng.random()
        if dice < 0.55:
            item = _number_follow_up(rng, split)
            if item is not None:
                return item
        elif dice < 0.75:
            if split is not Split.ITEMS:
                return _fact_follow_up(rng, split)
        elif dice < 0.95:
            return _word_follow_up(rng, split)
        elif split is not Split.ITEMS:
            return chat.remember_name(rng, split)


def plain_text(rng: random.Random, split: Split) -> Item:
    """The beginning of a text and its continuation, outside any chat."""
    dice = rng.random()
    if dice < 0.3:
        kind = rng.choice([kind for kind in FACT_KINDS if kind.start])
        subject, answer = _subject(rng, kind)
        sentence = kind.answer.format(s=subject, a=answer)
        start = kind.start.format(s=subject)
    elif dice < 0.75:
        family = rng.choice((arithmetic.add, arithmetic.sub))
        sentence = family(rng, split).expected
        start = sentence[: sentence.index("=") + 1]
    elif dice < 0.85:
        hero = rng.choice(stories.HEROES)
        sentence = stories.tell(rng, hero, rng.choice(stories.TRAITS), rng.choice(stories.PLACES))
        start = sentence[: sentence.index(" called")] if rng.random() < 0.5 else "Once upon a time"
    else:
        names = DAYS if rng.random() < 0.5 else MONTHS
        first = rng.randrange(0, 3)
        sentence = ", ".join(names[first:]) + "."
        start = ", ".join(names[first : first + rng.randrange(2, 4)]) + ","
    return Item("plain text", ((start, sentence[len(start) :]),), plain=True)
