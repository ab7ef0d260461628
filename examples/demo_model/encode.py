"""Conversations as token ids: the chat format, answer weights and packed training rows."""

from __future__ import annotations

import random

import numpy as np
from core import TOKEN_EDGE
from data import Conversation, long_conversation, short_conversation
from tokenizer import END_OF_TEXT, IM_END, IM_START
from tokenizers import Tokenizer

Encoded = tuple[list[int], list[float]]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def prompt_text(messages: list[dict[str, str]]) -> str:
    """The same text that the chat template gives, ready for an answer."""
    parts = [f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages]
    return "".join(parts) + f"{IM_START}assistant\n"


def prompt_ids(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """The prompt's token ids."""
    return _ids(tokenizer, prompt_text(conversation.messages()))


def encode(tokenizer: Tokenizer, conversation: Conversation) -> Encoded:
    """Ids and, for each id, its weight as a target: 0 outside answers, in them 1/sqrt(length)."""
    ids: list[int] = []
    weights: list[float] = []

    def add(text: str, target: bool, end: str = "") -> None:
        piece = [i for part in text.split(TOKEN_EDGE) for i in _ids(tokenizer, part)]
        piece += _ids(tokenizer, end)
        ids.extend(piece)
        weights.extend([len(piece) ** -0.5 if target else 0.0] * len(piece))

    if conversation.items[0].plain:
        start, rest = conversation.turns[0]
        add(start, False)
        add(rest, True, END_OF_TEXT)
        return ids, weights
    head = (
        "" if conversation.system is None else f"{IM_START}system\n{conversation.system}{IM_END}\n"
    )
    for question, answer in conversation.turns:
        add(f"{head}{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n", False)
        add(answer, True, IM_END)
        head = "\n"
    return ids, weights


def pack(samples: list[Encoded], rows: int, width: int) -> dict[str, np.ndarray]:
    """Samples side by side in rows of `width`: ids, weights, positions and the sample's number.

    First fit; what no longer fits is left out. Arrays are [rows, width]; number 0 is padding.
    """
    ids = np.zeros((rows, width), np.uint16)
    weights = np.zeros((rows, width), np.float16)
    positions = np.zeros((rows, width), np.uint16)
    number = np.zeros((rows, width), np.uint8)
    used = [0] * rows
    count = [0] * rows
    first = 0
    for tokens, weight in samples:
        n = len(tokens)
        row = next((r for r in range(first, rows) if used[r] + n <= width), None)
        if row is None:
            continue
        at = slice(used[row], used[row] + n)
        count[row] += 1
        ids[row, at] = tokens
        weights[row, at] = weight
        positions[row, at] = np.arange(n)
        number[row, at] = count[row]
        used[row] += n
        while first < rows and used[first] > width - 12:
            first += 1
    return {"ids": ids, "weights": weights, "positions": positions, "number": number}


def short_rows(
    tokenizer: Tokenizer, rng: random.Random, rows: int, width: int
) -> dict[str, np.ndarray]:
    """`rows` rows filled with short conversations."""
    samples: list[Encoded] = []
    total = 0
    while total < rows * width:
        sample = encode(tokenizer, short_conversation(rng))
        if len(sample[0]) <= width:
            samples.append(sample)
            total += len(sample[0])
    return pack(samples, rows, width)


def long_rows(
    tokenizer: Tokenizer, rng: random.Random, rows: int, width: int
) -> dict[str, np.ndarray]:
    """`rows` rows of one long conversation each, cut off at `width`."""
    samples = []
    for _ in range(rows):
        ids, weights = encode(tokenizer, long_conversation(rng, width // 24))
        samples.append((ids[:width], weights[:width]))
    return pack(samples, rows, width)
