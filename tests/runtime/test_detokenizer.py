"""The detokenizer against a slow oracle, however its tokens are grouped."""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_runtime.messages import (
    FinishReason,
    Logprobs,
    RequestFailed,
    StreamTokens,
    TextBatch,
    TextDelta,
    TextStop,
    TokenBatch,
    TokenDelta,
    pack_ids,
    unpack_ids,
)
from radix_runtime.sampling_params import SamplingParams
from radix_runtime.text.detokenizer import Detokenizer
from radix_runtime.text.tokenizer import Tokenizer
from tests.runtime.detokenizer_oracle import full_text, make_tokenizer, oracle


def token_delta(*ids: int, choice: int = 0, **fields: Any) -> TokenDelta:
    return TokenDelta(rid="r", choice=choice, ids=pack_ids(ids), **fields)


class Harness:
    """A detokenizer over two deques."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.queue: deque[Any] = deque()
        self.sent: list[Any] = []
        self.detokenizer = Detokenizer(tokenizer=tokenizer, inbox=self, outbox=self)

    def receive(self) -> list[Any]:
        messages = list(self.queue)
        self.queue.clear()
        return messages

    def wait(self, timeout: float | None) -> bool:
        return bool(self.queue)

    def send(self, message: Any, instance: int = 0) -> None:
        self.sent.append(message)

    def feed(self, *messages: Any) -> list[Any]:
        self.queue.extend(messages)
        self.sent = []
        self.detokenizer.step()
        return self.sent

    def text_deltas(self) -> list[TextDelta]:
        return [d for m in self.sent if isinstance(m, TextBatch) for d in m.deltas]


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = sorted({0, len(ids), *(c % (len(ids) + 1) for c in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(borders)]


STREAM = 1 << 40  # the number of the stream


def among_others(ids: list[int]) -> StreamTokens:
    """Tokens of the stream between those of streams that have ended, as they travel."""
    columns = StreamTokens.pack(
        np.array([3, STREAM, 4]), np.array([1, len(ids), 2]), np.array([9, *ids, 8, 7])
    )
    return msgspec.msgpack.decode(msgspec.msgpack.encode(columns), type=StreamTokens)


def run(
    tokenizer: Tokenizer,
    prompt: list[int],
    parts: list[list[int]],
    sampling: SamplingParams,
    finish: FinishReason,
) -> tuple[str, list[int], FinishReason, int, list[TextStop]]:
    """Streams `parts`, those in the middle as deltas or among the tokens of other streams; returns
    text, ids, finish, completion_tokens, stops."""
    h = Harness(tokenizer)
    text = ""
    ids: list[int] = []
    stops: list[TextStop] = []
    last: TextDelta | None = None
    for i, part in enumerate(parts or [[]]):
        final = i == max(len(parts), 1) - 1
        delta = TokenDelta(
            rid="r",
            choice=0,
            ids=pack_ids(part),
            finish=finish if final else None,
            sampling=sampling if i == 0 else None,
            input_ids=pack_ids(prompt) if i == 0 else None,
            completion_tokens=sum(map(len, parts[: i + 1])),
            stream=STREAM if i == 0 else None,
        )
        in_columns = 0 < i and not final and random.random() < 0.7
        h.feed(TokenBatch([], tokens=among_others(part)) if in_columns else TokenBatch([delta]))
        stops += [m for m in h.sent if isinstance(m, TextStop)]
        for d in h.text_deltas():
            assert last is None, "something followed the finish"
            text += d.text
            ids += unpack_ids(d.ids).tolist()
            if d.finish is not None:
                last = d
    assert last is not None and last.finish is not None
    assert h.detokenizer.num_open == 0
    return text, ids, last.finish, last.completion_tokens, stops


words = st.text(
    alphabet=st.sampled_from("abcdeST OP.END\n中文字计算机é€😀👩‍👧🇩ß"), min_size=0, max_size=24
)
cuts = st.lists(st.integers(0, 200), max_size=12)


@settings(max_examples=400, deadline=None)
@given(
    kind=st.sampled_from(["byte_level", "sentencepiece"]),
    prompt_text=words,
    text=words,
    stops=st.lists(st.text(alphabet="abcSTOP.END 中文é", min_size=1, max_size=4), max_size=3),
    chopped=st.integers(0, 3),
    low=st.integers(0, 6),
    cuts=cuts,
    keep=st.booleans(),
)
def test_stream_equals_oracle(
    kind: str,
    prompt_text: str,
    text: str,
    stops: list[str],
    chopped: int,
    low: int,
    cuts: list[int],
    keep: bool,
) -> None:
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.encode("x" + prompt_text)
    ids = tokenizer.encode(text)
    if kind == "byte_level":  # chopping inside a character is well defined there
        ids = ids[: max(0, len(ids) - chopped)]
    sampling = SamplingParams(stop=stops, no_stop_trim=keep, min_new_tokens=low)
    want, count, matched = oracle(tokenizer, prompt, ids, sampling)
    got = run(tokenizer, prompt, split(ids, cuts), sampling, FinishReason("length"))
    assert got[0] == want
    assert got[1] == ids[:count]
    assert got[3] == count
    assert got[2] == (FinishReason("stop", matched) if matched else FinishReason("length"))


@settings(max_examples=400, deadline=None)
@given(
    ids=st.lists(st.integers(0, 399), max_size=40),
    prompt=st.lists(st.integers(2, 399), min_size=1, max_size=6),
    cuts=cuts,
    skip=st.booleans(),
)
def test_random_ids_with_invalid_bytes(
    ids: list[int], prompt: list[int], cuts: list[int], skip: bool
) -> None:
    """Byte-level: any ids at all, also bytes that are no UTF-8."""
    tokenizer = make_tokenizer("byte_level")
    prompt = [*prompt, *tokenizer.encode("x")]
    sampling = SamplingParams(skip_special_tokens=skip)
    got = run(tokenizer, prompt, split(ids, cuts), sampling, FinishReason("length"))
    assert got[0] == full_text(tokenizer, prompt, ids, skip)
    assert got[1] == ids


def test_the_grouping_of_tokens_never_matters() -> None:
    tokenizer = make_tokenizer("sentencepiece")
    rng = random.Random(7)
    for _ in range(100):
        ids = [rng.randrange(2, tokenizer.vocab_size) for _ in range(30)]
        sampling = SamplingParams(stop=["e", "\ufffdo", "th"], min_new_tokens=rng.randrange(5))
        outcomes = {
            repr(run(tokenizer, [5], split(ids, cuts), sampling, FinishReason("length"))[:4])
            for cuts in ([], list(range(31)), [rng.randrange(31) for _ in range(6)])
        }
        assert len(outcomes) == 1


def test_leading_space_of_sentencepiece_survives() -> None:
    tokenizer = make_tokenizer("sentencepiece")
    prompt = tokenizer.encode("the")
    ids = tokenizer.encode("the quick fox")
    text = run(tokenizer, prompt, [[i] for i in ids], SamplingParams(), FinishReason("length"))[0]
    assert text == " the quick fox"


def test_prompt_that_ends_inside_a_character() -> None:
    tokenizer = make_tokenizer("byte_level")
    of_byte = {tokenizer.id_to_bytes(i): i for i in range(tokenizer.vocab_size)}
    first, second, third = (of_byte[bytes([b])] for b in "算".encode())
    finish = FinishReason("length")
    x = of_byte[b"x"]
    completed = run(tokenizer, [x, first, second], [[third], [x]], SamplingParams(), finish)
    assert completed[0] == "算x"
    broken = run(tokenizer, [x, first, second], [[x], [x]], SamplingParams(), finish)
    assert broken[0] == "xx"


def test_incomplete_character_is_held_and_flushed() -> None:
    tokenizer = make_tokenizer("byte_level")
    of_byte = {tokenizer.id_to_bytes(i): i for i in range(tokenizer.vocab_size)}
    parts = [of_byte[bytes([b])] for b in "😀".encode()]
    h = Harness(tokenizer)
    for i, token in enumerate(parts[:3]):
        first = SamplingParams() if i == 0 else None
        h.feed(TokenBatch([token_delta(token, sampling=first)]))
        assert [d.text for d in h.text_deltas()] == [""]
    h.feed(TokenBatch([token_delta(finish=FinishReason("length"))]))
    assert [d.text for d in h.text_deltas()] == ["\ufffd"]


def test_stop_cuts_ids_and_logprobs_and_drops_what_follows() -> None:
    tokenizer = make_tokenizer("byte_level")
    ids = tokenizer.encode("abcSTOPdef")
    n = len(ids)
    top = np.arange(2 * n, dtype="<i4")
    logprobs = Logprobs(
        ids=pack_ids(ids),
        logprobs=np.arange(n, dtype="<f4").tobytes(),
        top_n=2,
        top_ids=top.tobytes(),
        top_logprobs=top.astype("<f4").tobytes(),
    )
    h = Harness(tokenizer)
    sampling = SamplingParams(stop=["STOP"])
    h.feed(TokenBatch([token_delta(*ids, choice=3, sampling=sampling, logprobs=logprobs)]))
    (stop,) = [m for m in h.sent if isinstance(m, TextStop)]
    (delta,) = h.text_deltas()
    used = stop.n_tokens
    assert "STOP" in tokenizer.decode(ids[:used]) and "STOP" not in tokenizer.decode(
        ids[: used - 1]
    )
    assert (stop.rid, stop.choice) == ("r", 3)
    assert delta.text == "abc" and delta.finish == FinishReason("stop", "STOP")
    assert delta.completion_tokens == used < n
    assert unpack_ids(delta.ids).tolist() == ids[:used]
    assert delta.logprobs is not None
    assert len(delta.logprobs.logprobs) == 4 * used and len(delta.logprobs.top_ids) == 8 * used
    assert h.detokenizer.num_open == 0
    late = token_delta(5, choice=3, finish=FinishReason("length"))
    assert h.feed(TokenBatch([late])) == []


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_stop_string_that_is_a_special_token(kind: str) -> None:
    """Whether special tokens are shown or not."""
    tokenizer = make_tokenizer(kind)
    (end,) = (i for i in tokenizer.special_ids if tokenizer.id_to_text(i) == "<|end|>")
    plain = tokenizer.encode("the lazy dog <", False)
    after = tokenizer.encode("jumps", False)
    whole = run(tokenizer, [5], [plain], SamplingParams(), FinishReason("length"))[0]
    for shown in (True, False):
        fields: dict[str, Any] = {"stop": ["<|end|>", "<z"], "skip_special_tokens": not shown}
        ids = [*plain, end, *after]
        text, got, finish, count, _ = run(
            tokenizer, [5], [ids], SamplingParams(**fields), FinishReason("length")
        )
        assert (text, finish, count) == (whole, FinishReason("stop", "<|end|>"), len(plain) + 1)
        assert list(got) == [*plain, end]
        kept = run(
            tokenizer,
            [5],
            [ids],
            SamplingParams(**fields, no_stop_trim=True),
            FinishReason("length"),
        )[0]
        assert kept == whole + "<|end|>"
        late = SamplingParams(**fields, min_new_tokens=len(plain) + 1)
        assert run(tokenizer, [5], [ids], late, FinishReason("length"))[2] == FinishReason("length")


def test_matched_stop_token_is_counted_but_not_shown() -> None:
    tokenizer = make_tokenizer("byte_level")
    ids = tokenizer.encode("abc.")
    finish = FinishReason("stop", ids[-1])
    trimmed = run(tokenizer, [5], [ids], SamplingParams(stop_token_ids=[ids[-1]]), finish)
    assert trimmed[0] == tokenizer.decode(ids[:-1]) and trimmed[1] == ids and trimmed[3] == len(ids)
    kept = run(tokenizer, [5], [ids], SamplingParams(no_stop_trim=True), finish)
    assert kept[0] == "abc."


def test_held_text_is_flushed_on_abort_and_nothing_stays() -> None:
    tokenizer = make_tokenizer("byte_level")
    h = Harness(tokenizer)
    ids = tokenizer.encode("fooST")
    sampling = SamplingParams(stop=["STOP"])
    h.feed(TokenBatch([token_delta(*ids, sampling=sampling)]))
    assert h.text_deltas()[0].text == "foo"
    h.feed(TokenBatch([token_delta(finish=FinishReason("abort", message="gone"))]))
    assert h.text_deltas()[0].text == "ST" and h.detokenizer.num_open == 0


def test_failure_follows_the_text_and_forgets_all_choices() -> None:
    tokenizer = make_tokenizer("byte_level")
    h = Harness(tokenizer)
    deltas = [token_delta(70, choice=c, sampling=SamplingParams()) for c in range(3)]
    failed = RequestFailed(rid="r", status=500, code="internal_error", message="not finite")
    sent = h.feed(TokenBatch(deltas), failed, TokenBatch([token_delta(71)]))
    assert [type(m) for m in sent] == [TextBatch, RequestFailed]
    assert h.detokenizer.num_open == 0


def test_linear_time_on_endless_invalid_bytes() -> None:
    """A decoder that grows its window would need minutes for this."""
    tokenizer = make_tokenizer("byte_level")
    of_byte = {tokenizer.id_to_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [of_byte[b"\x80"]] * 100_000
    text = run(tokenizer, [5], [ids], SamplingParams(stop=["\ufffdx"]), FinishReason("length"))[0]
    assert text == "\ufffd" * 100_000


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_the_tokenizers_here_split_characters(kind: str) -> None:
    """Else the tests above would prove little."""
    tokenizer = make_tokenizer(kind)
    ids = tokenizer.encode("計")
    assert len(ids) >= 3 and tokenizer.decode([5, *ids]).endswith("計")
