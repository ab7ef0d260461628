"""What is checked before a process starts or a weight is read, and what a start says."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from radix_runtime.attention.registry import attention_backends
from radix_runtime.checkpoint import check_checkpoint
from radix_runtime.cli import serve
from radix_runtime.cli.flags import changed
from radix_runtime.config import ATTENTION_BACKENDS, FORMER_BACKENDS, QUANTIZATIONS, ServerArgs
from radix_runtime.errors import ConfigError
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.model_config import ModelConfig
from radix_runtime.offline import Engine
from radix_runtime.prepare import prepare_model
from radix_runtime.quantization.registry import quantizations
from radix_runtime.start_log import pool_warning, served_lines

CONFIG = ModelConfig.from_dir(DEMO_MODEL_DIR)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model"))


def refused(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare_model(ServerArgs(**settings))
    return str(caught.value)


def test_the_names_known_without_torch_are_those_of_the_registries() -> None:
    assert list(ATTENTION_BACKENDS) == attention_backends.names()
    assert list(QUANTIZATIONS) == quantizations.names()
    for former in FORMER_BACKENDS:
        prepare_model(ServerArgs(attention_backend=former))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tool_call_parser": "foo"}, "--tool-call-parser must be one of auto, none, hermes, "),
        ({"reasoning_parser": "foo"}, "--reasoning-parser must be one of auto, none, deepseek-r1"),
        ({"schedule_policy": "foo"}, "--schedule-policy 'foo' is unknown; there are: fcfs, lpm"),
        (
            {"attention_backend": "foo"},
            "attention backend 'foo' is unknown; there are: paged, triton, torch_native",
        ),
        ({"quantization": "odd"}, "quantization 'odd' is unknown; there are: dense, int8, int4"),
        ({"quantization": "awq"}, "--quantization awq: the checkpoint is not quantized"),
        ({"tp_size": 3}, "--tp-size 3"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    assert message in refused(**settings)


def test_a_generation_config_out_of_range(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": -5}')
    assert "temperature must be in" in refused(model_path=str(folder))
    prepare_model(ServerArgs(model_path=str(folder), sampling_defaults="openai"))


def test_engine_checks_before_it_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("radix_runtime.engine.model_runner.load_model", load)
    with pytest.raises(ConfigError, match="--schedule-policy 'foo'"):
        Engine(folder, schedule_policy="foo", device="cpu")
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ConfigError, match="top_p"):
        Engine(folder, device="cpu")


# Checkpoints ----------------------------------------------------------------------------------


def test_the_size_of_a_checkpoint() -> None:
    size = check_checkpoint(DEMO_MODEL_DIR)
    assert size.bytes == (DEMO_MODEL_DIR / "model.safetensors").stat().st_size
    assert 5_900_000 < size.parameters < 6_000_000 and size.bytes > 2 * size.parameters


def test_files_that_are_no_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
    for data, what in (
        (pointer, "is a git-lfs pointer, not the weights themselves: run `git lfs pull`"),
        (whole[: len(whole) // 2], "cannot be read"),
        (b"", "cannot be read"),
    ):
        weights.write_bytes(data)
        assert f"{weights} {what}" in refused(model_path=str(folder))
    weights.unlink()
    assert refused(model_path=str(folder)).startswith(f"{folder} holds no model.safetensors")
    (folder / "pytorch_model.bin").touch()
    assert refused(model_path=str(folder)).endswith("pytorch_model.bin is of another format")
    prepare_model(ServerArgs(model_path=str(folder), load_format="dummy"))


def test_an_index_whose_file_is_missing(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refused(model_path=str(folder))
    assert "model-00001-of-00002.safetensors does not exist" in message
    assert "the download is incomplete" in message


def test_the_architecture_is_judged_before_sizes(folder: Path) -> None:
    """GPT-2 calls its sizes otherwise; what is missing is no size but its support."""
    file = folder / "config.json"
    file.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"], "n_layer": 12}))
    assert "architecture ['GPT2LMHeadModel'] is not supported" in refused(model_path=str(folder))
    file.write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "n_layer": 12}))
    assert "missing required field `num_hidden_layers`" in refused(model_path=str(folder))
    file.unlink()
    assert refused(model_path=str(folder)) == f"{file} does not exist"
    (folder / "model.gguf").touch()
    message = refused(model_path=str(folder))
    assert message.endswith(f"name the GGUF file itself, such as {folder / 'model.gguf'}")


# What a start says ----------------------------------------------------------------------------

INFO: dict[str, Any] = {
    "dtype": "bfloat16",
    "device": "cpu",
    "device_name": None,
    "isa": "avx2",
    "num_threads": 2,
    "attention_backend": "paged",
    "weight_bytes": 11_900_000,
    "kv_cache_bytes": 2_340_000_000,
    "cuda_graphs": 0,
    "captured_rows": 0,
    "captured_tokens": 0,
    "step_bytes": 1 << 30,
    "free_bytes": 5 << 30,
    "max_total_num_tokens": 512,
    "page_size": 16,
    "max_running_requests": 64,
    "chunked_prefill_size": 2048,
    "max_context": 2048,
    "has_chat_template": True,
    "answer_format": "tool calls: hermes (as the flag says); reasoning: none (as the flag says)",
}


def lines(takes_text: bool = True, **info: Any) -> list[str]:
    return list(
        served_lines(
            "radix-demo",
            "http://h:1",
            config=CONFIG,
            size=check_checkpoint(DEMO_MODEL_DIR),
            quantization=None,
            takes_text=takes_text,
            info={**INFO, **info},
        )
    )


def test_the_start_log_says_what_is_served() -> None:
    first, second, answers, third = lines()
    assert first == "serving radix-demo: Qwen3ForCausalLM, 5.9 M parameters, bfloat16"
    assert second == (
        "on cpu (avx2, 2 threads), attention paged, weights 11.9 MB, KV cache 2.34 GB = 512 tokens "
        "in pages of 16, context 2048, 64 requests and 2048 tokens a step"
    )
    assert answers == INFO["answer_format"]
    assert third.startswith("try: curl http://h:1/v1/chat/completions ")
    body = json.loads(third.partition("-d '")[2].removesuffix("'"))
    assert body["model"] == "radix-demo" and body["messages"][0]["content"]
    assert "/v1/completions" in lines(has_chat_template=False)[2]
    *_, third = lines(takes_text=False)
    assert third.startswith("try: curl http://h:1/generate ") and "input_ids" in third
    on_gpu = lines(
        device="cuda",
        device_name="NVIDIA H200",
        cuda_graphs=70,
        captured_rows=256,
        captured_tokens=2048,
    )
    assert "on cuda (NVIDIA H200)" in on_gpu[1]
    assert on_gpu[2] == (
        "GPU memory in GiB: weights 0.01, KV cache 2.18, steps and their 70 CUDA graphs 1.00, "
        "free 5.00"
    )
    assert on_gpu[3] == (
        "captured: decode steps of up to 256 rows, steps with prompts of up to 2048 tokens"
    )
    assert not any("captured" in line for line in lines())


def test_a_pool_smaller_than_the_context_is_told() -> None:
    assert pool_warning(2048, 2048) is None
    warning = pool_warning(16, 2048)
    assert warning is not None and "holds 16 tokens, the context is 2048" in warning


@pytest.mark.parametrize(("template", "tokens"), [(True, 4096), (False, 4096), (True, 512)])
def test_what_may_surprise_is_a_warning(
    template: bool, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A base model has no chat template; the server would refuse chats one by one."""
    prepared = prepare_model(ServerArgs(served_model_name="base"))
    info = {**INFO, "has_chat_template": template, "max_total_num_tokens": tokens}
    with caplog.at_level(logging.INFO):
        serve._announce(prepared, "http://h:1", info)
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert any("this model has no chat template" in text for text in told) == (not template)
    assert any("holds 512 tokens" in text for text in told) == (tokens == 512)
    assert caplog.messages[0].startswith("serving base: ")


def test_an_engine_warns_of_a_small_pool(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Engine(max_total_tokens=64, device="cpu"):
        assert any("holds 64 tokens, the context is 2048" in text for text in caplog.messages)


def test_the_settings_that_differ_are_one_line() -> None:
    assert changed(ServerArgs()) == ""
    args = ServerArgs(page_size=4, disable_radix_cache=True, api_key="secret", dtype="half")
    assert changed(args) == "--dtype float16 --page-size 4 --disable-radix-cache --api-key ***"
