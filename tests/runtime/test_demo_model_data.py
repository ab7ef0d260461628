"""The demo model's data generator: reproducible, split honestly, and in the format of the files."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "runtime" / "radix_runtime" / "demo_model"
FINGERPRINT = "3e9932fc5cf4aafc66fafc0ce3100b05b0abff6fce0a3a3076e1d6244c1c890a"


@pytest.fixture(scope="module")
def data() -> Iterator[ModuleType]:
    """The generator, imported the way its scripts are run; its modules leave no trace."""
    before = set(sys.modules)
    folder = str(ROOT / "examples" / "demo_model")
    sys.path.insert(0, folder)
    try:
        import data

        yield data
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]


def _pairs(data: ModuleType) -> list[tuple[str, object]]:
    return [(name, split) for name, entry in data.FAMILIES.items() for split in entry[2]]


def test_the_data_is_bit_reproducible(data: ModuleType) -> None:
    assert data.fingerprint(0, 2000) == FINGERPRINT
    assert FINGERPRINT in (FOLDER / "README.md").read_text()


def test_another_seed_is_other_data(data: ModuleType) -> None:
    assert data.fingerprint(1, 50) != data.fingerprint(0, 50)


def test_training_never_asks_an_unseen_question(data: ModuleType) -> None:
    unseen = {}
    for name, split in _pairs(data):
        for conversation in data.unseen(name, split, 60):
            unseen[conversation.turns[-1], len(conversation.turns)] = (name, split)
    single = {key for key in unseen if key[1] == 1}
    assert len(single) > 1000
    for sample in itertools.islice(data.training_samples(5), 20_000):
        if len(sample.turns) == 1:
            assert (sample.turns[0], 1) not in single


def test_phrasings_are_taught_or_held_out_never_both(data: ModuleType) -> None:
    import core

    tables = [
        value
        for module in (sys.modules[n] for n in ("arithmetic", "chat", "language", "unknown"))
        for value in vars(module).values()
        if isinstance(value, core.Phrases)
    ]
    tables += [phrases for group in (sys.modules["chat"].GREETINGS,) for _, phrases in group]
    assert len(tables) > 20
    for phrases in tables:
        assert phrases.train and phrases.held_out
        assert not set(phrases.train) & set(phrases.held_out)


def test_the_checker_takes_the_reference_and_rejects_a_damaged_one(data: ModuleType) -> None:
    rng = random.Random(3)
    for name, split in _pairs(data):
        for conversation in data.unseen(name, split, 20):
            item = conversation.items[-1]
            assert data.correct(item, item.expected)
            at = rng.randrange(len(item.expected))
            damaged = item.expected[:at] + "#" + item.expected[at + 1 :]
            assert not data.correct(item, damaged)
            assert not data.correct(item, item.expected + " [no end]")


def test_answers_are_right_by_other_means(data: ModuleType) -> None:
    import core

    for conversation in data.unseen("addition", core.Split.ITEMS, 100):
        left, result = conversation.items[0].expected.rstrip(".").split(" = ")
        assert sum(map(int, left.split(" + "))) == int(result)
    for conversation in data.unseen("reversing", core.Split.ITEMS, 100):
        letters, quoted = conversation.items[0].expected.split(" backwards is ")
        assert quoted == f'"{letters.replace("-", "")[::-1]}".'
    for conversation in data.unseen("JSON extraction", core.Split.PHRASES, 100):
        item = conversation.items[0]
        for value in json.loads(item.expected).values():
            assert str(value) in item.turns[0][0]


def test_the_chat_template_is_the_format_of_the_training_data(data: ModuleType) -> None:
    from encode import encode, prompt_ids, prompt_text
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    for name, split in _pairs(data):
        for conversation in data.unseen(name, split, 3):
            messages = conversation.messages()
            kwargs = {"add_generation_prompt": True}
            text = reference.apply_chat_template(messages, tokenize=False, **kwargs)
            assert text == prompt_text(messages)
            ids = reference.apply_chat_template(messages, return_dict=False, **kwargs)
            assert list(ids) == prompt_ids(tokenizer, conversation)
            trained, weights = encode(tokenizer, conversation)
            last = conversation.turns[-1][1].replace(data.TOKEN_EDGE, "")
            end = max(i for i, weight in enumerate(weights) if weight == 0) + 1
            assert tokenizer.decode(trained[end:-1]) == last
            assert trained[-1] == tokenizer.token_to_id("<|im_end|>")


def test_digits_are_single_tokens_and_any_text_survives() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= 2048
    digits = [token for token in tokenizer.get_vocab() if any(c.isdigit() for c in token)]
    assert sorted(token for token in digits if token.isascii()) == list("0123456789")
    for text in ("What is 17 + 25?", "  two  spaces\n\n", "Grüße, 世界 🙂", "", "a\tb\x00c"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_files_agree_with_each_other() -> None:
    from safetensors import safe_open

    config = json.loads((FOLDER / "config.json").read_text())
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert generation["eos_token_id"] == [2, 0] and config["eos_token_id"] == 2
    path = FOLDER / "model.safetensors"
    assert path.stat().st_size <= 12_000_000
    with safe_open(path, "pt") as weights:
        names = set(weights.keys())
        shape = weights.get_slice("model.embed_tokens.weight").get_shape()
    assert shape == [config["vocab_size"], config["hidden_size"]]
    assert "lm_head.weight" not in names  # tied
    assert len(names) == 2 + 11 * config["num_hidden_layers"]
