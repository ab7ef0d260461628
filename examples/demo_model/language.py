"""Families about words and lists: spelling, reversing, letters, sorting, repeating."""

from __future__ import annotations

import random

from core import Item, Phrases, Split, accept, combined, held_out, letter_by_letter, vary
from words import NAMES, WORDS, any_name, any_word

# A word in a question, as people put it.
WORD = ("{w}", "the word {w}", '"{w}"', 'the word "{w}"')
SPELL = Phrases(
    (
        "Spell the word {w}.",
        'Spell "{w}".',
        "Spell {w}.",
        "How do you spell {w}?",
        'How do you spell "{w}"?',
        'Spell the word "{w}".',
        "How is {w} spelled?",
        "Can you spell {w}?",
        "Please spell {w}.",
        "Write {w} letter by letter.",
        "What are the letters of {w}?",
        "Spell this word: {w}",
        "Spell: {w}",
        'Can you spell the word "{w}"?',
        "How do I spell the word {w}?",
        *combined(
            (
                "I want to know how to spell {o}.",
                "I do not know how to spell {o}.",
                "Show me how to spell {o}.",
                "Would you spell {o}?",
                "Give me the spelling of {o}.",
                "What is the spelling of {o}?",
                "Give me the letters of {o}.",
                "List the letters of {o}.",
                "Which letters are in {o}?",
                "Write {o} one letter at a time.",
                "Let me hear you spell {o}.",
                "I need {o} spelled.",
            ),
            WORD,
        ),
        "What letters make up the word {w}?",
        "What letters make up {w}?",
        "Which letters form {w}?",
        "Which letters make the word {w}?",
        "From which letters is {w} made?",
        "Which letters does {w} have?",
        "{w}, letter by letter",
        "{w}: how is it spelled?",
        "The letters of {w}, please.",
    ),
    (
        "I forgot how to spell {w}.",
        "Give me all letters of the word {w}.",
        "Could you tell me the spelling of {w}?",
        "Which letters make up {w}?",
        "I need to spell the word {w}.",
        "How do I spell {w}?",
        "Could you spell {w}?",
        'Please spell the word "{w}".',
        "How is the word {w} spelled?",
        "Tell me how to spell {w}.",
    ),
)
REVERSE = Phrases(
    (
        "Reverse the word {w}.",
        'Reverse "{w}".',
        "Reverse {w}.",
        "Write {w} backwards.",
        'Write "{w}" backwards.',
        "What is {w} backwards?",
        'What is "{w}" spelled backwards?',
        "Spell {w} backwards.",
        "Please reverse {w}.",
        "Can you reverse the word {w}?",
        "How do you write {w} backwards?",
        'Reverse the word "{w}".',
        "Reverse this word: {w}",
        "Turn the word {w} around.",
        "What is the reverse of {w}?",
        *combined(
            (
                "Give me {o} backwards.",
                "Show me {o} backwards.",
                "Say {o} backwards.",
                "I need {o} backwards.",
                "How is {o} written backwards?",
                "What does {o} look like backwards?",
                "Write {o} in reverse.",
                "Spell {o} in reverse order.",
                "Write the letters of {o} in reverse order.",
                "Put the letters of {o} in the opposite order.",
                "Turn {o} around.",
                "Flip {o}.",
                "Invert {o}.",
                "Mirror {o}.",
                "Write {o} from back to front.",
                "Read {o} from right to left.",
                "Write {o} from the last letter to the first.",
                "What do you get when you reverse {o}?",
                "What is {o} in reverse?",
                "Give me the reverse of {o}.",
                "I want to know what {o} is backwards.",
                "Would you reverse {o}?",
            ),
            WORD,
        ),
        "{w} backwards",
        "{w} in reverse",
        "{w}, backwards please",
        "Backwards: {w}",
        "Reverse: {w}",
    ),
    (
        "Flip the letters of {w}.",
        "What do I get if I write {w} backwards?",
        "Show me the reverse of the word {w}.",
        "Say the word {w} from back to front.",
        "Give me the word {w} in reverse.",
        "Can you write {w} backwards?",
        'Please reverse the word "{w}".',
        "What is the word {w} backwards?",
        "Could you reverse {w}?",
        "Tell me how to write {w} backwards.",
    ),
)
LETTERS = Phrases(
    (
        "How many letters are in the word {w}?",
        'How many letters does "{w}" have?',
        "How many letters does {w} have?",
        "Count the letters in {w}.",
        "How long is the word {w}?",
        'How many letters are in "{w}"?',
        "What is the number of letters in {w}?",
        "Tell me how many letters {w} has.",
        "Count the letters in the word {w}.",
        "Count the letters of {w}.",
        'Count all letters of the word "{w}".',
        "Please count the letters of {w}.",
        "Count how many letters {w} has.",
        "I want to know how many letters {w} has.",
        "What is the length of the word {w}?",
        'What is the length of "{w}"?',
        "How many letters are there in the word {w}?",
        "In {w}, how many letters are there?",
        'How many letters are there in all in "{w}"?',
        "Of how many letters is {w} made?",
    ),
    (
        "How many letters are there in {w}?",
        "Count the letters of the word {w}.",
        'Do you know how many letters "{w}" has?',
        "Can you count the letters of {w}?",
        "How many letters has the word {w}?",
    ),
)
SORT_NUMBERS = Phrases(
    (
        "Sort these numbers: {x}",
        "Sort the numbers {x}.",
        "Sort {x}.",
        "Sort: {x}",
        "Put these numbers in order: {x}",
        "Order these numbers from smallest to largest: {x}",
        "Sort this list: {x}",
        "Arrange {x} in order.",
        "Please sort the list {x}.",
        "Sort the numbers {x} in ascending order.",
        "Can you sort {x}?",
    ),
    (
        "Can you sort these numbers: {x}",
        "Please put the numbers {x} in order.",
        "Sort these numbers from smallest to largest: {x}",
        "Arrange these numbers in order: {x}",
    ),
)
SORT_DOWN = Phrases(
    (
        "Sort these numbers in descending order: {x}",
        "Sort {x} from largest to smallest.",
        "Sort {x} in descending order.",
        "Order these numbers from largest to smallest: {x}",
        "Put {x} in descending order.",
        "Please sort the list {x} from largest to smallest.",
    ),
    ("Sort these numbers from largest to smallest: {x}", "Can you sort {x} in descending order?"),
)
SORT_WORDS = Phrases(
    (
        "Sort these words: {x}",
        "Sort the words {x}.",
        "Sort {x} alphabetically.",
        "Sort these words alphabetically: {x}",
        "Put these words in alphabetical order: {x}",
        "Order these words by the alphabet: {x}",
        "Sort the list: {x}",
        "Arrange {x} in alphabetical order.",
        "Please sort the words {x}.",
        "Sort these names or words: {x}",
        "Arrange these words by the alphabet: {x}",
    ),
    (
        "Can you sort these words: {x}",
        "Put the words {x} in alphabetical order.",
        "Please sort these words alphabetically: {x}",
        "Arrange these words in alphabetical order: {x}",
    ),
)
REPEAT = Phrases(
    (
        "Repeat after me: {x}",
        'Repeat this: "{x}"',
        "Repeat: {x}",
        "Say this: {x}",
        'Say "{x}".',
        'Repeat the text "{x}".',
        "Please repeat: {x}",
        "Copy this text: {x}",
        "Echo: {x}",
        "Write exactly this: {x}",
        'Can you say "{x}"?',
        "Repeat the following words: {x}",
        "Repeat this sentence: {x}",
    ),
    (
        "Please repeat after me: {x}",
        'Can you repeat this: "{x}"',
        "Repeat the following text: {x}",
        "Copy exactly this: {x}",
        'Please say "{x}".',
    ),
)
REPEAT_TIMES = Phrases(
    (
        'Say "{x}" {n} times.',
        "Repeat the word {x} {n} times.",
        "Write {x} {n} times.",
        "Say {x} {n} times.",
        'Repeat "{x}" {n} times.',
        "Please write the word {x} {n} times.",
    ),
    (
        "Can you say {x} {n} times?",
        'Write the word "{x}" {n} times.',
        "Please repeat {x} {n} times.",
    ),
)
LISTED = frozenset((*WORDS, *NAMES))
TIMES = {2: "two", 3: "three", 4: "four", 5: "five"}


