"""ModelConfig against transformers' reading of the same files, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from radix_runtime import registry
from radix_runtime.errors import ConfigError
from radix_runtime.model_config import ModelConfig
from radix_runtime.specs import Gqa, HeadNorm, Mlp, RmsNorm, Rope

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
_ORIGINAL = "original_max_position_embeddings"
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


def config(family: str = "Llama", **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**BASE, "architectures": [f"{family}ForCausalLM"], **changes})


def attention(model: ModelConfig) -> Gqa:
    mixer = model.spec.layers[0].mixer
    assert isinstance(mixer, Gqa)
    return mixer


def feed_forward(model: ModelConfig) -> Mlp:
    block = model.spec.layers[0].feed_forward
    assert isinstance(block, Mlp)
    return block


def rope(model: ModelConfig) -> Rope:
    found = attention(model).rope
    assert found is not None
    return found


def windows(model: ModelConfig) -> tuple[int | None, ...]:
    return tuple(layer.mixer.window for layer in model.spec.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_defaults(family: str, tmp_path: Path) -> None:
    """What a file does not say is what the model's class in transformers says."""
    raw = {**BASE, "architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = getattr(transformers, f"{family}Config").from_pretrained(tmp_path)
    ours = ModelConfig.from_dir(tmp_path)
    norm = RmsNorm(eps=theirs.rms_norm_eps)
    assert ours.spec.final_norm == norm
    assert all(layer.pre_norm == norm and layer.post_norm is None for layer in ours.spec.layers)
    assert ours.spec.tied_head == theirs.tie_word_embeddings
    assert rope(ours).theta == theirs.rope_parameters["rope_theta"]
    window = getattr(theirs, "sliding_window", None)
    assert windows(ours) == (window,) * 4
    assert attention(ours).qkv_bias == (family == "Qwen2") and not attention(ours).o_bias
    assert attention(ours).qk_norm == (HeadNorm(norm=norm) if family == "Qwen3" else None)
    assert feed_forward(ours) == Mlp(width=96, activation="silu", bias=False)
    assert ours.dtype == "float32"


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_what_transformers_writes(family: str, tmp_path: Path) -> None:
    theirs = getattr(transformers, f"{family}Config")(
        **{k: v for k, v in BASE.items() if k != "architectures"},
        head_dim=32,
        num_key_value_heads=2,
        rms_norm_eps=3e-5,
        rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e5,
                         "original_max_position_embeddings": 256},
        tie_word_embeddings=True,
        dtype="bfloat16",
    )  # fmt: skip
    theirs.architectures = [f"{family}ForCausalLM"]
    theirs.save_pretrained(tmp_path)
    ours = ModelConfig.from_dir(tmp_path)
    mixer = attention(ours)
    assert (mixer.head_dim, mixer.num_kv_heads, mixer.num_heads) == (32, 2, 4)
    assert ours.spec.final_norm == RmsNorm(eps=3e-5)
    assert ours.spec.tied_head and ours.dtype == "bfloat16"
    assert rope(ours).theta == 5e5 and rope(ours).rotary_dim == 32
    scaling = rope(ours).scaling
    assert scaling is not None
    assert scaling["rope_type"] == "yarn" and scaling["factor"] == 2.0
    assert not ours.unknown_keys


@pytest.mark.parametrize(
    "old",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_theta": 500000, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4}},
    ],
)
def test_both_spellings_of_rope_are_one(old: dict[str, Any]) -> None:
    new = {"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 5e5}}
    assert config(**old) == config(**new)


def test_both_spellings_of_dtype() -> None:
    assert config(torch_dtype="float16").dtype == config(dtype="float16").dtype == "float16"


def test_partial_rotary() -> None:
    assert rope(config(head_dim=64, partial_rotary_factor=0.5)).rotary_dim == 32
    nested = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}
    assert rope(config(head_dim=64, **nested)).rotary_dim == 16


def test_qwen_windows() -> None:
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert windows(config("Qwen2", sliding_window=8)) == (None,) * 4
    assert windows(config("Qwen2", max_window_layers=2, **on)) == (None, None, 8, 8)
    assert windows(config("Qwen2", max_window_layers=0, **on)) == (8,) * 4
    assert windows(config("Qwen2", max_window_layers=4, **on)) == (None,) * 4
    types = ["full_attention", "sliding_attention"] * 2
    assert windows(config("Qwen3", layer_types=types, **on)) == (None, 8, None, 8)
    assert windows(config("Qwen3", layer_types=types)) == (None,) * 4


