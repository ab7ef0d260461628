"""Families of small talk: greetings and names."""

from __future__ import annotations

import random

from core import Item, Phrases, Split
from words import NAMES

HELLO = "Hello! How can I help you today?"
GREETINGS: tuple[tuple[str, Phrases], ...] = (
    (
        HELLO,
        Phrases(
            (
                "Hello",
                "Hello!",
                "Hi",
                "Hi!",
                "Hey",
                "Hey!",
                "Hi there",
                "Hello there!",
                "Hello, model!",
                "Greetings!",
                "Hi, nice to see you.",
                "Hello again",
                "Hey you",
                "Good day!",
                "Hello, can you hear me?",
                "Hello, are you there?",
                "Hi, can you help me?",
                "I need some help.",
                "Can you help me?",
                "Hello, Radix!",
                "Hi Radix",
                "Hello world",
                "Hi, nice to meet you.",
                "Hello, I need help.",
                "Hey, can you help me?",
                "Hey hey",
                "Hi hi!",
                "Hello, nice to meet you!",
            ),
            (
                "Hey there!",
                "Hi again!",
                "Hello, nice to see you!",
                "Hi there, can you help me?",
                "Hey Radix",
            ),
        ),
    ),
    (
        "Good morning! How can I help you?",
        Phrases(
            (
                "Good morning",
                "Good morning!",
                "Hello, good morning!",
                "Morning!",
                "Good morning, Radix.",
                "A very good morning to you!",
            ),
            ("Hi, good morning!", "Good morning to you!"),
        ),
    ),
    (
        "Good afternoon! How can I help you?",
        Phrases(
            (
                "Good afternoon",
                "Good afternoon!",
                "Hello, good afternoon!",
                "Good afternoon, Radix.",
                "A very good afternoon to you!",
            ),
            ("Hi, good afternoon!", "Good afternoon to you!"),
        ),
    ),
    (
        "Good evening! How can I help you?",
        Phrases(
            (
                "Good evening",
                "Good evening!",
                "Hello, good evening!",
                "Good evening, Radix.",
                "A very good evening to you!",
            ),
            ("Hi, good evening!", "Good evening to you!"),
        ),
    ),
    (
        "Good night! Sleep well.",
        Phrases(
            (
                "Good night",
                "Good night!",
                "I am going to bed. Good night!",
                "Good night, Radix.",
                "Time to sleep.",
                "I am going to sleep.",
                "I go to bed now.",
            ),
            ("Good night to you!", "I am going to bed."),
        ),
    ),
    (
        "I am fine, thank you! What can I do for you?",
        Phrases(
            (
                "How are you?",
                "How are you today?",
                "How are you doing?",
                "Hello, how are you?",
                "Hi! How are you doing today?",
                "Are you well?",
                "How do you feel?",
                "How are you feeling?",
                "How do you feel now?",
                "How is it going?",
                "Hey, how are you?",
            ),
            ("Hi, how are you today?", "Hello, how are you doing?", "How do you feel today?"),
        ),
    ),
    (
        "You are welcome! Is there anything else I can do?",
        Phrases(
            (
                "Thanks",
                "Thank you",
                "Thank you!",
                "Thanks a lot!",
                "Thank you very much.",
                "Thanks, that was helpful.",
                "Great, thank you!",
                "Many thanks",
                "Thank you for your help.",
                "Thanks for the answer.",
            ),
            ("Thank you so much!", "Great, thanks!", "Thanks for your help."),
        ),
    ),
    (
        "Goodbye! Have a nice day.",
        Phrases(
            (
                "Bye",
                "Bye!",
                "Goodbye",
                "Goodbye!",
                "See you later!",
                "See you tomorrow.",
                "Bye bye!",
                "I have to go now.",
                "See you!",
                "Bye, see you soon!",
                "Bye then!",
                "I have to go, goodbye!",
                "I must go. Bye!",
                "Goodbye, Radix.",
                "Bye, have a nice day!",
            ),
            ("Bye for now!", "Goodbye, see you later!", "I have to go. Bye!"),
        ),
    ),
)


def greeting(rng: random.Random, split: Split) -> Item:
    """A greeting, thanks or goodbye, or the user's name."""
    if rng.random() < 0.2:
        return _introduction(rng, split)
    answer, phrases = rng.choice(GREETINGS)
    text = phrases.pick(rng, split)
    if rng.random() < 0.3:
        text = text.lower()
    elif rng.random() < 0.2:
        text = text.rstrip(".!?")
    return Item("greetings", ((text, answer),))


MY_NAME = Phrases(
    (
        "My name is {n}.",
        "I am called {n}.",
        "Hello, my name is {n}.",
        "Hi! My name is {n}.",
        "Hello, I am {n}.",
        "I'm {n}.",
        "Good morning, my name is {n}.",
        "Good afternoon, my name is {n}.",
        "Good day, I am {n}.",
        "Good day! I'm {n}.",
        "Good evening, I am {n}.",
        "Good morning! I am {n}.",
        "Greetings, my name is {n}.",
        "Hello there, my name is {n}.",
        "Hello there! I'm {n}.",
        "Hi there, I am {n}.",
        "Hey, I'm {n}.",
        "Hello Radix, I am {n}.",
        "Hi Radix, my name is {n}.",
        "You can call me {n}.",
        "Call me {n}.",
        "My friends call me {n}.",
        "People call me {n}.",
        "The name is {n}.",
        "This is {n}.",
        "This is {n} speaking.",
        "I go by {n}.",
    ),
    (
        "Good day, my name is {n}.",
        "Hi, I am {n}.",
        "Hey, my name is {n}.",
        "Good evening, my name is {n}.",
        "Hey there, I'm {n}.",
        "Please call me {n}.",
    ),
)
ASK_NAME = Phrases(
    (
        "What is my name?",
        "Do you remember my name?",
        "Who am I?",
        "What's my name?",
        "Say my name.",
    ),
    ("Do you know my name?", "Tell me my name.", "Can you say my name?"),
)


def _introduction(rng: random.Random, split: Split) -> Item:
    name = rng.choice(NAMES)
    return Item(
        "greetings",
        (
            (
                MY_NAME.pick(rng, split).format(n=name),
                f"Nice to meet you, {name}! How can I help you?",
            ),
        ),
    )


def remember_name(rng: random.Random, split: Split) -> Item:
    """The user says a name, and asks for it in the next turn."""
    turns = _introduction(rng, split).turns
    name = turns[0][1].split(", ")[1].split("!")[0]
    return Item("follow-ups", (*turns, (ASK_NAME.pick(rng, split), f"Your name is {name}.")))
