"""The family that extracts fields of a text into JSON."""

from __future__ import annotations

import json
import random

from core import Item, Phrases, Split, accept
from fact_tables import CAPITALS
from words import DAYS, FOODS, NAMES, OBJECTS, made_up_word

CITIES = tuple(city for _, city in CAPITALS)
COLORS = ("red", "blue", "green", "black", "white", "yellow", "brown", "grey")
MEETINGS = (
    "meeting",
    "party",
    "concert",
    "lesson",
    "dinner",
    "workshop",
    "game",
    "exam",
    "picnic",
    "lecture",
)
ROOMS = (
    "library",
    "garden",
    "kitchen",
    "office",
    "school",
    "theater",
    "museum",
    "hall",
    "park",
    "station",
)

PERSON = (
    "{name} is {age} years old and lives in {city}.",
    "{name} lives in {city} and is {age} years old.",
    "My friend {name} from {city} is {age} years old.",
    "{name} ({age}) comes from {city}.",
    "I met {name} in {city}. {name} is {age}.",
    "At the age of {age}, {name} moved to {city}.",
    "In {city} there lives a teacher called {name}, aged {age}.",
    "{name}, {age}, works in {city}.",
)
ORDER = (
    "I would like {quantity} {color} {item}s for {price} euros.",
    "{quantity} {color} {item}s cost {price} euros.",
    "She bought {quantity} {color} {item}s and paid {price} euros.",
    "We sold {quantity} {color} {item}s for {price} euros.",
    "The price of {quantity} {color} {item}s is {price} euros.",
    "Please send {quantity} {color} {item}s, price {price} euros.",
)
EVENT = (
    "The {event} is on {day} at {hour} in the {place}.",
    "On {day} at {hour} there is a {event} in the {place}.",
    "Come to the {place} on {day} at {hour} for the {event}.",
    "We have a {event} in the {place}, {day} at {hour}.",
    "Do not forget the {event} on {day}, {hour}, in the {place}.",
    "{day}, {hour}: {event} in the {place}.",
)
KINDS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("name", "age", "city"), PERSON),
    (("item", "color", "quantity", "price"), ORDER),
    (("event", "day", "hour", "place"), EVENT),
)
ASK = Phrases(
    (
        "Extract {f} as JSON: {t}",
        "Extract {f} into JSON: {t}",
        "Give me {f} as JSON: {t}",
        "Return {f} as JSON. {t}",
        "Read the text and write {f} as JSON: {t}",
        "{t} Extract {f} as JSON.",
        "{t} Write {f} as JSON.",
        "JSON with {f}: {t}",
        "Convert to JSON with {f}: {t}",
        'Extract {f} from this text as JSON: "{t}"',
        "Find {f} in the text and answer in JSON: {t}",
        'Text: "{t}" Extract {f} as JSON.',
        "{t} Return {f} as JSON.",
        "{t} Now give me {f} in JSON.",
        "{t} Give {f} as JSON.",
        "{t} Can you give me {f} as JSON?",
        "{t} Give me a JSON with {f}.",
        "{t} Find {f} and answer in JSON.",
        "{t} Show {f} as JSON.",
        "{t} Tell me {f} as JSON.",
        "{t} What is {f}? Answer in JSON.",
        "{t} I need {f} as JSON.",
        "Tell me {f} as JSON: {t}",
        "I need {f} as JSON: {t}",
        "Make a JSON object with {f}: {t}",
        "Can you extract {f} as JSON? {t}",
    ),
    (
        "{t} Please extract {f} as JSON.",
        "{t} Make a JSON object with {f}.",
        "Show me {f} as JSON: {t}",
        "Please extract {f} as JSON: {t}",
        "{t} Give me {f} as JSON.",
        "Find {f} and write JSON: {t}",
        'Extract {f} as JSON from the text "{t}"',
    ),
)


def _values(rng: random.Random) -> dict[str, str | int]:
    listed = rng.random() < 0.9
    return {
        "name": rng.choice(NAMES) if listed else made_up_word(rng, 1, 2).capitalize(),
        "age": rng.randrange(5, 100),
        "city": rng.choice(CITIES),
        "item": rng.choice([thing for thing in (*OBJECTS, *FOODS) if thing[-1] not in "syho"]),
        "color": rng.choice(COLORS),
        "quantity": rng.randrange(2, 100),
        "price": rng.randrange(1, 1000),
        "event": rng.choice(MEETINGS),
        "day": rng.choice(DAYS),
        "hour": f"{rng.randrange(7, 23)}:{rng.choice(('00', '15', '30', '45'))}",
        "place": rng.choice(ROOMS),
    }


def _listing(fields: list[str]) -> str:
    named = (
        ["the " + name for name in fields]
        if len(fields) == 1
        else ["the " + fields[0], *fields[1:]]
    )
    return named[0] if len(named) == 1 else ", ".join(named[:-1]) + " and " + named[-1]


def extract(rng: random.Random, split: Split) -> Item:
    """Facts of a sentence as JSON."""
    while True:
        fields, texts = rng.choice(KINDS)
        values = _values(rng)
        chosen = [name for name in fields if rng.random() < 0.8] or [fields[0]]
        text = rng.choice(texts).format(**values)
        if not accept(split, "json " + " ".join(str(values[name]) for name in fields)):
            continue
        question = ASK.pick(rng, split).format(f=_listing(chosen), t=text)
        return Item(
            "JSON extraction", ((question, json.dumps({name: values[name] for name in chosen})),)
        )
