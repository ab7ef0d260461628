"""What llama.cpp's converter makes of the tensors of a checkpoint: experts in tensors of their own,
the parts of latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def converted_tensors(model: Any, *, splits_latents: bool) -> list[tuple[str, torch.Tensor]]:
    """The tensors as transformers' state dict names them; of experts, gate and up apart."""
    if model.config.model_type == "gpt_oss":
        return _gpt_oss_tensors(model)
    tensors = model.state_dict()
    if model.config.model_type == "granitemoe":
        tensors = _granite_moe_tensors(tensors)
    found = _split_experts(model, tensors)
    return _split_latents(model.config, found) if splits_latents else found


def _split_latents(
    config: Any, tensors: list[tuple[str, torch.Tensor]]
) -> list[tuple[str, torch.Tensor]]:
    """The product from latent values to keys, turned round for each head, and to values."""
    found = []
    sizes = [config.qk_nope_head_dim, config.v_head_dim]
    for name, tensor in tensors:
        if ".kv_b_proj." not in name:
            found.append((name, tensor))
            continue
        keys, values = tensor.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
        found.append((name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)))
        found.append((name.replace("kv_b_proj", "v_b_proj"), values))
    return found


def _gpt_oss_tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Its experts have inputs first, and the outputs of gate and up in turn."""
    found = {}
    for name, tensor in model.state_dict().items():
        is_expert = ".experts." in name and not name.endswith("_bias")
        values = tensor.mT if is_expert else tensor
        if "experts.gate_up_proj" in name:
            suffix = ".bias" if name.endswith("_bias") else ".weight"
            prefix = name.removesuffix("_bias").removesuffix("gate_up_proj")
            found[f"{prefix}gate_proj{suffix}"] = values[:, ::2]
            found[f"{prefix}up_proj{suffix}"] = values[:, 1::2]
        else:
            found[name] = values
    return _split_experts(model, found)


def _granite_moe_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its experts, under names that the package knows."""
    return {
        name.replace("block_sparse_moe.experts.", "mlp.experts.").replace(
            "block_sparse_moe.router.", "mlp.gate."
        ): tensor
        for name, tensor in tensors.items()
    }


def _split_experts(
    model: Any, tensors: Mapping[str, torch.Tensor]
) -> list[tuple[str, torch.Tensor]]:
    found = []
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            gate, up = tensor.chunk(2, dim=1)
            found += [(f"{prefix}gate_proj.weight", gate), (f"{prefix}up_proj.weight", up)]
        elif name.endswith("experts.down_proj"):
            found.append((f"{name}.weight", tensor))
        elif name.endswith("experts.down_proj_bias"):
            found.append((name.replace("_bias", ".bias"), tensor))
        elif name.endswith("sinks"):
            found.append((f"{name}.weight", tensor))
        elif name.endswith("correction_bias"):
            found.append((name.replace("_bias", ".bias"), tensor))
        else:
            found.append((name, tensor))
    return found
