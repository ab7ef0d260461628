"""A model of hashes: what it samples depends on every token before, through every cached state.

The KV of position t is a running hash of all tokens up to t. With a `window` each position also has
an entry of its own that only the last `window` tokens' queries read; a `recurrent` model carries
one number that each token changes. `oracle` gives a request's tokens from its prompt alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radix_runtime.messages import Generate, unpack_ids
from radix_runtime.sampling_params import SamplingParams, splitmix64
from radix_runtime.step_plan import RowSampling

_A = np.uint64(0x9E3779B97F4A7C15)
_B = np.uint64(0xBF58476D1CE4E5B9)
_C = np.uint64(0x94D049BB133111EB)
MASK = (1 << 64) - 1
START_STATE = 0x243F6A8885A308D3  # of a recurrent model before the first token


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64 arrays (wraps around)."""
    x = (x + _A).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * _B
    x = (x ^ (x >> np.uint64(27))) * _C
    return x ^ (x >> np.uint64(31))


def token_hashes(ids: np.ndarray, start: int) -> np.ndarray:
    """uint64 [n]: what each token at its position adds to the running hash."""
    positions = np.arange(start, start + len(ids), dtype=np.uint64)
    return mix(ids.astype(np.uint64) * _B + positions * _C)


def kv_of(ids: np.ndarray) -> np.ndarray:
    """uint64 [n]: the KV of a sequence."""
    return np.cumsum(token_hashes(np.asarray(ids), 0), dtype=np.uint64)


def fold(kv: np.ndarray) -> int:
    """Everything a token attends to, in order, as one number."""
    weights = np.arange(1, 2 * len(kv), 2, dtype=np.uint64)
    return int((mix(kv) * weights).sum(dtype=np.uint64))


def pick(folded: int, position: int, vocab: int, seed: int, masked: frozenset[int]) -> int:
    """The token at `position`; `seed` 0 is greedy; masked ids cannot come."""
    x = splitmix64((folded ^ seed) + position & MASK)
    while x % vocab in masked:
        x = splitmix64(x)
    return x % vocab


def sample(folded: int, position: int, vocab: int, setting: RowSampling) -> int:
    seed = 0 if setting.params.temperature == 0 else setting.seed & MASK
    masked = frozenset(setting.stop_ids) if position < setting.min_end else frozenset()
    return pick(folded, position, vocab, seed, masked)


def allowed_token(mask: np.ndarray, token: int, folded: int) -> int:
    """`token` if the mask allows it, else one that it does, chosen by the hash."""
    if mask[token // 32] >> (token % 32) & 1:
        return token
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(allowed[folded % len(allowed)])


def fake_logprob(folded: int, token: int) -> float:
    return -float((folded ^ token * 0x9E3779B1) % 9973) / 997


def fake_top(folded: int, n: int, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([(folded + 7 * i) % vocab for i in range(n)], np.int32)
    values = np.array([fake_logprob(folded, int(i)) for i in ids], np.float32)
    return ids, values


@dataclass(frozen=True)
class FakeModel:
    """The states that it keeps of a sequence: always the KV of every token, a window of other
    entries, and a recurrent state."""

    window: int | None = None
    recurrent: bool = False

    def advance(self, state: int, hashes: np.ndarray) -> int:
        """The recurrent state after the tokens of `hashes`."""
        for value in hashes.tolist():
            state = splitmix64(state ^ value)
        return state

    def look(self, kv: np.ndarray, window: np.ndarray, state: int) -> int:
        """What the next token is sampled from: `kv` of all tokens, `window` entries of the last
        ones, the recurrent state after all of them."""
        folded = fold(kv)
        if self.window is not None:
            folded ^= splitmix64(fold(window))
        if self.recurrent:
            folded ^= splitmix64(state)
        return folded


class Sequence:
    """All states of one sequence of tokens, computed without an engine."""

    def __init__(self, model: FakeModel, ids: np.ndarray) -> None:
        self.model = model
        self.hashes = token_hashes(np.asarray(ids), 0)
        self.state = START_STATE
        if model.recurrent:
            self.state = model.advance(self.state, self.hashes)

    def append(self, token: int) -> None:
        added = token_hashes(np.array([token]), len(self.hashes))
        self.hashes = np.concatenate([self.hashes, added])
        if self.model.recurrent:
            self.state = self.model.advance(self.state, added)

    def look(self) -> int:
        kv = np.cumsum(self.hashes, dtype=np.uint64)
        window = self.hashes[-self.model.window :] if self.model.window else self.hashes[:0]
        return self.model.look(kv, window, self.state)


@dataclass
class Expected:
    ids: list[int]
    finish: str
    matched: int | None = None


def oracle(
    message: Generate,
    choice: int = 0,
    *,
    vocab: int = 97,
    eos: frozenset[int] = frozenset(),
    limit: int = 256,
    model: FakeModel | None = None,
) -> Expected:
    """What choice `choice` must give, from the prompt alone. `limit`: tokens in all."""
    params: SamplingParams = message.sampling
    prompt = unpack_ids(message.input_ids)
    seed = 0
    if params.temperature != 0:
        assert params.seed is not None, "only a seeded request can be foretold"
        seed = splitmix64(params.seed + choice)
    stop = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
    new = limit - len(prompt) if params.max_new_tokens is None else params.max_new_tokens
    sequence = Sequence(model or FakeModel(), prompt)
    output: list[int] = []
    while len(output) < new:
        position = len(prompt) + len(output)
        masked = stop if len(output) < params.min_new_tokens else frozenset()
        token = pick(sequence.look(), position, vocab, seed, masked)
        output.append(token)
        if token in stop and len(output) > params.min_new_tokens:
            return Expected(output, "stop", matched=token)
        sequence.append(token)
    return Expected(output, "length")
