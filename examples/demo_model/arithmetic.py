"""Families about numbers: sums, differences, products, units, comparisons, counting."""

from __future__ import annotations

import random

from core import Item, Phrases, Split, accept, vary

NOUNS = (
    "apples",
    "books",
    "stones",
    "cards",
    "birds",
    "people",
    "cars",
    "ships",
    "eggs",
    "keys",
    "cakes",
    "letters",
)
ADD = Phrases(
    (
        "What is {a} + {b}?",
        "{a} + {b}",
        "{a}+{b}",
        "{a} + {b} = ?",
        "How much is {a} + {b}?",
        "What is {a} plus {b}?",
        "How much is {a} plus {b}?",
        "Add {a} and {b}.",
        "{a} plus {b}",
        "Calculate {a} + {b}.",
        "Compute {a} + {b}.",
        "What is the sum of {a} and {b}?",
        "Tell me what {a} + {b} is.",
        "Can you add {a} and {b}?",
        "I need the sum of {a} and {b}.",
        "What do you get when you add {a} and {b}?",
        "what's {a}+{b}?",
        "Do you know what {a} plus {b} is?",
        "Solve {a} + {b}.",
        "What does {a} plus {b} equal?",
        "{a} plus {b} equals what?",
        "What is {a} and {b} together?",
        "Please add {a} and {b}.",
        "Add {b} to {a}.",
        *(
            f"I have {{a}} {o} and get {{b}} more. How many {o} do I have?"
            for o in NOUNS[:4] + NOUNS[8:]
        ),
        *(
            f"I have {{a}} {o} and find {{b}} more. How many {o} do I have now?"
            for o in NOUNS[2:5] + NOUNS[9:]
        ),
        *(f"There are {{a}} {o} and {{b}} more come. How many {o} are there?" for o in NOUNS[4:8]),
        *(f"Anna has {{a}} {o} and Ben has {{b}} {o}. How many {o} is that?" for o in NOUNS[2:5]),
    ),
    (
        "Can you tell me what {a} + {b} is?",
        "How much do {a} and {b} add up to?",
        "What does {a} + {b} equal?",
        "Please calculate the sum of {a} and {b}.",
        "Give me the sum {a} + {b}.",
        "What is {b} added to {a}?",
        "Could you add {a} and {b} for me?",
        "I have {a} coins and get {b} more. How many coins do I have?",
    ),
)
SUB = Phrases(
    (
        "What is {a} - {b}?",
        "{a} - {b}",
        "{a}-{b}",
        "{a} - {b} = ?",
        "How much is {a} - {b}?",
        "What is {a} minus {b}?",
        "How much is {a} minus {b}?",
        "Subtract {b} from {a}.",
        "{a} minus {b}",
        "Calculate {a} - {b}.",
        "Compute {a} - {b}.",
        "Take {b} away from {a}.",
        "Solve {a} - {b}.",
        "Tell me what {a} - {b} is.",
        "What do you get when you subtract {b} from {a}?",
        "what's {a}-{b}?",
        "Do you know what {a} minus {b} is?",
        "Can you subtract {b} from {a}?",
        "{b} subtracted from {a}",
        "How much is {b} subtracted from {a}?",
        "If {b} is subtracted from {a}, what is left?",
        "Tell me what {b} subtracted from {a} is.",
        "What is {b} taken away from {a}?",
        "What does {a} minus {b} equal?",
        "{a} minus {b} equals what?",
        "Please subtract {b} from {a}.",
        "What is left of {a} when you take away {b}?",
        "What is the difference between {a} and {b}?",
    ),
    (
        "Can you tell me what {a} - {b} is?",
        "What does {a} - {b} equal?",
        "Please calculate {a} minus {b}.",
        "How much is left when you take {b} away from {a}?",
        "Give me {a} - {b}.",
        "What is {b} subtracted from {a}?",
        "Could you subtract {b} from {a} for me?",
    ),
)
MUL = Phrases(
    (
        "What is {a} x {b}?",
        "{a} x {b}",
        "{a}*{b}",
        "{a} * {b}",
        "{a} x {b} = ?",
        "How much is {a} x {b}?",
        "What is {a} times {b}?",
        "How much is {a} times {b}?",
        "Multiply {a} by {b}.",
        "{a} times {b}",
        "Calculate {a} x {b}.",
        "Compute {a} * {b}.",
        "What is the product of {a} and {b}?",
        "Solve {a} x {b}.",
        "Tell me what {a} times {b} is.",
        "What is {a} multiplied by {b}?",
        "what's {a}*{b}?",
        "What is {a} * {b}?",
        "Please multiply {a} by {b}.",
        "Could you multiply {a} and {b}?",
        "I want you to multiply {a} by {b}.",
        "Multiply {a} and {b}.",
        "What does {a} x {b} equal?",
        "{a} times {b} equals what?",
        "What does {a} multiplied by {b} equal?",
        "Tell me the product of {a} and {b}.",
        "Do you know what {a} times {b} is?",
        "I have {a} boxes with {b} books each. How many books are there?",
    ),
    (
        "Can you tell me what {a} x {b} is?",
        "What does {a} times {b} equal?",
        "Please calculate the product of {a} and {b}.",
        "Can you multiply {a} by {b}?",
        "Give me {a} x {b}.",
        "How much is {a} multiplied by {b}?",
        "Could you multiply {a} by {b} for me?",
    ),
)
CONVERT = Phrases(
    (
        "Convert {n} {u} to {v}.",
        "How many {v} are {n} {u}?",
        "How many {v} are in {n} {u}?",
        "What is {n} {u} in {v}?",
        "{n} {u} in {v}",
        "Change {n} {u} into {v}.",
        "Express {n} {u} in {v}.",
        "{n} {u} to {v}",
        "How much is {n} {u} in {v}?",
        "Tell me how many {v} {n} {u} are.",
        "{n} {u} is how many {v}?",
    ),
    (
        "Can you convert {n} {u} to {v}?",
        "Please convert {n} {u} into {v}.",
        "Turn {n} {u} into {v}.",
        "Do you know how many {v} are in {n} {u}?",
    ),
)
LARGER = Phrases(
    (
        "Which is {w}, {a} or {b}?",
        "Which number is {w}, {a} or {b}?",
        "What is {w}: {a} or {b}?",
        "Tell me which is {w}: {a} or {b}.",
        "{a} or {b}, which is {w}?",
        "Is {a} or {b} {w}?",
        "Which of {a} and {b} is {w}?",
        "Compare {a} and {b}: which is {w}?",
        "Which number is {w} of {a} and {b}?",
        "Of the numbers {a} and {b}, which one is {w}?",
        "Look at {a} and {b}. Which is {w}?",
        "Of {a} and {b}, tell me the one that is {w}.",
        "Which of the two numbers {a} and {b} is {w}?",
        "Between {a} and {b}, which is {w}?",
    ),
    (
        "Of {a} and {b}, which is {w}?",
        "Which one is {w}, {a} or {b}?",
        "Which of the numbers {a} and {b} is {w}?",
        "Compare {a} with {b}. Which one is {w}?",
    ),
)
PARITY = Phrases(
    (
        "Is {a} even or odd?",
        "Is the number {a} odd or even?",
        "{a}: even or odd?",
        "Tell me whether {a} is even or odd.",
        "Is {a} odd or even?",
        "Is {a} an even number?",
        "Is {a} an odd number?",
    ),
    (
        "Is the number {a} even or odd?",
        "Do you know whether {a} is odd or even?",
        "Tell me if {a} is even or odd.",
    ),
)
COUNT = Phrases(
    (
        "Count from {a} to {b}.",
        "Count {a} to {b}.",
        "Please count from {a} to {b}.",
        "Can you count from {a} to {b}?",
        "List the numbers from {a} to {b}.",
        "Give me the numbers from {a} to {b}.",
        "Count from {a} up to {b}.",
        "Write the numbers from {a} to {b}.",
    ),
    (
        "Tell me the numbers from {a} to {b}.",
        "Could you count from {a} to {b}?",
        "I want you to count from {a} to {b}.",
    ),
)
COUNT_DOWN = Phrases(
    (
        "Count down from {a} to {b}.",
        "Count backwards from {a} to {b}.",
        "Can you count down from {a} to {b}?",
        "Please count down from {a} to {b}.",
        "Count back from {a} to {b}.",
    ),
    ("Could you count down from {a} to {b}?", "I want you to count backwards from {a} to {b}."),
)
# Unit, smaller unit, factor, greatest number asked for.
UNITS: tuple[tuple[str, str, int, int], ...] = (
    ("kilometers", "meters", 1000, 999),
    ("km", "m", 1000, 999),
    ("meters", "centimeters", 100, 999),
    ("m", "cm", 100, 999),
    ("centimeters", "millimeters", 10, 999),
    ("cm", "mm", 10, 999),
    ("kilograms", "grams", 1000, 999),
    ("kg", "g", 1000, 999),
    ("liters", "milliliters", 1000, 999),
    ("euros", "cents", 100, 999),
    ("dollars", "cents", 100, 999),
    ("tons", "kilograms", 1000, 999),
    ("hours", "minutes", 60, 24),
    ("minutes", "seconds", 60, 60),
    ("days", "hours", 24, 14),
    ("weeks", "days", 7, 52),
    ("years", "months", 12, 20),
    ("feet", "inches", 12, 20),
    ("dozens", "pieces", 12, 20),
)


