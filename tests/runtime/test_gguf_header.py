"""Headers of GGUF files: every lie, cut and oddity is one line that names file and place."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from radix_runtime import Engine
from radix_runtime.checkpoint import check_checkpoint
from radix_runtime.errors import EXIT_CONFIG, ConfigError
from radix_runtime.gguf import is_gguf, open_gguf
from radix_runtime.model_config import ModelConfig
from radix_runtime.text.tokenizer import load_tokenizer
from tests.runtime.command import Run

TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "c", "d"]
SIZES = {
    "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
    "attention.head_count": 2, "attention.head_count_kv": 1,
}  # fmt: skip


class Blocks(NamedTuple):
    """A tensor of a type."""

    kind: str
    data: np.ndarray


def write(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A tiny Llama, after `change` of its metadata and of its tensors: shapes, or Blocks."""
    metadata: dict[str, Any] = {f"llama.{key}": value for key, value in SIZES.items()}
    metadata["llama.attention.layer_norm_rms_epsilon"] = 1e-5
    metadata["tokenizer.ggml.model"] = "gpt2"
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    metadata["tokenizer.ggml.tokens"] = TOKENS
    metadata["tokenizer.ggml.token_type"] = [2, 3, 3, 1, 1, 1, 1, 1]
    metadata["tokenizer.ggml.merges"] = ["a b"]
    metadata["tokenizer.ggml.bos_token_id"] = 1
    tensors: dict[str, Any] = {
        "token_embd.weight": (8, 32), "output_norm.weight": (32,), "blk.0.attn_norm.weight": (32,),
        "blk.0.ffn_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32), "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32), "blk.0.ffn_gate.weight": (32, 32),
        "blk.0.ffn_up.weight": (32, 32), "blk.0.ffn_down.weight": (32, 32),
    }  # fmt: skip
    change(metadata, tensors)
    writer = GGUFWriter(path, metadata.pop("general.architecture", "llama"))
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32,
           bool: writer.add_bool, list: writer.add_array}  # fmt: skip
    for key, value in metadata.items():
        add[type(value)](key, value)
    for name, value in tensors.items():
        if not isinstance(value, Blocks):
            writer.add_tensor(name, np.ones(value, np.float32))
        else:
            writer.add_tensor(name, value.data, raw_dtype=GGMLQuantizationType[value.kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def good(path: Path) -> Path:
    return write(path, lambda metadata, tensors: None)


def load(path: Path) -> None:
    """All that is checked before a weight is read, and then the weights."""
    ModelConfig.from_dir(path)
    check_checkpoint(path)
    load_tokenizer(path)
    Engine(path, device="cpu", max_total_tokens=32, num_threads=1).shutdown()


def test_a_good_file(tmp_path: Path) -> None:
    path = good(tmp_path / "good.gguf")
    load(path)
    assert check_checkpoint(path).bytes == path.stat().st_size
    assert check_checkpoint(path).parameters == 8 * 32 + 3 * 32 + 2 * 16 * 32 + 5 * 32 * 32
    assert load_tokenizer(path).encode("abc", add_special_tokens=True) == [1, 5, 6]
    renamed = path.rename(tmp_path / "weights")
    assert is_gguf(renamed) and not is_gguf(tmp_path)


def after(path: Path, text: bytes) -> int:
    """Where the bytes behind `text` begin in a file."""
    return path.read_bytes().index(text) + len(text)


def exchange(path: Path, old: bytes, new: bytes) -> None:
    path.write_bytes(path.read_bytes().replace(old, new))


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def entry_of(path: Path, name: str) -> int:
    """Where the row of the table of tensors begins that a tensor has, after its name."""
    return after(path, name.encode())


def with_sizes(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Values of llama.*; None leaves one out."""

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name, value in changes.items():
            key = f"llama.{name.replace('__', '.')}"
            metadata.pop(key, None)
            if value is not None:
                metadata[key] = value

    return change


def with_tokenizer(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name, value in changes.items():
            metadata.pop(f"tokenizer.ggml.{name}", None)
            if value is not None:
                metadata[f"tokenizer.ggml.{name}"] = value

    return change


def with_tensors(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name, value in changes.items():
            key = f"{name.replace('__', '.')}.weight"
            tensors.pop(key, None)
            if value is not None:
                tensors[key] = value

    return change


Q2 = Blocks("Q2_K", np.zeros((8, 84), np.uint8))
# Files whose writer was wrong, and what is said of them.
WRONG_CONTENT = {
    "another architecture": (
        lambda m, t: m.update({"general.architecture": "mamba"}),
        "architecture 'mamba' is not supported; supported: deepseek2, ",
    ),
    "one of several parts": (
        lambda m, t: m.update({"split.count": 3}), "is one of 3 parts of a model; join them with"),
    "no size": (with_sizes(embedding_length=None), "'llama.embedding_length' is missing"),
    "a size of zero": (with_sizes(block_count=0), "'llama.block_count' is 0, expected a positive"),
    "a size that is text": (with_sizes(block_count="1"), "'llama.block_count' is '1', expected"),
    "sizes that differ by layer": (
        with_sizes(feed_forward_length=[32, 64]), "'llama.feed_forward_length' is array"),
    "heads that do not divide": (with_sizes(attention__head_count_kv=3), "must divide"),
    "RoPE of an unknown kind": (
        with_sizes(rope__scaling__type="su"), "rope scaling 'su' is not supported"),
    "no embedding": (with_tensors(token_embd=None), "tensor 'token_embd.weight' is missing"),
    "an embedding of another width": (
        with_tensors(token_embd=(8, 64)), "'token_embd.weight' has shape [8, 64], expected"),
    "a tokenizer of another size": (
        with_tensors(token_embd=(7, 32)), "has 8 tokens, tensor 'token_embd.weight' 7 rows"),
    "a missing tensor": (
        with_tensors(blk__0__ffn_up=None), "no tensor for model.layers.0.mlp.up_proj.weight"),
    "a tensor too many": (
        with_tensors(blk__0__extra=(32,)), "(here model.layers.0.extra.weight) has no place"),
    "a tensor of another shape": (
        with_tensors(blk__0__ffn_up=(64, 32)),
        "(here model.layers.0.mlp.up_proj.weight) has shape [64, 32], expected"),
    "a type that is not read": (
        with_tensors(token_embd=Q2), "'token_embd.weight' is of type Q2_K; supported: F32, "),
    "another tokenizer": (
        with_tokenizer(model="bert"), "'tokenizer.ggml.model' is 'bert'; supported: gpt2 and"),
    "an unknown cut of text": (
        with_tokenizer(pre="new"), "'tokenizer.ggml.pre' is 'new', which is not supported"),
    "no merges": (with_tokenizer(merges=None), "'tokenizer.ggml.merges' is missing"),
    "a merge of three": (with_tokenizer(merges=["a b c"]), "merges' holds 'a b c', expected two"),
    "a merge of no token": (with_tokenizer(merges=["a x"]), "cannot build its tokenizer"),
    "types of other tokens": (
        with_tokenizer(token_type=[1]), "token_type' has 1 entries for 8 tokens"),
    "a special token beyond": (
        with_tokenizer(bos_token_id=8), "bos_token_id' is 8, but there are 8 tokens"),
    "a flag that is text": (
        with_tokenizer(add_bos_token="yes"), "add_bos_token' is 'yes', expected bool"),
    "a template that does not parse": (
        lambda m, t: m.update({"tokenizer.chat_template": "{% if %}"}), "chat template, line 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CONTENT)
def test_wrong_content(name: str, tmp_path: Path) -> None:
    change, message = WRONG_CONTENT[name]
    path = write(tmp_path / "bad.gguf", change)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def wrong_place(path: Path, offset: int) -> None:
    """The last tensor's offset."""
    at = entry_of(path, "blk.0.ffn_down.weight")
    patch(path, at + 4 + 16 + 4, struct.pack("<Q", offset))


# Files that are broken, byte by byte.
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda p: p.write_bytes(b""), "is no GGUF file: it has 0 bytes"),
    "of another format": (lambda p: patch(p, 0, b"PK\3\4"), "begins with b'PK"),
    "of another version": (lambda p: patch(p, 4, struct.pack("<I", 1)), "GGUF version 1 is not"),
    "big-endian": (lambda p: patch(p, 4, struct.pack(">I", 3)), "a big-endian GGUF file"),
    "too many tensors": (
        lambda p: patch(p, 8, struct.pack("<Q", 1 << 60)), "the header promises 11529215046"),
    "too many values": (
        lambda p: patch(p, 16, struct.pack("<Q", 1 << 60)), "more than the"),
    "a few values too many": (lambda p: patch(p, 16, struct.pack("<Q", 20)), "the metadata"),
    "cut in the header": (
        lambda p: p.write_bytes(p.read_bytes()[:200]), "promises"),
    "cut in the metadata": (
        lambda p: p.write_bytes(p.read_bytes()[:900]), "goes beyond the end of the file (900"),
    "cut in the data": (
        lambda p: p.write_bytes(p.read_bytes()[:-4097]),
        "the download is incomplete"),
    "a string without end": (
        lambda p: patch(p, 24, struct.pack("<Q", 1 << 62)), "the metadata goes beyond the end"),
    "an array without end": (
        lambda p: patch(p, after(p, b"ggml.tokens") + 8, struct.pack("<Q", 1 << 50)),
        "'tokenizer.ggml.tokens' promises 1125899906842624 strings"),
    "no UTF-8": (
        lambda p: exchange(p, b"llama.block_count", b"\xfflama.block_count"), "is not UTF-8"),
    "an unknown type of value": (
        lambda p: patch(p, after(p, b"llama.block_count"), struct.pack("<I", 99)),
        "'llama.block_count' has a value of type 99"),
    "an array of arrays": (
        lambda p: patch(p, after(p, b"ggml.tokens") + 4, struct.pack("<I", 9)),
        "'tokenizer.ggml.tokens' is an array of type 9"),
    "a key twice": (
        lambda p: exchange(p, b"llama.context_length", b"general.architecture"),
        "'general.architecture' is there twice"),
    "a tensor twice": (
        lambda p: exchange(p, b"blk.0.attn_k.weight", b"blk.0.attn_v.weight"),
        "tensor 'blk.0.attn_v.weight' is there twice"),
    "too many dimensions": (
        lambda p: patch(p, entry_of(p, "output_norm.weight"), struct.pack("<I", 9)),
        "tensor 'output_norm.weight' has 9 dimensions"),
    "a dimension of zero": (
        lambda p: patch(p, entry_of(p, "output_norm.weight") + 4, struct.pack("<Q", 0)),
        "tensor 'output_norm.weight' has shape [0]"),
    "a huge dimension": (
        lambda p: patch(p, entry_of(p, "output_norm.weight") + 4, struct.pack("<Q", 1 << 63)),
        "but the file has"),
    "an unknown type": (
        lambda p: patch(p, entry_of(p, "output_norm.weight") + 12, struct.pack("<I", 77)),
        "tensor 'output_norm.weight' is of type 77, which ggml does not have"),
    "half a block": (
        lambda p: patch(p, entry_of(p, "output_norm.weight") + 12, struct.pack("<I", 12)),
        "has rows of 32 elements, no multiple of 256 (Q4_K)"),
    "a tensor beyond the end": (
        lambda p: wrong_place(p, 1 << 40), "tensor 'blk.0.ffn_down.weight' ends at byte"),
    "a tensor over another": (
        lambda p: wrong_place(p, 0), "overlaps tensor"),
    "a tensor out of line": (
        lambda p: wrong_place(p, (1 << 40) + 1), "which is not aligned"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files(name: str, tmp_path: Path) -> None:
    change, message = BROKEN[name]
    path = good(tmp_path / "bad.gguf")
    change(path)
    with pytest.raises(ConfigError) as caught:
        open_gguf(path)
    said = str(caught.value)
    assert said.startswith(str(path)) and message in said and "\n" not in said


def with_alignment(alignment: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda metadata, tensors: metadata.update({"general.alignment": alignment})


@pytest.mark.parametrize("alignment", [4, 12, 0, 1 << 24, "x"])
def test_an_alignment_that_is_none(alignment: Any, tmp_path: Path) -> None:
    """The writer takes it for a value like any other, and aligns by 32."""
    path = write(tmp_path / "bad.gguf", with_alignment(alignment))
    with pytest.raises(ConfigError, match=r"'general\.alignment' is .*, expected a multiple of 8"):
        open_gguf(path)


def test_another_alignment(tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", np.ones(3, np.float32))
    writer.add_tensor("b", np.full(3, 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    assert [entry.start % 256 for entry in file.tensors.values()] == [0, 0]
    found = [file.blocks(entry).view(np.float32).tolist() for entry in file.tensors.values()]
    assert found == [[1.0] * 3, [2.0] * 3]


def test_every_cut_is_an_error(tmp_path: Path) -> None:
    """A file that ends anywhere before its end is refused, and nothing else happens."""
    whole = good(tmp_path / "good.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 1200, 7), len(whole) - 4097, len(whole) // 2]:
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError):
            open_gguf(path)


def test_random_bytes_never_crash(tmp_path: Path) -> None:
    """A header with bytes changed is read or refused."""
    whole = bytearray(good(tmp_path / "good.gguf").read_bytes())
    rng = np.random.default_rng(0)
    path = tmp_path / "changed.gguf"
    refused = 0
    for _ in range(300):
        changed = bytearray(whole)
        for at in rng.integers(0, 1700, 3):
            changed[at] = rng.integers(0, 256)
        path.write_bytes(changed)
        try:
            open_gguf(path)
            ModelConfig.from_dir(path)
            load_tokenizer(path)
        except ConfigError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 50


def test_the_command_says_it(here: Run, tmp_path: Path) -> None:
    path = good(tmp_path / "bad.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    for command in (["serve"], ["generate", "-p", "a", "--model-path"]):
        done = here(*command, str(path))
        assert done.returncode == EXIT_CONFIG
        assert f"{path}: tensor 'blk.0.ffn_" in done.stderr
        assert "incomplete" in done.stderr.splitlines()[-1]
