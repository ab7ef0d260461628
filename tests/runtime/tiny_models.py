"""Small random checkpoints, transformers' answers for them, and a driver of our model by hand-made
step plans. The driver hands out pages in a shuffled order, so a wrong page shows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from radix_runtime.attention.registry import create_attention_backend
from radix_runtime.batch import ForwardBatch
from radix_runtime.config import ServerArgs
from radix_runtime.device import Device
from radix_runtime.distributed import Communicator
from radix_runtime.layers.base import BuildContext
from radix_runtime.memory.kv_layout import kv_layout
from radix_runtime.memory.kv_pool import KVPool
from radix_runtime.model_config import ModelConfig
from radix_runtime.models.loader import load_model
from radix_runtime.quantization.config import QuantizationConfig, Target
from radix_runtime.quantization.registry import quantization_of
from radix_runtime.step_plan import StepPlan

CPU = Device.resolve("cpu")

_COMMON = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_YARN_SIZES = {"max_position_embeddings": 128, "attention_bias": True, "mlp_bias": True}
# name -> (transformers' config class, changes)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "llama_llama3": ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama_yarn": ("Llama", {"rope_parameters": _YARN, **_YARN_SIZES}),
    "mistral_window": ("Mistral", {"sliding_window": 7}),
    "qwen2_bias": ("Qwen2", {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "qwen2_window": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3_untied_odd": ("Qwen3", {"vocab_size": 157}),
    "qwen3_tied_odd": ("Qwen3", {"vocab_size": 157, "tie_word_embeddings": True}),
}  # fmt: skip


def reference_model(name: str, seed: int = 0) -> torch.nn.Module:
    """A transformers model with every parameter random, biases and norms too."""
    family, changes = TINY[name]
    settings = {**_COMMON, **changes}
    if "rope_parameters" in settings:
        settings["rope_parameters"] = {"rope_theta": 10000.0, **settings["rope_parameters"]}
    config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, param in model.named_parameters():
            param.normal_(1.0 if "norm" in key else 0.0, 0.15)
    return model


def save(model: torch.nn.Module, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@torch.no_grad()
def reference_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """float32 [len(ids), vocab]"""
    return model(torch.tensor([ids])).logits[0].float()


@dataclass
class Sequence:
    """One request of the driver."""

    row: int
    ids: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)


def cpu_target(dtype: torch.dtype) -> Target:
    return Target(device=CPU.torch_device, dtype=dtype)


def quantization(config: ModelConfig, args: ServerArgs, target: Target) -> QuantizationConfig:
    return quantization_of(args.quantization, config.quantization, target)


def _poison(pool: KVPool) -> None:
    """What was never stored must never be read; the dummy page may be."""
    for cache in pool.tensors():
        if cache.is_floating_point():  # of INT8 the scales
            cache[:-1].fill_(float("nan"))


class Driver:
    """One rank of our model on the CPU, with its own pool and batch."""

    def __init__(
        self,
        folder: Path,
        *,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        backend: str | None = None,
        communicator: Communicator | None = None,
        args: ServerArgs | None = None,
        target: Target | None = None,
        num_pages: int = 400,
        max_rows: int = 8,
    ) -> None:
        self.config = ModelConfig.from_dir(folder)
        comm = communicator or Communicator()
        layout = kv_layout(
            self.config.spec,
            kv_dtype=kv_dtype or dtype,
            dtype=dtype,
            page_size=page_size,
            ranks=comm.world_size,
        )
        self.pool = KVPool(layout, num_pages=num_pages, device=CPU)
        _poison(self.pool)
        attention = create_attention_backend(
            backend, self.config, CPU, kv_dtype or dtype, page_size
        )
        args = args or ServerArgs(model_path=str(folder))
        ctx = BuildContext(
            communicator=comm,
            backend=attention,
            quantization=quantization(self.config, args, target or cpu_target(dtype)),
            dtype=dtype,
            device=CPU.torch_device,
            max_positions=self.config.max_context,
        )
        self.model = load_model(self.config, args, ctx)
        self.batch = ForwardBatch(
            CPU,
            self.pool,
            max_tokens=300,
            max_batch=max_rows,
            max_rows=max_rows,
            max_context=self.config.max_context,
        )
        self.next_token = torch.zeros((max_rows + 2, 1), dtype=torch.int32)
        self.committed_len = torch.zeros(max_rows + 2, dtype=torch.int32)
        self._free = random.Random(1).sample(range(num_pages), num_pages)
        self._step = 0

    def plan(
        self, work: list[tuple[Sequence, int]], from_device: tuple[Sequence, ...] = ()
    ) -> StepPlan:
        """A step that computes `count` more tokens of each sequence. `from_device` sequences come
        first: they are decode entries, whose ids are those of `next_token`."""
        deltas: list[tuple[int, int, int]] = []
        prompt: list[int] = []
        num_decode = len(from_device)
        assert all(seq is s for (seq, _), s in zip(work, from_device, strict=False))
        for index, (seq, count) in enumerate(work):
            end = seq.computed + count
            while len(seq.pages) * self.pool.page_size < end:
                page = self._free.pop()
                deltas.append((seq.row, len(seq.pages), page))
                seq.pages.append(page)
            if index < num_decode:
                self.next_token[seq.row, 0] = seq.ids[seq.computed]
                self.committed_len[seq.row] = seq.computed
            else:
                prompt += seq.ids[seq.computed : end]
            seq.computed = end
        table = np.array(deltas, np.int32).reshape(-1, 3)
        self._step += 1
        return StepPlan(
            step_id=self._step,
            num_decode=num_decode,
            rows=np.array([seq.row for seq, _ in work], np.int32),
            query_len=np.array([count for _, count in work], np.int32),
            kv_len=np.array([seq.computed for seq, _ in work], np.int32),
            num_samples=np.ones(len(work), np.int32),
            input_ids=np.array(prompt, np.int32),
            page_rows=table[:, 0],
            page_index=table[:, 1],
            page_ids=table[:, 2],
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> torch.Tensor | None:
        """Logits of every real token of the step, [T, vocab]; None on ranks other than 0."""
        self.batch.upload(plan)
        self.batch.fill(self.next_token, self.committed_len)
        hidden = self.model.forward(self.batch)
        return self.model.compute_logits(hidden[: plan.num_tokens])

    def step(self, work: list[tuple[Sequence, int]], **options: Any) -> torch.Tensor | None:
        return self.run(self.plan(work, options.pop("from_device", ())), **options)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def random_ids(config: ModelConfig, count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(config.vocab_size), k=count)
