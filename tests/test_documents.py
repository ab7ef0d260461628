"""The documents agree with the tree: drawings, figures, file names and links."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from radix_runtime.offline import Engine
from radix_runtime.quantization.registry import quantizations

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *ROOT.glob("runtime/radix_runtime/**/*.md")]
)
# Folders that file names in the documents may be relative to.
BASES = (
    ".",
    "docs",
    "docs/kernels",
    "kernel",
    "kernel/csrc",
    "kernel/csrc/gpu",
    "kernel/csrc/sm80",
    "kernel/csrc/sm90",
    "kernel/csrc/sm100",
    "kernel/include",
    "kernel/python",
    "kernel/python/radix_kernels",
    "runtime",
    "runtime/radix_runtime",
)
SUFFIXES = "c|cc|cmake|cpp|cu|cuh|h|json|map|md|py|pyi|sh|svg|toml|yml"
QUOTED = re.compile(r"`([^`\n]+)`")
WORD = re.compile(r"(?<![\w./*-])[\w*][\w./*-]*")
PART = r"[\w.*-]+"
FILE_NAME = re.compile(rf"{PART}(/{PART})*/({PART}\.({SUFFIXES}))?")
# Without a suffix: what begins with one of the folders that most names begin with.
PATH = re.compile(rf"(kernel|runtime|docs|tests|bench|tools|examples|csrc|cpu|gpu|sm\d+)(/{PART})+")
PLACEHOLDER = re.compile(r"my_|<|YOUR")  # what the reader is to write
# Names of other projects' files, and of what a build or a run makes.
ELSEWHERE = frozenset({"dist/"})
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def file_names(text: str) -> Iterator[str]:
    """The names with a slash that stand in backticks or in a code block."""
    words = QUOTED.findall(FENCE.sub("", text))
    for block in FENCE.findall(text):
        words += WORD.findall(block)
    for word in words:
        is_name = FILE_NAME.fullmatch(word) or PATH.fullmatch(word)
        if is_name and not PLACEHOLDER.search(word):
            yield word


def exists(name: str, document: Path) -> bool:
    """Whether a file or folder of that name is in the tree; `*` stands for any characters."""
    folders = [document.parent, *(ROOT / base for base in BASES)]
    return any(next(folder.glob(name.rstrip("/")), None) is not None for folder in folders)


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found = set()
    for heading in HEADING.findall(FENCE.sub("", document.read_text())):
        kept = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(kept.strip().replace(" ", "-"))
    return found


def broken_links(text: str, document: Path) -> list[str]:
    """The relative links of `text` that lead nowhere."""
    broken = []
    for link in LINK.findall(FENCE.sub("", text)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if not target.exists():
            broken.append(link)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(link)
    return broken


def run(*command: str) -> None:
    child = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stdout + child.stderr


def test_the_drawings_are_those_of_the_imports() -> None:
    run("tools/import_graph.py", "--check")


def test_the_figures_of_the_readme_are_those_measured() -> None:
    run("-m", "bench.readme_figures", "--check")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_document_names_exist(document: Path) -> None:
    names = set(file_names(document.read_text())) - ELSEWHERE
    assert not sorted(name for name in names if not exists(name, document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(document: Path) -> None:
    assert not broken_links(document.read_text(), document)


# An item of a list that ends in the middle of its sentence.
CUT = re.compile(r"\b(?:an?|and|by|from|in|of|or|the|to|with)\n(?=\d+\. |- )")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_item_of_a_list_is_cut_short(document: Path) -> None:
    assert CUT.findall(document.read_text()) == []


def test_an_item_that_is_cut_short_is_found() -> None:
    assert CUT.search("1. The routes are in\n2. Next") and CUT.search("- one of the\n- two")
    assert not CUT.search("1. First the\n   second.\n2. Next")


def blocks(document: Path, language: str) -> list[str]:
    """The code blocks of a document that are in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def test_the_quantization_format_of_the_guide_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed as the guide says, in the form that pip leaves behind; the model answers."""
    guide = ROOT / "docs" / "add_a_quantization_format.md"
    (code,) = blocks(guide, "python")
    (table,) = blocks(guide, "toml")
    (tmp_path / "row_int8.py").write_text(code)
    installed = tmp_path / "row_int8-0.1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: row_int8\nVersion: 0.1\n")
    heading, _, entry = table.partition("\n")
    group = re.fullmatch(r'\[project\.entry-points\."(.+)"\]', heading)
    assert group is not None
    entry_point = entry.replace('"', "")
    (installed / "entry_points.txt").write_text(f"[{group[1]}]\n{entry_point}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(quantizations, "_items", dict(quantizations._items))
    with Engine(quantization="row-int8", dtype="float32", device="cpu") as engine:
        layer = engine.executor.runner.model.model.layers[0].mlp.down_proj
        x = torch.randn(3, layer.codes.shape[1])
        bias = torch.randn(layer.codes.shape[0])
        residual = torch.randn(3, layer.codes.shape[0])
        result = layer.method.apply(layer, x, bias=bias, residual=residual)
        weight = layer.codes.double() * layer.scale.double()[:, None]
        expected = x.double() @ weight.T + bias.double() + residual.double()
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
        output = engine.chat([{"role": "user", "content": "What is 17 + 25?"}])
    assert "42" in output["text"]


def test_a_missing_file_and_a_broken_link_are_found() -> None:
    document = ROOT / "docs" / "architecture.md"
    text = (
        "`scheduler/policy.py` `scheduler/no_such.py` `kernel/csrc/none/` [x](no_such.md#a)\n"
        "```\nin scheduler/no_block.py, scheduler/policy.py\n```\n"
    )
    missing = [name for name in file_names(text) if not exists(name, document)]
    assert missing == ["scheduler/no_such.py", "kernel/csrc/none/", "scheduler/no_block.py"]
    assert broken_links(text, document) == ["no_such.md#a"]
    assert broken_links("[x](glossary.md#no-such) [y](glossary.md#glossary)", document) == [
        "glossary.md#no-such"
    ]


def test_tests_that_the_documents_name_exist() -> None:
    """`file.py::name`, or `::name` of the file that was named before it; in tests/runtime."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    source = ""
    found = 0
    for file, name in re.findall(r"`(test_\w+\.py)?(?:::(test_\w+))?`", text):
        if file:
            source = (ROOT / "tests" / "runtime" / file).read_text()
        if name:
            found += 1
            assert f"def {name}(" in source, f"{file}::{name}"
    assert found > 20
