"""Every family against transformers: float32 logits over mixed steps, pages and ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radix_runtime import Engine, ops
from radix_runtime.config import ServerArgs
from radix_runtime.distributed import Communicator
from radix_runtime.model_config import ModelConfig
from radix_runtime.models import checkpoint_tensors
from radix_runtime.quantization.at_load import AtLoad
from radix_runtime.quantization.base import LinearMethod
from radix_runtime.quantization.dense import DenseMethod
from radix_runtime.quantization.registry import quantizations
from radix_runtime.specs import Layer, Moe, RmsNorm, Rope, SoftmaxRouter
from tests.runtime.family_models import FAMILY_MODELS, Checkpoints
from tests.runtime.model_steps import ThreadCommunicator, run_ranks, worst_error
from tests.runtime.stacked_format import StackedAtLoad
from tests.runtime.tiny_models import (
    Driver,
    Sequence,
    random_ids,
    reference_logits,
    relative_error,
)
from tests.runtime.waiting_weights import WaitingWeights

torch.set_num_threads(1)
TOLERANCE = 1e-4
PAGE_SIZES = [1, 16, 64] if os.environ.get("RADIX_TEST_FULL") == "1" else [1, 16]


@pytest.mark.cover("values")
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_logits(checkpoint: Checkpoints, name: str, page_size: int) -> None:
    folder, reference = checkpoint(name)
    driver = Driver(folder, page_size=page_size)
    assert driver.config.unknown_keys == ()
    error = worst_error(driver, reference, seed=page_size)
    print(f"{name} page {page_size}: {error:.1e}")
    assert error < TOLERANCE


@pytest.mark.cover("values")
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_two_ranks(checkpoint: Checkpoints, name: str, page_size: int) -> None:
    folder, reference = checkpoint(name)

    def work(comm: ThreadCommunicator) -> float:
        driver = Driver(folder, page_size=page_size, communicator=comm)
        return worst_error(driver, reference, seed=3 + page_size)

    assert 0 < run_ranks(2, work)[0] < TOLERANCE


def test_experts_as_on_the_hub(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Qwen3-VL's files of transformers 4 hold the experts with inputs first."""
    folder, reference = checkpoint("qwen3_vl_moe")
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in tensors.items():
        if ".experts." in key:
            tensors[key] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert worst_error(Driver(tmp_path), reference, seed=1) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [(torch.bfloat16, None, 0.06), (torch.float32, "int8", 0.08)],
)
def test_experts_in_other_formats(
    checkpoint: Checkpoints,
    name: str,
    dtype: torch.dtype,
    quantization: str | None,
    tolerance: float,
) -> None:
    """The router keeps its precision, or other experts would be chosen."""
    folder, reference = checkpoint(name)
    args = ServerArgs(model_path=str(folder), quantization=quantization)
    driver = Driver(folder, dtype=dtype, args=args)
    ids = random_ids(driver.config, 50, seed=2)
    logits = driver.step([(Sequence(0, ids), len(ids))])
    error = (logits - reference_logits(reference, ids)).norm(dim=-1)
    relative = error / reference_logits(reference, ids).norm(dim=-1)
    assert 1e-5 < float(relative.median()) < tolerance


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v2"])
def test_a_row_of_a_batch_has_the_bits_of_a_row_alone(checkpoint: Checkpoints, name: str) -> None:
    folder, _ = checkpoint(name)
    driver = Driver(folder)
    ids = [random_ids(driver.config, 9, seed) for seed in range(3)]
    together = [Sequence(row, x) for row, x in enumerate(ids)]
    alone = [Sequence(row + 3, x) for row, x in enumerate(ids)]
    driver.step([(sequence, 8) for sequence in together])
    expected = driver.step([(sequence, 1) for sequence in together], from_device=tuple(together))
    for index, sequence in enumerate(alone):
        driver.step([(sequence, 8)])
        found = driver.step([(sequence, 1)], from_device=(sequence,))
        assert torch.equal(found[0], expected[index])


class Unpacked(DenseMethod):
    """A format of another package, of which the wheel cannot take experts together."""

    def packed_weight(self, layer: Any) -> ops.PackedWeight | None:
        return None


