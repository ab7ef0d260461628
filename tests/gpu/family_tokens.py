"""Greedy bfloat16 tokens of random models of eight families on a GPU, against transformers'.

    python -m tests.gpu.family_tokens [--families llama qwen3 ...] [--device cuda] [--prompts 50]

Per family a checkpoint in bfloat16 is served from CUDA graphs and with steps queued kernel by
kernel. Our tokens are fed to transformers' bfloat16 model on the same device: its best token at
each position must be ours, up to the first position where float32's two best logits are within
0.25. In four prompts of five there must be no such position. A line for each run; exit status 1 if
anything is wrong.

The families are those of tests/runtime/family_models.py that differ most, in sizes that the kernels
of GPUs take: biases (llama), norms of heads (qwen3), experts by softmax (qwen3_moe), latent
attention with groups of experts by sigmoid (deepseek_v3), norms of 1 + w with windows and two RoPEs
(gemma3), experts beside a shared one with biases (glm4_moe), merged weights and a window (phi3),
norms over all heads behind the layers (olmo2). gpt-oss, with experts in MXFP4 too, has a program of
its own (`gpt_oss_tokens`); the remaining families are made of the same parts as these.

A trained model is sure of most of its tokens, a random one of few: with 64 tokens hardly any prompt
keeps clear of near ties, and a larger head enlarges the effects of rounding as much as the gaps. So
the head of each checkpoint is fitted to the random model's own greedy answers (`make_sure`): the
same tokens are best, their gaps are at least CLEAR. Both sides read that head.

Which experts a token passes hangs on small differences too, and in these models each of them counts
for much, at later tokens as well. So an answer may also part where the float32 model's own best
token is another once the inputs of its routers are off by what bfloat16 rounds (`routing_decides`):
with glm4_moe at six positions in a thousand.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from radix_runtime import Engine, SamplingParams
from tests.gpu.quantized_tokens import run_or_tell, tell
from tests.runtime.family_models import FAMILY_MODELS, FamilyModel, random_model
from tests.runtime.tiny_models import save

NEW_TOKENS = 64
CLOSE = 0.25  # between float32's two best logits: bfloat16 may decide otherwise below
SHARE = 0.8  # of the prompts, that must be compared to the end
LONGEST = 200  # tokens of a prompt
SPREAD = 2.5  # of the logits, their standard deviation
# The least gap that a head is fitted to: bfloat16 may choose another expert.
CLEAR = 0.75
CLEAR_EXPERTS = 1.5
ROUNDS = 50  # of fitting
# Of a router's input, what the roundings of some layers in bfloat16 come to, and how often tried.
ROUTER_NOISE = 2.0**-7
ROUTER_TRIES = 64
EXCUSED = 0.1  # of the prompts, at most, part there
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,  # a head of its own, to be fitted
}
_EXPERTS = {"num_experts_per_tok": 8, "moe_intermediate_size": 128}
# Further keys of each family's configuration.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {**_EXPERTS, "head_dim": 128, "num_experts": 32},
    "deepseek_v3": {
        **_EXPERTS,
        "n_routed_experts": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 64},
    "glm4_moe": {**_EXPERTS, "head_dim": 128, "n_routed_experts": 32},
    "phi3": {"sliding_window": 64},
    "olmo2": {},
}
Rows = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class Made:
    """A checkpoint in bfloat16, and transformers' models of it in both types."""

    folder: Path
    exact: torch.nn.Module
    rounded: torch.nn.Module


def prompts(count: int) -> Rows:
    """The same in every run, of 1 to 200 tokens."""
    rng = random.Random(3)
    ids = range(3, SIZES["vocab_size"])
    return [rng.choices(ids, k=rng.randint(1, LONGEST)) for _ in range(count)]


