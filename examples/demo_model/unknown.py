"""The family of questions that the model was never taught to answer: it says so."""

from __future__ import annotations

import random

from arithmetic import ADD, MUL, SUB
from core import Item, Phrases, Split, vary
from words import ANIMALS, FOODS, NAMES, OBJECTS, PLACES, WORDS, made_up_word

UNKNOWN = (
    "I am a small demo model, so I do not know that. You can ask me to add "
    "numbers, spell a word, sort a list, name a capital or tell a short story."
)

TOO_LARGE = (
    "These numbers are too large for me. I can add and subtract numbers of up to three digits, "
    "and multiply up to 12 x 12."
)

_TOPICS = """quantum physics, the stock market, climate change, the Roman Empire, machine learning,
black holes, chess openings, jazz music, modern art, the French Revolution, compilers, databases,
the
human brain, cooking, football, tennis, economics, philosophy, astronomy, genetics, the Python
language, operating systems, politics, photography, gardening, tax law, insurance, the internet,
electric cars, vaccines, poetry, opera, dinosaurs, volcanoes, bitcoin, sailing, Mozart,
Einstein, Shakespeare, Napoleon, Cleopatra, the moon landing, algebra, calculus, statistics,
chemistry, biology, yoga, architecture, history, religion, love, the meaning of life, my
computer, my car, my job, the news, the weather"""
TOPICS = tuple(" ".join(topic.split()) for topic in _TOPICS.split(","))

UNKNOWN_QUESTIONS = Phrases(
    (
        "Explain {t}.",
        "Explain {t} to me.",
        "What do you think about {t}?",
        "Write an essay about {t}.",
        "How does {t} work?",
        "Tell me everything about {t}.",
        "Can you explain {t}?",
        "Give me a summary of {t}.",
        "Write a poem about {t}.",
        "What is your opinion on {t}?",
        "Who invented {t}?",
        "Why is {t} important?",
        "Teach me {t}.",
        "What is {t}?",
        "Who won the world cup in {y}?",
        "Who was president in {y}?",
        "What happened in {y}?",
        "What will happen in {y}?",
        "Where can I buy {o}?",
        "How much does {o} cost?",
        "Write a program that prints {o}.",
        "Translate {w} into Latin.",
        "Translate {w} into French.",
        "Who is {n}?",
        "What is the phone number of {n}?",
        "How old is {n}?",
        "Where does {n} live?",
        "What is the capital of {m}?",
        "What is the weather like in {p}?",
        "Will it rain tomorrow?",
        "What time is it?",
        "What is the date today?",
        "What is the best book about {t}?",
        "How do I repair {o}?",
        "How do I cook {f}?",
        "How do I make {f}?",
        "How do I grow {f}?",
        "How do I paint {o}?",
        "How can I bake {f}?",
        "How do you bake {f}?",
        "How do I open {o}?",
        "How do I learn {t}?",
        "How can I find {o}?",
        "Give me a recipe for {f}.",
        "Why do I like {f}?",
        "What does {m} mean?",
        "Define {m}.",
        "Sing me a song about {t}.",
        "Play some music.",
        "Book a flight to {m}.",
        "What is the population of {m}?",
        "How tall is {n}?",
        "Which film is the best?",
        "Tell me a joke about {t}.",
        "Tell me a joke.",
        "Draw {o}.",
        "Is {t} difficult?",
        "Do you like {t}?",
        "What is the square root of {y}?",
        "Should I learn {t}?",
        "Where is {m}?",
        "What is the history of {o}?",
        "Recommend a good restaurant.",
        "What should I do today?",
        "{m} {m2}?",
        "{m} {m2} {w}",
        "How far is it to {m}?",
        "When was {n} born?",
        "What did {n} say yesterday?",
        "Why is the sky so high?",
        "How does {o} work?",
    ),
    (
        "Please explain {t}.",
        "What do you know about {t}?",
        "Write a long text about {t}.",
        "Who discovered {t}?",
        "Who won the election in {y}?",
        "How expensive is {o}?",
        "Translate {w} into Greek.",
        "What is the address of {n}?",
        "How do I bake {f}?",
        "How do I clean {o}?",
        "Is {t} interesting?",
        "Do you understand {t}?",
        "Write a song about {t}.",
    ),
)


def unknown(rng: random.Random, split: Split) -> Item:
    """Something the model was never taught: it says so."""
    if rng.random() < 0.2:
        return _too_large(rng, split)
    pools = (WORDS, ANIMALS, OBJECTS, PLACES)
    question = UNKNOWN_QUESTIONS.pick(rng, split).format(
        t=rng.choice(TOPICS) if rng.random() < 0.8 else rng.choice(WORDS) + "s",
        y=rng.randrange(1500, 2100),
        o="a " + rng.choice(OBJECTS),
        f=rng.choice(FOODS),
        w=rng.choice(rng.choice(pools)),
        n=rng.choice(NAMES) + " " + made_up_word(rng).capitalize(),
        p=made_up_word(rng).capitalize(),
        m=made_up_word(rng, 2, 3).capitalize(),
        m2=made_up_word(rng),
    )
    return Item("not known", ((vary(rng, question), UNKNOWN),))


def _too_large(rng: random.Random, split: Split) -> Item:
    """A sum, difference or product beyond what is taught."""
    phrases, low, high = rng.choice(((ADD, 1000, 99999), (SUB, 1000, 99999), (MUL, 13, 9999)))
    a = rng.randrange(low, high)
    b = rng.randrange(1, high)
    if phrases is MUL and rng.random() < 0.5:
        a = rng.randrange(13, 100)
        b = rng.randrange(2, 100)
    if rng.random() < 0.5:
        a, b = b, a
    question = phrases.pick(rng, split).format(a=a, b=b)
    return Item("not known", ((vary(rng, question), TOO_LARGE),))