def _operand(rng: random.Random) -> int:
    dice = rng.random()
    if dice < 0.15:
        return rng.randrange(0, 10)
    if dice < 0.45:
        return rng.randrange(0, 100)
    return rng.randrange(0, 1000)


def _accept_pair(split: Split, sign: str, a: int, b: int) -> bool:
    if max(a, b) < 10:  # the small table is always taught
        return split is not Split.ITEMS
    return accept(split, f"{a}{sign}{b}")


def add(rng: random.Random, split: Split) -> Item:
    """A sum of two numbers."""
    while True:
        a = _operand(rng)
        b = _operand(rng)
        if _accept_pair(split, "+", a, b):
            question = vary(rng, ADD.pick(rng, split).format(a=a, b=b))
            return Item("addition", ((question, f"{a} + {b} = {a + b}."),))


def sub(rng: random.Random, split: Split) -> Item:
    """A difference, which may be negative."""
    while True:
        a = _operand(rng)
        b = _operand(rng)
        if a < b and rng.random() < 0.7:  # most, but not all, differences are positive
            a, b = b, a
        if _accept_pair(split, "-", a, b):
            question = vary(rng, SUB.pick(rng, split).format(a=a, b=b))
            return Item("subtraction", ((question, f"{a} - {b} = {a - b}."),))