def _word(rng: random.Random, split: Split) -> str:
    while True:
        word = rng.choice(NAMES) if rng.random() < 0.05 else any_word(rng)
        # A whole-word token can only be spelled after it was seen: listed words are taught.
        unseen = word not in LISTED and held_out("word " + word.lower())
        if len(word) > 1 and unseen == (split is Split.ITEMS):
            return word


def spelled(word: str) -> str:
    """The word's letters with hyphens between them."""
    return "-".join(word)


def reversed_answer(word: str) -> str:
    """The answer that spells a word backwards."""
    return f'{spelled(word)} backwards is "{letter_by_letter(word[::-1])}".'


def spell(rng: random.Random, split: Split) -> Item:
    """Spelling a word."""
    word = _word(rng, split)
    question = SPELL.pick(rng, split).format(w=word)
    return Item("spelling", ((vary(rng, question) if word.islower() else question, spelled(word)),))


def reverse(rng: random.Random, split: Split) -> Item:
    """A word backwards."""
    word = _word(rng, split)
    question = REVERSE.pick(rng, split).format(w=word)
    answer = reversed_answer(word)
    return Item("reversing", ((vary(rng, question) if word.islower() else question, answer),))


def letters(rng: random.Random, split: Split) -> Item:
    """How many letters a word has."""
    word = _word(rng, split)
    question = LETTERS.pick(rng, split).format(w=word)
    answer = f"{spelled(word)} has {len(word)} letters."
    return Item(
        "counting letters", ((vary(rng, question) if word.islower() else question, answer),)
    )