def last_states(model: Any, rows: Rows, count: int) -> torch.Tensor:
    """What the head multiplies at the last `count` tokens of each row, [rows, count, hidden].

    Rows are padded behind their ends, which no token of a causal model sees.
    """
    longest = max(map(len, rows))
    padded = [row + [0] * (longest - len(row)) for row in rows]
    device = model.lm_head.weight.device
    ends = torch.tensor([len(row) for row in rows], device=device)
    places = ends[:, None] + torch.arange(-count, 0, device=device)
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor(padded, device=device), use_cache=False)[0]
    found: torch.Tensor = states[torch.arange(len(rows), device=device)[:, None], places]
    return found


def next_logits(model: Any, rows: Rows, count: int) -> torch.Tensor:
    """float32 logits before each of the last `count` tokens of each row, [rows, count, vocab]."""
    before = [row[:-1] for row in rows]
    with torch.no_grad():
        logits: torch.Tensor = model.lm_head(last_states(model, before, count))
    return logits.float()


def routing_decides(model: Any, rows: Rows, count: int) -> torch.Tensor:
    """[rows, count], where the best of the last `count` tokens of each row is not always the same
    once what routers read, at any token, is off by ROUTER_NOISE."""
    rng = torch.Generator(model.lm_head.weight.device).manual_seed(3)

    def blur(gate: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        noise = torch.empty_like(args[0]).normal_(0, ROUTER_NOISE, generator=rng)
        return (args[0] * (1 + noise), *args[1:])

    best = next_logits(model, rows, count).argmax(-1)
    found = torch.zeros_like(best, dtype=torch.bool)
    gates = [
        module for name, module in model.named_modules() if name.endswith((".gate", ".router"))
    ]
    if not gates:
        return found.cpu()
    hooks = [gate.register_forward_pre_hook(blur) for gate in gates]
    try:
        for _ in range(ROUTER_TRIES):
            found |= next_logits(model, rows, count).argmax(-1) != best
    finally:
        for hook in hooks:
            hook.remove()
    return found.cpu()


def greedy(model: Any, rows: Rows, count: int) -> Rows:
    """The rows, each with the `count` tokens that the model appends."""
    for _ in range(count):
        with torch.no_grad():
            best = model.lm_head(last_states(model, rows, 1)).argmax(-1)
        rows = [row + new for row, new in zip(rows, best.tolist(), strict=True)]
    return rows


def make_sure(model: Any, rows: Rows, count: int, clear: float) -> None:
    """Changes the head so that the tokens with which the model continues each row, `count` of them,
    stay the best and are `clear` ahead of the second.

    Each round adds the least squares solution for what the gaps lack.
    """
    states = last_states(model, [row[:-1] for row in greedy(model, rows, count)], count)
    states = states.flatten(0, 1).double()
    head = model.lm_head.weight.data.double()
    head *= SPREAD / (states @ head.T).std()
    tokens = (states @ head.T).argmax(-1, keepdim=True)
    square = states.T @ states
    square += 1e-3 * square.diagonal().mean() * torch.eye(len(square)).to(square)
    for _ in range(ROUNDS):
        logits = states @ head.T
        others = logits.scatter(-1, tokens, -torch.inf)
        second = others.amax(-1, keepdim=True)
        lack = (clear - (logits.gather(-1, tokens) - second)).clamp(min=0)
        if not lack.any():
            break
        wanted = torch.zeros_like(logits).scatter(-1, tokens, lack)
        wanted -= torch.where(others == second, lack, 0.0)
        head += torch.linalg.solve(square, states.T @ wanted).T
    model.lm_head.weight.data.copy_(head.bfloat16())


def made(folder: Path, family: str, rows: Rows, count: int, device: str) -> Made:
    """Every parameter is random, norms and biases too, and one of bfloat16's numbers."""
    base = FAMILY_MODELS[family]
    changes = {**base.changes, **SIZES, **FAMILIES[family]}
    exact = random_model(replace(base, changes=changes))
    narrow = FamilyModel(base.name).config().hidden_size
    for key, param in exact.named_parameters():
        if param.dim() > 1 and "embed" not in key:
            param.data.mul_((narrow / SIZES["hidden_size"]) ** 0.5)  # sums of more products
        param.data.copy_(param.data.bfloat16())
    exact.to(device)
    clear = CLEAR_EXPERTS if "num_experts_per_tok" in changes else CLEAR
    make_sure(exact, rows, count, clear)
    rounded = copy.deepcopy(exact)
    for param in rounded.parameters():  # not the buffers: RoPE's frequencies, biases of routers
        param.data = param.data.bfloat16()
    return Made(folder=save(rounded, folder), exact=exact, rounded=rounded)


def answers(folder: Path, rows: Rows, count: int, **settings: Any) -> Rows:
    """Our greedy tokens for each prompt."""
    params = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
    with Engine(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_total_tokens=1 << 14,
        max_running_requests=64,
        chunked_prefill_size=512,
        **settings,
    ) as engine:
        outputs = engine.generate(input_ids=rows, sampling_params=params)
    return [output["output_ids"] for output in outputs]


def first_of(flags: torch.Tensor) -> int:
    """The first position that is set, or the length."""
    places = flags.nonzero()
    return int(places[0]) if len(places) else len(flags)


def compare(models: Made, rows: Rows, tokens: Rows, count: int) -> tuple[str, bool]:
    """What to print of our tokens, and whether all is well."""
    whole = [row + new for row, new in zip(rows, tokens, strict=True)]
    best = next_logits(models.exact, whole, count).topk(2).values
    gaps = (best[..., 0] - best[..., 1]).cpu()
    differs = next_logits(models.rounded, whole, count).argmax(-1).cpu() != torch.tensor(tokens)
    ends = [first_of(row < CLOSE) for row in gaps]
    parts = [first_of(row) for row in differs]
    to_end = ends.count(count)
    compared = sum(map(min, parts, ends))
    clear = [index for index in range(len(rows)) if parts[index] < ends[index]]
    excused = 0
    if clear:
        decided = routing_decides(models.exact, [whole[index] for index in clear], count)
        excused = sum(bool(decided[place, parts[index]]) for place, index in enumerate(clear))
    wrong = len(clear) - excused
    parted = [(at, index) for index, at in enumerate(parts) if at < count]
    first = "none"
    if parted:
        at, index = min(parted)
        first = f"token {at} of prompt {index}, gap {float(gaps[index, at]):.3f}"
    text = (
        f"{to_end} of {len(rows)} prompts compared to the end, {compared} of "
        f"{len(rows) * count} tokens equal before a close one (least gap {float(gaps.min()):.2f}); "
        f"{len(parted)} prompts part, {excused} where routing decides, {wrong} at a clear gap, "
        f"first: {first}"
    )
    is_well = wrong == 0 and excused <= EXCUSED * len(rows)
    return text, is_well and to_end >= SHARE * len(rows)


def check(family: str, device: str, num_prompts: int, count: int = NEW_TOKENS) -> bool:
    """Prints a line for each run; whether all is well."""
    rows = prompts(num_prompts)
    runs: dict[str, dict[str, Any]] = {"bfloat16": {}}
    if device != "cpu":
        runs["bfloat16, queued"] = {"disable_cuda_graph": True}
    is_well = True
    with tempfile.TemporaryDirectory() as home:
        models = made(Path(home), family, rows, count, device)
        for name, flags in runs.items():
            tokens = answers(models.folder, rows, count, device=device, **flags)
            is_well &= tell(f"{family}, {name}", *compare(models, rows, tokens, count))
    return is_well


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="of each answer")
    args = parser.parse_args()
    found = [
        run_or_tell(family, partial(check, family, args.device, args.prompts, args.tokens))
        for family in args.families
    ]
    sys.exit(not all(found))


if __name__ == "__main__":
    main()
