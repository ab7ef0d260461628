"""The shape of a model as its config.json says it, by transformers 4 or 5."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DEFAULT_ROPE_THETA = 10000.0  # transformers' own, for Llama and Qwen
_GGUF_TYPES = {"qwen3moe": "qwen3_moe"}  # where a GGUF file says another name than config.json


@dataclass(frozen=True)
class ModelShape:
    """What decides how long a decoder takes, and its file's header. One whose MLPs are experts has
    `experts` of width `expert_size` in every layer, of which a token takes `experts_per_token`."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Of `folder`/config.json, or of a GGUF file. Raises ValueError for a file that lacks a
        size, or whose RoPE differs between layers."""
        if folder.is_file():
            return cls.of_gguf(folder)
        path = folder / "config.json"
        config = json.loads(path.read_text())
        try:
            return cls.from_config(config)
        except KeyError as error:
            raise ValueError(f"{path} has no {error.args[0]}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def of_gguf(cls, file: Path) -> ModelShape:
        """Of a GGUF file; raises KeyError for a size that is not there."""
        import gguf

        reader = gguf.GGUFReader(file)
        fields = reader.fields
        embedding = next(each for each in reader.tensors if each.name == "token_embd.weight")

        family = fields["general.architecture"].contents()

        def value(key: str, default: Any = None) -> Any:
            name = f"{family}.{key}"
            if name not in fields and default is not None:
                return default
            return fields[name].contents()

        heads = value("attention.head_count")
        hidden = value("embedding_length")
        return cls(
            model_type=_GGUF_TYPES.get(family, family),
            num_layers=value("block_count"),
            hidden_size=hidden,
            intermediate_size=value("feed_forward_length"),
            num_heads=heads,
            num_kv_heads=value("attention.head_count_kv", heads),
            head_dim=value("attention.key_length", hidden // heads),
            vocab_size=int(embedding.shape[1]),  # inputs first
            max_position_embeddings=value("context_length"),
            rms_norm_eps=float(value("attention.layer_norm_rms_epsilon")),
            rope_theta=float(value("rope.freq_base", _DEFAULT_ROPE_THETA)),
            experts=value("expert_count", 0),
            experts_per_token=value("expert_used_count", 0),
            expert_size=value("expert_feed_forward_length", 0),
        )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelShape:
        """Of the contents of a config.json; raises KeyError for a size that is not there."""
        num_heads = config["num_attention_heads"]
        return cls(
            model_type=config["model_type"],
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=_rope_theta(config),
            experts=config.get("num_experts", 0),
            experts_per_token=config.get("num_experts_per_tok", 0),
            expert_size=config.get("moe_intermediate_size", 0),
        )

    @property
    def kv_numbers(self) -> int:
        """Numbers that a token adds to the KV cache, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def named_share(self, rows: int) -> float:
        """The share of a layer's experts that some of so many tokens name, where every expert is as
        likely as any other."""
        if not self.experts:
            return 0.0
        return 1 - (1 - self.experts_per_token / self.experts) ** rows

    @property
    def step_numbers(self) -> int:
        """Weights that a decode step of a dense decoder multiplies with: all layers' and the
        head's."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads  # q and o, k and v
        attention = heads * self.head_dim * self.hidden_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp) + self.vocab_size * self.hidden_size


def _rope_theta(config: dict[str, Any]) -> float:
    """transformers 5 writes a dictionary `rope_parameters`, 4 `rope_theta` beside the sizes."""
    parameters = config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError("rope_parameters differ by layer")
    for source in (parameters, config):
        if source.get("rope_theta") is not None:
            return float(source["rope_theta"])
    return _DEFAULT_ROPE_THETA