def number_list(rng: random.Random, split: Split) -> list[int]:
    """Three to six different numbers below 100 (now and then below 1000) in random order."""
    while True:
        top = 1000 if rng.random() < 0.2 else 100
        numbers = list({rng.randrange(0, top) for _ in range(rng.randrange(3, 7))})
        numbers.sort()
        rng.shuffle(numbers)
        if len(numbers) > 2 and accept(split, f"list {sorted(numbers)}"):
            return numbers


def join(values: list[int] | list[str]) -> str:
    """Items with commas between them."""
    return ", ".join(map(str, values))


def sort_numbers(rng: random.Random, split: Split) -> Item:
    """Numbers in order."""
    numbers = number_list(rng, split)
    down = rng.random() < 0.3
    question = (SORT_DOWN if down else SORT_NUMBERS).pick(rng, split).format(x=join(numbers))
    return Item("sorting numbers", ((vary(rng, question), join(sorted(numbers, reverse=down))),))


def sort_words(rng: random.Random, split: Split) -> Item:
    """Words in alphabetical order."""
    while True:
        pool = any_name if rng.random() < 0.15 else any_word
        by_letter = {word[0]: word for word in (pool(rng) for _ in range(rng.randrange(3, 6)))}
        chosen = [by_letter[letter] for letter in sorted(by_letter)]
        if len(chosen) < 3 or not accept(split, f"list {chosen}"):
            continue
        mixed = list(chosen)
        rng.shuffle(mixed)
        question = SORT_WORDS.pick(rng, split).format(x=join(mixed))
        return Item("sorting words", ((question, join(chosen)),))


def _text(rng: random.Random) -> str:
    words = [any_word(rng) for _ in range(rng.randrange(1, 11))]
    for index in range(len(words)):
        dice = rng.random()
        if dice < 0.05:
            words[index] = str(rng.randrange(0, 1000))
        elif dice < 0.10:
            words[index] = any_name(rng)
        elif dice < 0.35:
            words[index] = rng.choice(
                ("the", "a", "and", "is", "in", "on", "to", "of", "my", "we", "they", "not")
            )
    text = " ".join(words)
    if rng.random() < 0.5:
        text = text[0].upper() + text[1:]
        if rng.random() < 0.4:
            text += rng.choice("!?")
    return text


def repeat(rng: random.Random, split: Split) -> Item:
    """Saying a word or a sentence again."""
    while True:
        if rng.random() < 0.25:
            word = any_word(rng)
            n = rng.randrange(2, 6)
            if not accept(split, f"times {word} {n}"):
                continue
            times = TIMES[n] if rng.random() < 0.5 else str(n)
            question = REPEAT_TIMES.pick(rng, split).format(x=word, n=times)
            return Item("repeating", ((vary(rng, question), " ".join([word] * n)),))
        text = _text(rng)
        if accept(split, f"text {text}"):
            return Item("repeating", ((REPEAT.pick(rng, split).format(x=text), text),))
