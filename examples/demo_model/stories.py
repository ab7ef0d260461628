"""The family of short templated stories and the checker that recognises one."""

from __future__ import annotations

import random
import re

from core import Item, Phrases, Split, accept, with_article
from words import ANIMALS, NAMES

HEROES = tuple(ANIMALS)
PLACES = (
    "forest",
    "village",
    "garden",
    "castle",
    "meadow",
    "valley",
    "harbor",
    "desert",
    "market",
    "library",
    "kitchen",
    "barn",
    "cave",
    "tower",
    "city",
    "jungle",
    "swamp",
    "field",
    "mill",
    "lighthouse",
)
TRAITS = (
    "small",
    "brave",
    "shy",
    "clever",
    "gentle",
    "kind",
    "quick",
    "quiet",
    "happy",
    "lazy",
    "curious",
    "proud",
    "hungry",
    "young",
    "old",
    "polite",
)
FINDS = (
    "a golden key",
    "an old map",
    "a silver bell",
    "a strange letter",
    "a shiny coin",
    "a little boat",
    "a red balloon",
    "a wooden box",
    "a blue stone",
    "a broken kite",
)
FRIENDS = tuple(animal for animal in ANIMALS if animal not in ("ant", "bee", "crab"))

ASK = Phrases(
    (
        "Tell me a story about {h}.",
        "Tell me a short story about {h}.",
        "Write a story about {h}.",
        "Write a short story about {h}.",
        "Can you tell me a story about {h}?",
        "I want a story about {h}.",
        "Please tell me a story about {h}.",
        "Tell a story about {h}.",
        "Story about {h}",
        "Make up a story about {h}.",
        "Give me a story about {h}.",
        "Do you know a story about {h}?",
    ),
    (
        "Please write a story about {h}.",
        "Could you tell me a short story about {h}?",
        "I want to hear a story about {h}.",
        "Make up a short story about {h}.",
    ),
)
ASK_ANY = Phrases(
    (
        "Tell me a story.",
        "Tell me a short story.",
        "Can you tell me a story?",
        "Write a short story.",
        "Tell a story",
        "I want to hear a story.",
        "Please tell me a story.",
        "Do you know a story?",
    ),
    ("Could you tell me a story?", "Please tell me a short story.", "Write me a story."),
)
FIRST = "Once upon a time there was {hero} called {name} who lived in {place}."
SECOND = (
    "One morning {name} found {find} under a tree.",
    "One day {name} found {find} near the river.",
    "One evening {name} found {find} behind the house.",
)
THIRD = (
    "{name} did not know what to do with it, so {name} asked {friend}.",
    "{name} wanted to show it to a friend and went to {friend}.",
    "{name} was very surprised and called {friend}.",
)
FOURTH = (
    "Together they looked for the owner all day long.",
    "They sat down and talked about it until the sun went down.",
    "The two of them decided to keep it safe and to share it.",
)
LAST = (
    "In the end everyone was happy, and {name} slept well that night.",
    "From that day on they were the best of friends.",
    "And if you listen at night, you can still hear {name} laugh.",
)


def tell(rng: random.Random, hero: str, trait: str, place: str) -> str:
    """A story of five sentences about `hero`."""
    name = rng.choice(NAMES)
    friend = rng.choice(FRIENDS)
    while friend == hero:
        friend = rng.choice(FRIENDS)
    values = {
        "hero": with_article(f"{trait} {hero}"),
        "name": name,
        "place": with_article(place),
        "find": rng.choice(FINDS),
        "friend": with_article(friend),
    }
    parts = (FIRST, rng.choice(SECOND), rng.choice(THIRD), rng.choice(FOURTH), rng.choice(LAST))
    return " ".join(part.format(**values) for part in parts)


def story(rng: random.Random, split: Split) -> Item:
    """A short story about a hero and a place."""
    while True:
        hero = rng.choice(HEROES)
        trait = rng.choice(TRAITS)
        place = rng.choice(PLACES)
        if not accept(split, f"story {hero} {trait}") or not accept(Split.TRAIN, f"place {place}"):
            continue
        dice = rng.random()
        if split is not Split.ITEMS and dice < 0.15:
            question = ASK_ANY.pick(rng, split)
        elif split is not Split.ITEMS and dice < 0.5:
            question = ASK.pick(rng, split).format(h=with_article(hero))
        elif dice < 0.75:
            question = ASK.pick(rng, split).format(h=with_article(f"{trait} {hero}"))
        else:
            question = ASK.pick(rng, split).format(
                h=f"{with_article(f'{trait} {hero}')} in {with_article(place)}"
            )
        return Item("stories", ((question, tell(rng, hero, trait, place)),))


def _any_of(values: tuple[str, ...], group: str) -> str:
    return f"(?P<{group}>" + "|".join(re.escape(value) for value in values) + ")"


def _pattern() -> re.Pattern[str]:
    name = "(?P=name)"
    head = (
        f"Once upon a time there was an? {_any_of(TRAITS, 'trait')} "
        f"{_any_of(HEROES, 'hero')} called "
        f"(?P<name>[A-Z][a-z]+) who lived in an? {_any_of(PLACES, 'place')}\\."
    )
    slots = {
        "find": _any_of(FINDS, "find"),
        "friend": f"an? {_any_of(FRIENDS, 'friend')}",
        "name": name,
    }
    sentences = [head]
    for index, choices in enumerate((SECOND, THIRD, FOURTH, LAST)):
        options = []
        for number, choice in enumerate(choices):
            text = re.escape(choice).replace(r"\{", "{").replace(r"\}", "}")
            for slot, expression in slots.items():
                text = text.replace(
                    "{" + slot + "}", expression.replace("?P<", f"?P<o{index}{number}")
                )
            options.append(text)
        sentences.append("(?:" + "|".join(options) + ")")
    return re.compile(" ".join(sentences))


_STORY = _pattern()


def is_story(question: str, answer: str) -> bool:
    """Five known sentences in order, one name throughout, and what the question asked for."""
    match = _STORY.fullmatch(answer)
    if match is None:
        return False
    asked = question.split("tory about ", 1)[1] if "tory about " in question else ""
    words = re.findall("[a-z]+", asked)
    place_asked = words[words.index("in") + 2] if "in" in words else None
    wanted = words[: words.index("in")] if "in" in words else words
    hero_asked = [word for word in wanted if word in HEROES]
    trait_asked = [word for word in wanted if word in TRAITS]
    return (
        (place_asked is None or match["place"] == place_asked)
        and all(word == match["hero"] for word in hero_asked)
        and all(word == match["trait"] for word in trait_asked)
    )