class UnpackedAtLoad(AtLoad):
    def linear(self) -> LinearMethod:
        return Unpacked()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_of_a_format_that_is_not_packed(
    name: str,
    checkpoint: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One after the other, which is told once."""
    folder, reference = checkpoint(name)
    monkeypatch.setitem(quantizations._items, "dense", UnpackedAtLoad)
    caplog.clear()
    driver = Driver(folder)
    told = [text for text in caplog.messages if "no kernel takes these together" in text]
    assert len(told) == 1 and "experts of this format, one after the other" in told[0]
    assert worst_error(driver, reference, seed=1) < TOLERANCE
    assert driver.model.model.layers[0].mlp.experts.needs_loop


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_odd_width", "gpt_oss"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_in_one_tensor(
    name: str, ranks: int, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = checkpoint(name)
    monkeypatch.setitem(quantizations._items, "dense", StackedAtLoad)

    def work(comm: ThreadCommunicator) -> float:
        driver = Driver(folder, communicator=comm)
        experts = driver.model.model.layers[0].mlp.experts
        stack = experts._stacks[1].tensors["weight"]
        assert stack.shape[0] == len(experts.local)
        for index, expert in enumerate(experts.values()):
            assert expert.down_proj.weight.data_ptr() == stack[index].data_ptr()
        if name == "gpt_oss":
            terms = experts.terms()
            assert terms.bias1.shape == (len(experts.local), stack.shape[2] * 2)
            assert (terms.bias2 is None) == (comm.rank > 0)
        return worst_error(driver, reference, seed=1)

    assert 0 < run_ranks(ranks, work)[0] < TOLERANCE


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "llama"])
def test_no_experts_are_slow(
    name: str, checkpoint: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = checkpoint(name)
    caplog.clear()
    Driver(folder)
    assert not [text for text in caplog.messages if "no kernel takes" in text]


# What a model would be that left something out, which the comparison above must notice.
_WRONG: dict[str, tuple[str, Callable[[Layer], Layer]]] = {
    "no window": ("mistral", lambda layer: with_mixer(layer, window=None)),
    "no norm of heads": ("exaone4", lambda layer: with_mixer(layer, qk_norm=None)),
    "no soft cap": ("gemma2", lambda layer: with_mixer(layer, softcap=None)),
    "another scale": ("granite", lambda layer: with_mixer(layer, scale=0.25)),
    "another scale of Gemma": ("gemma3", lambda layer: with_mixer(layer, scale=32**-0.5)),
    "RoPE everywhere": (
        "smollm3", lambda layer: with_mixer(layer, rope=Rope(theta=2e6, rotary_dim=16)),
    ),
    "no scale by position": ("ministral3", lambda layer: with_mixer(layer, position_scale=None)),
    "pairs of halves": (
        "glm4", lambda layer: with_mixer(layer, rope=replace(layer.mixer.rope, interleaved=False)),
    ),
    "no residual multiplier": ("granite", lambda layer: replace(layer, residual_multiplier=1.0)),
    "weights that add up to 1": (
        "qwen2_moe",
        lambda layer: replace(layer, feed_forward=replace(
            layer.feed_forward, router=SoftmaxRouter(top_k=2, renormalize=True))),
    ),
    "no scaling of the weights": (
        "glm4_moe",
        lambda layer: replace(layer, feed_forward=replace(layer.feed_forward, router=replace(
            layer.feed_forward.router, scaling=1.0))) if isinstance(layer.feed_forward, Moe)
        else layer,
    ),
    "no scale of a stretched context": (
        "deepseek_v3", lambda layer: with_mixer(layer, scale=48**-0.5),
    ),
    "pairs of halves in latent attention": (
        "deepseek_v2_lite",
        lambda layer: with_mixer(layer, rope=replace(layer.mixer.rope, interleaved=False)),
    ),
    "no groups": (
        "deepseek_v2",
        lambda layer: replace(layer, feed_forward=replace(
            layer.feed_forward, router=replace(layer.feed_forward.router, num_groups=1))),
    ),
    "another activation": (
        "gpt_oss",
        lambda layer: replace(layer, feed_forward=replace(layer.feed_forward, activation="silu")),
    ),
}  # fmt: skip


def with_mixer(layer: Layer, **changes: Any) -> Layer:
    return replace(layer, mixer=replace(layer.mixer, **changes))


@pytest.mark.parametrize("what", _WRONG)
def test_a_wrong_layer_is_noticed(
    what: str, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = _WRONG[what]
    folder, reference = checkpoint(name)
    config = ModelConfig.from_dir(folder)
    layers = tuple(change(layer) for layer in config.spec.layers)
    if name == "exaone4":
        monkeypatch.setattr(
            checkpoint_tensors,
            "_is_surplus",
            lambda key, is_tied: "_norm." in key and "attn" in key,
        )
    wrong = replace(config, spec=replace(config.spec, layers=layers))
    monkeypatch.setattr(ModelConfig, "from_dir", lambda *given: wrong)
    check_is_wrong(Driver(folder), reference)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma3", {"embedding_multiplier": 1.0}),
        ("gemma3", {"final_norm": RmsNorm(eps=1e-6)}),
        ("gemma2", {"logit_softcap": None}),
        ("granite", {"logit_multiplier": 1.0}),
        ("granite", {"embedding_multiplier": 1.0}),
    ],
)
def test_a_wrong_model_is_noticed(
    name: str, changes: Any, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reference = checkpoint(name)
    config = ModelConfig.from_dir(folder)
    wrong = replace(config, spec=replace(config.spec, **changes))
    monkeypatch.setattr(ModelConfig, "from_dir", lambda *given: wrong)
    check_is_wrong(Driver(folder), reference)


def check_is_wrong(driver: Driver, reference: Any) -> None:
    ids = random_ids(driver.config, 60, seed=9)
    logits = driver.step([(Sequence(0, ids), len(ids))])
    assert relative_error(logits, reference_logits(reference, ids)) > 100 * TOLERANCE


def check_engine(folder: Path, reference: Any, **options: Any) -> None:
    """Prompts in chunks, several at a time, and again with cached prefixes: each token is the best
    one after the same prefix."""
    config = ModelConfig.from_dir(folder)
    shared = random_ids(config, 40, seed=0)
    ids = [random_ids(config, n, seed=n) for n in (1, 17, 33)]
    prompts = [*ids, shared + ids[1], shared + ids[2]]
    sizes = {"max_total_tokens": 1024, "max_running_requests": 4, "chunked_prefill_size": 24}
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    with Engine(model_path=str(folder), **sizes, **options) as engine:
        for _ in range(2):
            outputs = engine.generate(input_ids=prompts, sampling_params=params)
            for prompt, output in zip(prompts, outputs, strict=True):
                found = output["output_ids"]
                logits = reference_logits(reference, prompt + found)[len(prompt) - 1 : -1]
                best = logits.topk(2).values
                is_near_tie = bool(((best[:, 0] - best[:, 1]) < 1e-3).any())
                assert found == logits.argmax(-1).tolist() or is_near_tie
        assert outputs[-1]["meta_info"]["cached_tokens"] > 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(
    "name", ["qwen3_moe", "gemma3", "olmo3", "gpt_oss", "glm4_moe", "deepseek_v3"]
)
def test_the_engine(checkpoint: Checkpoints, name: str, page_size: int) -> None:
    check_engine(*checkpoint(name), page_size=page_size, num_threads=1)


@pytest.mark.parametrize("name", ["olmo2_repeated_kv", "qwen3_moe_odd_width", "glm4_moe_lite"])
def test_ranks_in_processes(checkpoint: Checkpoints, name: str) -> None:
    """Norms over all heads sum over the ranks; experts are whole on one of them; latent values are
    on both."""
    check_engine(*checkpoint(name), tp_size=2, num_threads=2)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3_vl_moe"])
def test_experts_are_packed_one_by_one(
    checkpoint: Checkpoints, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never do the weights of all experts of a layer wait to be packed."""
    folder, _ = checkpoint(name)
    spec = ModelConfig.from_dir(folder).spec
    moe = spec.layers[0].feed_forward
    assert isinstance(moe, Moe)
    waiting = WaitingWeights(monkeypatch)
    Driver(folder)
    embedding = spec.vocab_size * spec.hidden_size
    expert = 3 * moe.width * spec.hidden_size
    mixer = spec.layers[0].mixer
    rows = 2 * (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim  # of q, k, v and o
    bound = embedding + max(rows * spec.hidden_size, 2 * expert)
    assert waiting.packed >= 2 * moe.num_experts
    assert embedding < waiting.peak <= bound < embedding + moe.num_experts * expert


class OneOfTwo(Communicator):
    """Loads as the first of two ranks; does not talk."""

    world_size = 2


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_dummy_weights(checkpoint: Checkpoints, name: str) -> None:
    folder, _ = checkpoint(name)
    args = ServerArgs(model_path=str(folder), load_format="dummy", random_seed=3)
    driver = Driver(folder, args=args, communicator=OneOfTwo())
    logits = driver.step([(Sequence(0, list(range(20))), 20)])
    assert logits is not None and logits.isfinite().all() and logits.std() > 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 0.01), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_16_bits(checkpoint: Checkpoints, name: str, dtype: torch.dtype, tolerance: float) -> None:
    """The median of the tokens' errors: near ties of a router choose other experts."""
    folder, reference = checkpoint(name)
    driver = Driver(folder, dtype=dtype)
    ids = random_ids(driver.config, 50, seed=2)
    sequence = Sequence(0, ids)
    logits = torch.cat([driver.step([(sequence, n)]) for n in (20, 29, 1)])
    expected = reference_logits(reference, ids)
    error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert 1e-5 < float(error.median()) < tolerance
