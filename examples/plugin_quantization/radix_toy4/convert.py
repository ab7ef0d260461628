"""Makes a toy4 checkpoint: python -m radix_toy4.convert FROM TO [--left-out NAME ...]"""

import argparse
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from radix_runtime.quantization.names import NameList

from .method import BLOCK_INPUTS, BLOCK_OUTPUTS, CODES_IN_WORD

_PRODUCT = re.compile(r"\.layers\.\d+\..*_proj\.weight$")


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K], K a multiple of 8 -> codes int32 [N, K / 8] and scales float16 [N / 16,
    K / 32], both rounded up."""
    outputs, inputs = weight.shape
    blocks = (-(-outputs // BLOCK_OUTPUTS), -(-inputs // BLOCK_INPUTS))
    padded = torch.zeros(blocks[0] * BLOCK_OUTPUTS, blocks[1] * BLOCK_INPUTS)
    padded[:outputs, :inputs] = weight
    split = padded.unflatten(1, (-1, BLOCK_INPUTS)).unflatten(0, (-1, BLOCK_OUTPUTS))
    scales = (split.abs().amax((1, 3)) / 7).clamp(min=1e-6).half()
    codes = (split / scales.float()[:, None, :, None]).round().clamp(-8, 7) + 8
    codes = codes.view(padded.shape)[:outputs, :inputs].to(torch.uint8)
    words = (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32)
    assert words.shape == (outputs, inputs // CODES_IN_WORD)
    return words, scales


def convert(source: Path, target: Path, left_out: Sequence[str] = ()) -> None:
    """Writes the checkpoint of folder `source`, in one file, to folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        shutil.copy(file, target)
    tensors: dict[str, torch.Tensor] = {}
    kept = NameList(left_out)
    for key, tensor in load_file(source / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if _PRODUCT.search(key) is None or module in kept:
            tensors[key] = tensor
        else:
            tensors[f"{module}.codes"], tensors[f"{module}.block_scales"] = quantize(tensor)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "toy4", "left_out": list(left_out)}
    (target / "config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--left-out", nargs="*", default=[], help="names of layers")
    args = parser.parse_args()
    convert(args.source, args.target, args.left_out)


if __name__ == "__main__":
    main()