def mul(rng: random.Random, split: Split) -> Item:
    """A product of numbers up to twelve."""
    a = rng.randrange(0, 13)
    b = rng.randrange(0, 13)
    question = vary(rng, MUL.pick(rng, split).format(a=a, b=b))
    return Item("multiplication", ((question, f"{a} x {b} = {a * b}."),))


def convert(rng: random.Random, split: Split) -> Item:
    """A quantity in another unit."""
    while True:
        unit, smaller, factor, top = rng.choice(UNITS)
        n = rng.randrange(2, top + 1) if rng.random() < 0.6 else rng.randrange(2, min(top, 30) + 1)
        # Powers of ten generalise to unseen numbers; the other tables are small and taught whole.
        if factor % 10 or factor == 60:
            if split is Split.ITEMS:
                continue
        elif not accept(split, f"{n} {unit}"):
            continue
        question = CONVERT.pick(rng, split).format(n=n, u=unit, v=smaller)
        return Item(
            "unit conversion", ((vary(rng, question), f"{n} {unit} = {n * factor} {smaller}."),)
        )


def compare(rng: random.Random, split: Split) -> Item:
    """Which of two numbers is larger or smaller, or whether one is even."""
    while True:
        a = _operand(rng)
        b = _operand(rng)
        if rng.random() < 0.4:
            if _accept_pair(split, "even", a, a):
                question = PARITY.pick(rng, split).format(a=a)
                answer = f"{a} is {'odd' if a % 2 else 'even'}."
                return Item("comparison", ((vary(rng, question), answer),))
        elif a != b and _accept_pair(split, "<", a, b):
            large = rng.random() < 0.5
            word = rng.choice(("larger", "greater", "bigger") if large else ("smaller", "less"))
            first, second = (max(a, b), min(a, b)) if large else (min(a, b), max(a, b))
            question = LARGER.pick(rng, split).format(a=a, b=b, w=word)
            than = "larger" if large else "smaller"
            return Item("comparison", ((vary(rng, question), f"{first} is {than} than {second}."),))


def count(rng: random.Random, split: Split) -> Item:
    """Counting up or down."""
    while True:
        low = rng.choice((0, 1, 1, rng.randrange(0, 90)))
        high = low + rng.randrange(2, 21)
        down = rng.random() < 0.25
        first, last = (high, low) if down else (low, high)
        if not accept(split, f"count {first} {last}"):
            continue
        numbers = range(low, high + 1)
        ordered = reversed(numbers) if down else numbers
        question = (COUNT_DOWN if down else COUNT).pick(rng, split).format(a=first, b=last)
        return Item("counting", ((vary(rng, question), ", ".join(map(str, ordered))),))
