"""Writes the table of architectures in docs/models.md: `python tools/model_matrix.py` (`--check`
only compares).

A row for each architecture of the registry (`radix_runtime/families`). What it is built of comes
from the specs of the small models that `tests/runtime/test_families.py` compares with transformers;
whether the CPU runs it in one call, and under which name GGUF files have it, from the lists that
the same tests go through. An architecture without such a model is an error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
BEGIN = "<!-- architectures: python tools/model_matrix.py -->\n"
END = "<!-- end of architectures -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    check = parser.parse_args().check
    wanted = page()
    if PAGE.read_text() == wanted:
        return 0
    print(f"{PAGE.relative_to(ROOT)} {'is stale' if check else 'written'}")
    if not check:
        PAGE.write_text(wanted)
    return 1 if check else 0


def page() -> str:
    """docs/models.md as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def table() -> str:
    """The table in Markdown. Raises LookupError for an architecture that no test compares."""
    from radix_runtime.families import families
    from tests.runtime.family_models import FAMILY_MODELS, spec_of
    from tests.runtime.gguf_files import CASES

    tested: dict[str, list[str]] = {}
    for name, model in FAMILY_MODELS.items():
        tested.setdefault(model.architecture, []).append(name)
    archs: dict[str, dict[str, None]] = {}
    for case in CASES.values():
        archs.setdefault(case.family.architecture, {})[case.arch] = None
    lines = [
        "",
        "| architecture | attention | feed-forward | GGUF | compared as |",
        "|---|---|---|---|---|",
    ]
    for architecture in sorted(families.names(), key=str.lower):
        names = tested.get(architecture)
        if names is None:
            raise LookupError(f"no model of tests/runtime/family_models.py is a {architecture}")
        specs = [spec_of(name) for name in names]
        cells = [
            f"`{architecture}`",
            _joined(layer.mixer for spec in specs for layer in spec.layers),
            _joined(layer.feed_forward for spec in specs for layer in spec.layers),
            ", ".join(f"`{arch}`" for arch in archs.get(architecture, ())),
            ", ".join(f"`{name}`" for name in names),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", ""])


def _joined(blocks: Any) -> str:
    """What some of the blocks have, each said once."""
    return ", ".join(dict.fromkeys(word for block in blocks for word in _words(block)))


def _words(block: Any) -> list[str]:
    from radix_runtime.specs import Gqa, Mla, Mlp

    if isinstance(block, Mla):
        return ["latent"]
    if isinstance(block, Gqa):
        return _attention_words(block)
    if isinstance(block, Mlp):
        return ["MLP" if block.activation == "silu" else f"MLP ({block.activation})"]
    return _expert_words(block)


def _attention_words(mixer: Any) -> list[str]:
    from radix_runtime.specs import AllHeadsNorm, HeadNorm

    has = {
        "norm of each head": isinstance(mixer.qk_norm, HeadNorm),
        "norm over all heads": isinstance(mixer.qk_norm, AllHeadsNorm),
        "window": mixer.window is not None,
        "soft cap": mixer.softcap is not None,
        "sinks": mixer.sinks,
        "layers without RoPE": mixer.rope is None,
        "scale by position": mixer.position_scale is not None,
    }
    return ["grouped", *(word for word, is_so in has.items() if is_so)]


def _expert_words(moe: Any) -> list[str]:
    router = type(moe.router).__name__.removesuffix("Router")
    kinds = {
        "Softmax": "softmax",
        "Sigmoid": "sigmoid",
        "Grouped": "grouped sigmoid",
        "GroupedSoftmax": "grouped softmax",
    }
    words = [f"experts ({kinds[router]} router)"]
    if moe.shared is not None:
        words.append("gated shared expert" if moe.shared.gated else "shared expert")
    if moe.bias or moe.activation != "silu":
        words.append("biases, clamped SwiGLU")
    return words


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "kernel/python")]
    sys.exit(main())
