"""Train the demo model: `python examples/demo_model/train.py --out DIR --minutes 8`.

The tokenizer is trained first (it depends on the data alone). Worker processes generate the data of
step i from `Random(f"{seed} {i}")`, so every run sees the same samples; the learning rate follows
the share of the time (or steps) that has passed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing as mp
import random
import time
from collections.abc import Iterator
from pathlib import Path

import data
import numpy as np
import torch
import torch.nn.functional as F
from core import TOKEN_EDGE
from encode import long_rows, prompt_text, short_rows
from evaluate import MAX_NEW, Generate, markdown, table
from model import Qwen3
from safetensors.torch import load_file, save_file
from tokenizer import CONTEXT, MODEL_CONFIG, train_tokenizer, write_files
from tokenizers import Tokenizer

Batch = dict[str, np.ndarray]


def tokenizer_texts(seed: int, n: int) -> Iterator[str]:
    """The texts the tokenizer is trained on."""
    for sample in itertools.islice(data.training_samples(seed), n):
        if sample.items[0].plain:
            yield "".join(sample.turns[0])
        else:
            yield prompt_text(sample.messages()) + sample.turns[-1][1].replace(TOKEN_EDGE, " ")


def _make_steps(
    args: argparse.Namespace, path: Path, first: int, queue: mp.Queue[list[Batch]]
) -> None:
    """A worker process: the data of the steps first, first + workers, ... until it is killed."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(path))
    step = first
    while True:
        rng = random.Random(f"{args.seed} {step}")
        made = [short_rows(tokenizer, rng, args.rows, 256)]
        if args.long:
            made.append(long_rows(tokenizer, rng, args.long, CONTEXT))
        queue.put(made)
        step += args.workers


class Source:
    """The data of step 0, 1, 2, ... made ahead of time by worker processes."""

    def __init__(self, args: argparse.Namespace, path: Path) -> None:
        context = mp.get_context("spawn")
        self.queues: list[mp.Queue[list[Batch]]] = [context.Queue(6) for _ in range(args.workers)]
        self.workers = [
            context.Process(target=_make_steps, args=(args, path, first, queue), daemon=True)
            for first, queue in enumerate(self.queues)
        ]
        for worker in self.workers:
            worker.start()

    def step(self, number: int) -> list[Batch]:
        """The data of one step, made by the worker whose turn it is."""
        return self.queues[number % len(self.queues)].get(timeout=120)

    def close(self) -> None:
        """Ends the workers."""
        for worker in self.workers:
            worker.kill()


def loss_sum(
    model: torch.nn.Module, batch: Batch, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the token losses and the sum of the weights."""
    tensors = {
        name: torch.from_numpy(array.astype(np.float32 if name == "weights" else np.int64)).to(
            device, non_blocking=True
        )
        for name, array in batch.items()
    }
    ids = tensors["ids"]
    weights = tensors["weights"]
    number = tensors["number"]
    packed = ids.shape[1] < CONTEXT
    logits = model(ids, tensors["positions"], number if packed else None)
    targets = ids[:, 1:]
    weights = weights[:, 1:]
    losses = F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), targets.flatten(), reduction="none"
    )
    return (losses * weights.flatten()).sum(), weights.sum()


def optimizer_for(model: torch.nn.Module, lr: float, device: str) -> torch.optim.AdamW:
    """AdamW; matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=device == "cuda")


def train(args: argparse.Namespace, model: Qwen3, path: Path) -> None:
    """Optimise `model` in place for args.steps steps or args.minutes minutes."""
    run = torch.compile(model, dynamic=False) if args.compile else model
    optimizer = optimizer_for(model, args.lr, args.device)
    source = Source(args, path)
    began: float | None = None
    step = 0
    tokens = 0
    while True:
        passed = 0.0 if began is None else time.monotonic() - began
        share = step / args.steps if args.steps else passed / (60 * args.minutes)
        if share >= 1:
            break
        warm = min(1.0, (step + 1) / args.warmup)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm * (0.5 + 0.5 * math.cos(math.pi * share))
        parts = source.step(step)
        total = float(sum(part["weights"][:, 1:].sum(dtype=np.float64) for part in parts))
        shown = 0.0
        for part in parts:
            with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.device == "cuda"):
                loss, _ = loss_sum(run, part, args.device)
            (loss / total).backward()
            if step % args.log == 0:
                shown += loss.item() / total
            tokens += part["ids"].size
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.log == 0:
            speed = tokens / passed if passed else 0.0
            print(
                f"step {step} passed {passed:.0f} s loss {shown:.4f} {speed / 1e6:.2f} M tokens/s",
                flush=True,
            )
        step += 1
        if step % (10 * args.log) == 0:
            save(model, args.out)
        # Compilation is not part of the budget.
        if began is None and step >= min(5, args.steps or 5):
            began = time.monotonic()
            tokens = 0
    save(model, args.out)
    print(f"{step} steps, {tokens / 1e6:.0f} M tokens", flush=True)
    source.close()


def greedy(model: Qwen3, device: str) -> Generate:
    """Greedy generation without a cache: simple, and fast enough for short answers."""

    @torch.inference_mode()
    def generate(prompts: list[list[int]]) -> list[list[int]]:
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        width = int(lengths.max())
        ids = torch.zeros(len(prompts), width + MAX_NEW, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        ids = ids.to(device)
        rows = torch.arange(len(prompts), device=device)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        for new in range(MAX_NEW):
            seen = ids[:, : width + new]
            positions = torch.arange(seen.shape[1], device=device).expand_as(seen)
            last = model(seen, positions)[rows, lengths + new - 1].argmax(-1)
            ids[rows, lengths + new] = last
            done |= (last == 2) | (last == 0)
            if bool(done.all()):
                break
        return [ids[row, n : n + new + 1].tolist() for row, n in enumerate(lengths.tolist())]

    return generate


def save(model: Qwen3, folder: Path) -> None:
    """Write model.safetensors in bfloat16."""
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load(model: Qwen3, folder: Path) -> None:
    """Give `model` the rounded weights that were saved."""
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="go on from this checkpoint and its tokenizer")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=0, help="instead of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--rows", type=int, default=256, help="rows of 256 tokens a step")
    parser.add_argument("--long", type=int, default=8, help="conversations of 2048 tokens a step")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--layers", type=int, default=int(str(MODEL_CONFIG["num_hidden_layers"])))
    parser.add_argument("--eval", type=int, default=200, help="questions for each family and kind")
    parser.add_argument("--log", type=int, default=200, help="steps between log lines")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    print("data", data.fingerprint(args.seed, 2000), flush=True)
    path = args.out / "tokenizer.json"
    if args.init is None:
        tokenizer = train_tokenizer(tokenizer_texts(args.seed, 60_000))
    else:
        tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json"))
    write_files(args.out, tokenizer)
    config = {**MODEL_CONFIG, "num_hidden_layers": args.layers}
    model = Qwen3(config).to(args.device)
    if args.init is not None:
        load(model, args.init)
    train(args, model, path)
    load(model, args.out)
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    torch.set_float32_matmul_precision("highest")
    result = table(Tokenizer.from_file(str(path)), greedy(model.eval(), args.device), args.eval)
    (args.out / "table.md").write_text(markdown(result), encoding="utf-8")


if __name__ == "__main__":
    main()
