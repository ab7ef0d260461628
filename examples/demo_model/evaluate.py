"""Measure a checkpoint on unseen items and phrasings: greedy answers, one table."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data import FAMILIES, Conversation, correct, unseen
from encode import prompt_ids
from tokenizer import END_OF_TEXT, IM_END
from tokenizers import Tokenizer

Generate = Callable[[list[list[int]]], list[list[int]]]
MAX_NEW = 160


def answers(tokenizer: Tokenizer, generate: Generate, asked: list[Conversation]) -> list[str]:
    """The greedy answer to each conversation; one without an end token gets a mark of that."""
    ends = {tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)}
    texts = []
    for output in generate([prompt_ids(tokenizer, conversation) for conversation in asked]):
        stop = next((i for i, token in enumerate(output) if token in ends), None)
        text = tokenizer.decode(output[:stop], skip_special_tokens=False)
        texts.append(text if stop is not None else text + " [no end]")
    return texts


def table(
    tokenizer: Tokenizer, generate: Generate, n: int, show_errors: int = 3
) -> dict[str, dict[str, tuple[int, int]]]:
    """family -> kind of unseen -> (right, asked); prints each row and some errors."""
    result: dict[str, dict[str, tuple[int, int]]] = {}
    for family, (_, _, splits) in FAMILIES.items():
        for split in splits:
            asked = unseen(family, split, n)
            got = answers(tokenizer, generate, asked)
            wrong = [(c, a) for c, a in zip(asked, got, strict=True) if not correct(c.items[-1], a)]
            result.setdefault(family, {})[split.value] = (len(asked) - len(wrong), len(asked))
            share = 100 * (1 - len(wrong) / len(asked))
            print(f"{family:18} {split.value:17} {len(asked):5} {share:6.1f} %", flush=True)
            for conversation, answer in wrong[:show_errors]:
                item = conversation.items[-1]
                print(
                    f"    {[q for q, _ in item.turns]} -> {answer!r} not {item.expected!r}",
                    flush=True,
                )
    return result


def markdown(result: dict[str, dict[str, tuple[int, int]]]) -> str:
    """The table of the model card."""
    lines = ["| family | unseen | asked | right | % |", "| --- | --- | ---: | ---: | ---: |"]
    for family, rows in result.items():
        for kind, (right, asked) in rows.items():
            share = 100 * right / asked
            kind = kind.removeprefix("unseen ")
            lines.append(f"| {family} | {kind} | {asked} | {right} | {share:.1f} |")
    return "\n".join(lines) + "\n"


def transformers_generate(folder: Path, batch: int = 50) -> Generate:
    """Greedy generation in float32 by transformers, on the CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        outputs: list[list[int]] = []
        for start in range(0, len(prompts), batch):
            chunk = prompts[start : start + batch]
            width = max(map(len, chunk))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in chunk])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in chunk])
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=MAX_NEW,
                do_sample=False,
                temperature=None,
                top_p=None,
            )
            outputs.extend(out[:, width:].tolist())
        return outputs

    return generate


def radix_generate(folder: Path, **server_args: Any) -> Generate:
    """Greedy generation by an `Engine` with these settings."""
    from radix_runtime.offline import Engine

    engine = Engine(folder, **server_args)
    greedy = {"temperature": 0, "max_new_tokens": MAX_NEW, "skip_special_tokens": False}

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        return [
            list(output["output_ids"])
            for output in engine.generate(input_ids=prompts, sampling_params=greedy)
        ]

    return generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--engine", action="store_true", help="answer with radix_runtime, not with transformers"
    )
    parser.add_argument("--dtype", default="float32", help="with --engine: compute type")
    parser.add_argument("--quantization", help="with --engine: int8 or int4")
    parser.add_argument("-n", type=int, default=50, help="questions for each family and kind")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    if args.engine:
        settings = {
            "dtype": args.dtype,
            "quantization": args.quantization,
            "num_threads": args.threads,
        }
        generate = radix_generate(args.folder, device="cpu", **settings)
    else:
        generate = transformers_generate(args.folder)
    print(markdown(table(tokenizer, generate, args.n)))


if __name__ == "__main__":
    main()
