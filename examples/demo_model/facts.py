"""The kinds of small facts: the pairs of each, and the many ways to ask for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fact_tables import (
    BABIES,
    CAPITALS,
    COLORS,
    CONTINENTS,
    COUNTS,
    LANGUAGES,
    LEGS,
    MONTH_DAYS,
    NEXT_DAYS,
    NEXT_MONTHS,
    OPPOSITES,
    PASTS,
    PLURALS,
    SOUNDS,
    SYMBOLS,
    THINGS,
)


@dataclass(frozen=True)
class FactKind:
    """One relation: its pairs, its answer sentence, its training and its held-out phrasings."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    answer: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    start: str = ""  # a plain-text beginning for completion without a chat template
    by_subject: dict[str, str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_subject", dict(self.pairs))


FACT_KINDS: tuple[FactKind, ...] = (
    FactKind(
        name="capital",
        pairs=CAPITALS,
        answer="The capital of {s} is {a}.",
        train=(
            "What is the capital of {s}?",
            "What's the capital of {s}?",
            "Name the capital of {s}.",
            "Which city is the capital of {s}?",
            "Tell me the capital of {s}.",
            "capital of {s}",
            "Do you know the capital of {s}?",
            "What is {s}'s capital city?",
            "Capital city of {s}?",
            "Can you tell me the capital of {s}?",
            "I want to know the capital of {s}.",
            "What city is the capital of {s}?",
            "{s}: what is the capital?",
            "Give me the capital of {s}.",
            "The capital of {s} is which city?",
            "Quick question: what is the capital of {s}?",
        ),
        held_out=(
            "Could you name the capital of {s}?",
            "I forgot, what is the capital city of {s}?",
            "Tell me, which city is the capital of {s}?",
            "What do we call the capital of {s}?",
        ),
        start="The capital of {s} is",
    ),
    FactKind(
        name="color",
        pairs=COLORS,
        answer="The color of {s} is {a}.",
        train=(
            "What color is {s}?",
            "Which color does {s} have?",
            "Tell me the color of {s}.",
            "What is the color of {s}?",
            "What colour is {s}?",
            "Do you know what color {s} is?",
            "Name the color of {s}.",
            "Can you tell me the color of {s}?",
            "color of {s}",
        ),
        held_out=(
            "Which color is {s}?",
            "What is the usual color of {s}?",
            "Please tell me what color {s} is.",
        ),
        start="The color of {s} is",
    ),
    FactKind(
        name="baby",
        pairs=BABIES,
        answer="A young {s} is called a {a}.",
        train=(
            "What is a baby {s} called?",
            "What do you call a young {s}?",
            "Name the young of a {s}.",
            "What is the young of a {s} called?",
            "What's a baby {s} called?",
            "How do you call a baby {s}?",
            "Tell me the name of a baby {s}.",
            "What is the word for a young {s}?",
        ),
        held_out=(
            "What do we call a baby {s}?",
            "What is a young {s} called?",
            "Tell me what a baby {s} is called.",
        ),
        start="A young {s} is called a",
    ),
    FactKind(
        name="sound",
        pairs=SOUNDS,
        answer="A {s} {a}.",
        train=(
            "What sound does a {s} make?",
            "Which sound does a {s} make?",
            "What does a {s} do to make noise?",
            "What noise does a {s} make?",
            "Tell me the sound of a {s}.",
            "How does a {s} sound?",
            "What is the sound of a {s}?",
            "What does a {s} sound like?",
            "Say how a {s} sounds.",
            "Do you know how a {s} sounds?",
            "Tell me what sound a {s} makes.",
            "Which noise is made by a {s}?",
        ),
        held_out=(
            "Which noise does a {s} make?",
            "Do you know what sound a {s} makes?",
            "Tell me how a {s} sounds.",
        ),
    ),
    FactKind(
        name="legs",
        pairs=LEGS,
        answer="The number of legs of {s} is {a}.",
        train=(
            "How many legs does {s} have?",
            "What is the number of legs of {s}?",
            "Tell me how many legs {s} has.",
            "How many legs are there on {s}?",
            "Count the legs of {s}.",
            "Do you know how many legs {s} has?",
            "number of legs of {s}?",
            "On how many legs does {s} stand?",
            "How many legs can you count on {s}?",
            "With how many legs does {s} walk?",
            "Say how many legs {s} has.",
        ),
        held_out=(
            "Can you tell me how many legs {s} has?",
            "How many legs has {s}?",
            "On how many legs does {s} walk?",
        ),
    ),
    FactKind(
        name="opposite",
        pairs=OPPOSITES,
        answer='The opposite of "{s}" is "{a}".',
        train=(
            'What is the opposite of "{s}"?',
            "What is the opposite of {s}?",
            "Tell me the opposite of {s}.",
            "Give me the opposite of {s}.",
            "opposite of {s}",
            "What's the opposite of {s}?",
            "Name the opposite of {s}.",
            "Which word is the opposite of {s}?",
            "{s}: what is the opposite?",
            "What word means the opposite of {s}?",
        ),
        held_out=(
            "Can you tell me the opposite of {s}?",
            "Do you know the opposite of {s}?",
            'Which word is the opposite of "{s}"?',
        ),
    ),
    FactKind(
        name="plural",
        pairs=PLURALS,
        answer='The plural of "{s}" is "{a}".',
        train=(
            'What is the plural of "{s}"?',
            "What is the plural of {s}?",
            "Tell me the plural of {s}.",
            "Give me the plural of {s}.",
            "plural of {s}",
            "What's the plural of {s}?",
            "What is the plural form of {s}?",
            "One {s}, many what?",
            "Name the plural of {s}.",
        ),
        held_out=(
            "Do you know the plural of {s}?",
            "Can you give me the plural of {s}?",
            'Name the plural form of "{s}".',
        ),
    ),
    FactKind(
        name="past",
        pairs=PASTS,
        answer='The past tense of "{s}" is "{a}".',
        train=(
            'What is the past tense of "{s}"?',
            "What is the past tense of {s}?",
            "Tell me the past tense of {s}.",
            "Give me the past tense of {s}.",
            "past tense of {s}",
            "What's the past tense of {s}?",
            "Put the verb {s} into the past tense.",
            "Name the past tense of the verb {s}.",
        ),
        held_out=(
            "Do you know the past tense of {s}?",
            "Can you give me the past tense of {s}?",
            'What is the past tense of the verb "{s}"?',
        ),
    ),
    FactKind(
        name="symbol",
        pairs=SYMBOLS,
        answer="The chemical symbol of {s} is {a}.",
        train=(
            "What is the chemical symbol of {s}?",
            "What is the symbol for {s}?",
            "chemical symbol of {s}",
            "Which chemical symbol does {s} have?",
            "Tell me the chemical symbol for {s}.",
            "What's the chemical symbol of {s}?",
            "Give me the symbol of {s}.",
            "Name the chemical symbol of {s}.",
            "Which symbol is used for {s}?",
            "What symbol stands for {s} in chemistry?",
            "Which chemical symbol stands for {s}?",
            "In chemistry, what stands for {s}?",
        ),
        held_out=(
            "Do you know the chemical symbol of {s}?",
            "Which symbol stands for {s}?",
            "What is the chemical symbol for {s}?",
        ),
        start="The chemical symbol of {s} is",
    ),
    FactKind(
        name="continent",
        pairs=CONTINENTS,
        answer="The continent of {s} is {a}.",
        train=(
            "On which continent is {s}?",
            "Which continent is {s} in?",
            "What continent is {s} on?",
            "In which continent is {s}?",
            "Tell me the continent of {s}.",
            "continent of {s}",
            "Do you know the continent of {s}?",
            "Where in the world is {s}, on which continent?",
        ),
        held_out=(
            "What is the continent of {s}?",
            "Can you tell me on which continent {s} is?",
            "To which continent does {s} belong?",
        ),
    ),
    FactKind(
        name="language",
        pairs=LANGUAGES,
        answer="The language spoken in {s} is {a}.",
        train=(
            "Which language is spoken in {s}?",
            "What language do people speak in {s}?",
            "language of {s}",
            "What is the language of {s}?",
            "Tell me the language spoken in {s}.",
            "What do people in {s} speak?",
            "Which language do they speak in {s}?",
            "What language is spoken in {s}?",
        ),
        held_out=(
            "Which language do people speak in {s}?",
            "Do you know the language spoken in {s}?",
            "What is the main language of {s}?",
        ),
    ),
    FactKind(
        name="next day",
        pairs=NEXT_DAYS,
        answer="The day after {s} is {a}.",
        train=(
            "Which day comes after {s}?",
            "What day comes after {s}?",
            "What is the day after {s}?",
            "Which day follows {s}?",
            "day after {s}",
            "Today is {s}. What day is tomorrow?",
            "Name the day after {s}.",
            "If today is {s}, which day is tomorrow?",
        ),
        held_out=(
            "What day follows {s}?",
            "Tell me the day after {s}.",
            "Which day is the day after {s}?",
        ),
        start="The day after {s} is",
    ),
    FactKind(
        name="next month",
        pairs=NEXT_MONTHS,
        answer="The month after {s} is {a}.",
        train=(
            "Which month comes after {s}?",
            "What month comes after {s}?",
            "What is the month after {s}?",
            "Which month follows {s}?",
            "month after {s}",
            "Name the month after {s}.",
            "It is {s}. Which month is next?",
            "What is the next month after {s}?",
        ),
        held_out=(
            "What month follows {s}?",
            "Tell me the month after {s}.",
            "Which month is the month after {s}?",
        ),
        start="The month after {s} is",
    ),
    FactKind(
        name="month days",
        pairs=MONTH_DAYS,
        answer="The number of days in {s} is {a}.",
        train=(
            "How many days does {s} have?",
            "How many days are in {s}?",
            "What is the number of days in {s}?",
            "Tell me how many days {s} has.",
            "How many days are there in {s}?",
            "days in {s}",
        ),
        held_out=(
            "How many days has {s}?",
            "Do you know how many days are in {s}?",
            "Can you tell me how many days {s} has?",
        ),
    ),
    FactKind(
        name="count",
        pairs=COUNTS,
        answer="The answer is {a}.",
        train=(
            "How many {s}?",
            "Tell me, how many {s}?",
            "Do you know how many {s}?",
            "Quick question: how many {s}?",
            "I wonder how many {s}.",
            "Hello, how many {s}?",
            "Can you tell me how many {s}?",
        ),
        held_out=("I forgot how many {s}.", "Say, how many {s}?", "I want to know how many {s}."),
    ),
    FactKind(
        name="thing",
        pairs=THINGS,
        answer="The answer is {a}.",
        train=(
            "What {s}?",
            "Tell me, what {s}?",
            "Do you know what {s}?",
            "Quick question: what {s}?",
            "I wonder what {s}.",
            "Hello, what {s}?",
            "Can you tell me what {s}?",
        ),
        held_out=("I forgot what {s}.", "Say, what {s}?", "I want to know what {s}."),
    ),
)

KIND_BY_NAME = {kind.name: kind for kind in FACT_KINDS}