@pytest.mark.parametrize("max_window_layers", [0, 1, 3, 4, 28])
def test_qwen_windows_equal_transformers(max_window_layers: int) -> None:
    settings = {
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": max_window_layers,
    }
    theirs = transformers.Qwen2Config(num_hidden_layers=4, **settings)
    expected = tuple(16 if t == "sliding_attention" else None for t in theirs.layer_types)
    assert windows(config("Qwen2", **settings)) == expected


def test_mistral_windows() -> None:
    assert windows(config("Mistral", sliding_window=None)) == (None,) * 4
    assert windows(config("Mistral", sliding_window=32)) == (32,) * 4
    assert windows(config("Llama", sliding_window=32)) == (None,) * 4


def test_max_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert config().max_context == 512
    assert config(rope_scaling=yarn).max_context == 2048
    assert config(rope_scaling={**yarn, "original_max_position_embeddings": 100}).max_context == 512
    assert config(rope_scaling={"type": "linear", "factor": 4.0}).max_context == 512


def test_null_is_absent() -> None:
    nulls = dict.fromkeys(
        ("head_dim", "rope_scaling", "rms_norm_eps", "attention_bias", "quantization_config")
    )
    assert config(**nulls) == config()


def test_overrides(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    text = '{"num_hidden_layers": 2, "rope_theta": 7}'
    changed = ModelConfig.from_dir(tmp_path, text)
    assert changed.num_layers == 2 and rope(changed).theta == 7.0
    for bad in ("{", "[]", "3"):
        with pytest.raises(ConfigError, match="--json-model-override-args"):
            ModelConfig.from_dir(tmp_path, bad)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
PLAIN = {"rope_theta": 5e5, "rope_type": "default"}
BASED = {"rope_theta": 5e5, **YARN}


@pytest.mark.parametrize(
    ("file", "override", "theta", "scaling"),
    [
        (PLAIN, {"rope_scaling": YARN}, 5e5, YARN),
        (PLAIN, {"rope_scaling": {**YARN, "rope_theta": 9}}, 9.0, YARN),
        (BASED, {"rope_parameters": {"factor": 2.0}}, 5e5, {**YARN, "factor": 2.0}),
        (BASED, {"rope_theta": 7}, 7.0, YARN),
        (
            BASED,
            {"rope_scaling": {"type": "linear", "factor": 3}},
            5e5,
            {"rope_type": "linear", "factor": 3},
        ),
        (BASED, {"rope_scaling": None}, 5e5, None),
    ],
)
def test_rope_overrides_are_merged(
    file: dict[str, Any],
    override: dict[str, Any],
    theta: float,
    scaling: dict[str, Any] | None,
    tmp_path: Path,
) -> None:
    """Also where the file and the override write RoPE in different ways."""
    beside = {
        "rope_theta": file["rope_theta"],
        "rope_scaling": {k: v for k, v in file.items() if k != "rope_theta"},
    }
    for form in ({"rope_parameters": file}, beside):
        (tmp_path / "config.json").write_text(json.dumps(BASE | form))
        found = rope(ModelConfig.from_dir(tmp_path, json.dumps(override)))
        assert (found.theta, found.scaling) == (theta, scaling)


@pytest.mark.parametrize("key", ["rope_scalling", "num_layers", "eos_token_id"])
def test_an_override_that_would_change_nothing_is_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    with pytest.raises(
        ConfigError, match=f"--json-model-override-args: {key} would change nothing"
    ):
        ModelConfig.from_dir(tmp_path, json.dumps({key: 1, "vocab_size": 7}))
    with pytest.raises(ConfigError, match="must be objects"):
        ModelConfig.from_dir(tmp_path, '{"rope_scaling": "yarn"}')


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
@pytest.mark.parametrize("inside", [{}, {_ORIGINAL: 64}])
@pytest.mark.parametrize("beside", [{}, {_ORIGINAL: 32}])
def test_the_original_context(kind: str, inside: dict[str, int], beside: dict[str, int]) -> None:
    """As transformers where it stands among the others, or nowhere; but nothing is made up for
    llama3."""
    settings = {
        "rope_type": kind,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": 1e4,
    }
    if kind == "llama3" and not (inside or beside):
        with pytest.raises(
            ConfigError, match="needs a positive original_max_position_embeddings, got None"
        ):
            config(rope_parameters=settings)
        return
    scaling = rope(config(**beside, rope_parameters={**settings, **inside})).scaling
    theirs = transformers.LlamaConfig(**BASE, rope_parameters={**settings, **beside, **inside})
    assert scaling is not None and scaling[_ORIGINAL] == theirs.rope_parameters[_ORIGINAL]


def test_an_architecture_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "MyForCausalLM"

    names = {
        "architectures": ["MyForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
        "sliding_window": 8,
    }
    with pytest.raises(
        ConfigError, match="is not supported; supported: Llama.*SmolLM3ForCausalLM$"
    ):
        config(**names)
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [Entry()] if group == "radix.models" else []
    )
    mine = config(**names, odd={"a": 1})
    assert mine.architecture == "MyForCausalLM"
    assert attention(mine).qkv_bias and attention(mine).o_bias and feed_forward(mine).bias
    assert mine.raw["odd"] == {"a": 1}
    assert windows(mine) == (None,) * 4
    sliding = config(
        **names, use_sliding_window=True, layer_types=["full_attention", "sliding_attention"] * 2
    )
    assert windows(sliding) == (None, 8, None, 8)
    with pytest.raises(ConfigError, match="MyForCausalLM$"):
        config(architectures=["YourForCausalLM"])


def test_tp() -> None:
    model = config(num_attention_heads=8, num_key_value_heads=2, hidden_size=128)
    assert [attention(model).kv_heads_per_rank(n) for n in (1, 2, 4, 8)] == [2, 1, 1, 1]
    for size in (1, 2, 4, 8):
        model.check_tp(size)
    with pytest.raises(ConfigError, match=r"divide the 8 attention heads; what fits: 1, 2, 4, 8$"):
        model.check_tp(3)
    with pytest.raises(ConfigError, match="the MLP width 96; what fits: 1, 2, 4, 8, 16, 32"):
        config(num_attention_heads=64, hidden_size=1024).check_tp(64)
    with pytest.raises(ConfigError, match="does not fit 6 KV heads"):
        config(num_attention_heads=12, num_key_value_heads=6, hidden_size=192).check_tp(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "is not supported; supported: Llama"),
        ({"architectures": []}, "is not supported"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "is not supported"),
        ({"hidden_size": "64"}, r"config.json: Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"hidden_size": None}, "missing required field `hidden_size`"),
        ({"num_hidden_layers": 0}, r"Expected `int` >= 1 - at `\$.num_hidden_layers`"),
        ({"vocab_size": -1}, r"Expected `int` >= 1 - at `\$.vocab_size`"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 must divide"),
        ({"num_key_value_heads": 0}, r"at `\$.num_key_value_heads`"),
        ({"head_dim": 24}, "head_dim 24 is not a multiple of 16"),
        ({"head_dim": 272}, "head_dim 272 is not a multiple of 16"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
        ({"torch_dtype": "float8"}, "dtype 'float8'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' needs a positive original_max"),
        ({"rope_scaling": {"type": "linear"}}, "needs a positive factor, got None"),
        ({"rope_scaling": {"type": "yarn", "factor": -1}}, "needs a positive factor, got -1"),
        (
            {"rope_scaling": {"type": "llama3", _ORIGINAL: 9, "factor": 2}},
            "a positive low_freq_factor",
        ),
        ({"rope_parameters": {"full_attention": {}}}, "that differ by layer"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict({**BASE, **changes})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Mistral", {"layer_types": ["full_attention"] * 4}, "layer_types of a Mistral model"),
        ("Mistral", {"sliding_window": 0}, r"at `\$.sliding_window`"),
        ("Qwen3", {"layer_types": ["full_attention"] * 3}, "layer_types must be 4 of"),
        ("Qwen3", {"layer_types": ["linear_attention"] * 4}, "layer_types must be 4 of"),
    ],
)
def test_windows_that_are_not_supported(family: str, changes: dict[str, Any], message: str) -> None:
    on = {"use_sliding_window": True, "sliding_window": 8}
    with pytest.raises(ConfigError, match=message):
        config(family, **{**on, **changes})


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "\udcff"])
def test_a_file_that_cannot_be_read(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_a_former_name_of_an_architecture() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 160,
             "num_attention_heads": 4, "num_key_value_heads": 2,
             "max_position_embeddings": 256}  # fmt: skip
    found = ModelConfig.from_dict({"architectures": ["Ernie4_5_ForCausalLM"], **sizes})
    assert found.architecture == "Ernie4_5ForCausalLM" and found.spec.hidden_size == 64


def test_the_architecture_is_judged_first() -> None:
    """Sizes of another architecture may stand anywhere, or have other names."""
    with pytest.raises(ConfigError, match=r"architecture \['T5Model'\] is not supported"):
        ModelConfig.from_dict({"architectures": ["T5Model"], "d_model": 64})
    with pytest.raises(ConfigError, match="architecture .* is not supported"):
        ModelConfig.from_dict({"architectures": ["X"], "quantization_config": {}, "vocab_size": []})
