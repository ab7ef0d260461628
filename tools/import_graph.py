"""The import graph of both packages: who imports whom, circles, and the drawings of the documents.

    python tools/import_graph.py          # rewrites the drawings in docs/architecture.md
    python tools/import_graph.py --check  # exit status 1 if a drawing is stale or there is a circle

A part of a package is one of its top-level files or folders. A drawing shows parts in layers, the
lowest at the bottom, and only the arrows that no longer path implies. Imports under TYPE_CHECKING
and inside functions count: a circle held open by them is a circle.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "architecture.md"
PACKAGES = {
    "radix_runtime": ROOT / "runtime" / "radix_runtime",
    "radix_kernels": ROOT / "kernel" / "python" / "radix_kernels",
}
# Names, not modules, import lazily from the package's own door: it belongs to no layer.
DOORS = ("__init__", "__main__")

Graph = Mapping[str, set[str]]


def modules(package: Path) -> dict[str, Path]:
    """Dotted name below the package -> file; a folder's `__init__` has the folder's name."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        found[".".join(parts)] = file
    return found


def imports(package: Path) -> dict[str, set[str]]:
    """Module -> the modules of the same package that it imports, wherever the import stands."""
    files = modules(package)
    graph: dict[str, set[str]] = {}
    for name, file in files.items():
        inside = file.name == "__init__.py"
        here = [] if name == "__init__" else name.split(".")
        folder = here if inside else here[:-1]
        targets = set(_imported(ast.parse(file.read_text()), package.name, folder))
        found = {_module_of(target, files) for target in targets}
        graph[name] = {module for module in found if module not in (None, name)}
    return graph


def _imported(tree: ast.AST, package: str, folder: list[str]) -> Iterator[str]:
    """Dotted names below the package, of modules or of what is in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith(f"{package}."):
                    yield alias.name.removeprefix(f"{package}.")
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package, folder)
            if base is not None:
                for alias in node.names:
                    yield ".".join([*base, alias.name])


def _base(node: ast.ImportFrom, package: str, folder: list[str]) -> list[str] | None:
    """Where the names of an import lie, below the package; None: elsewhere."""
    module = (node.module or "").split(".") if node.module else []
    if node.level:
        return folder[: len(folder) - (node.level - 1)] + module
    return module[1:] if module[:1] == [package] else None


def _module_of(target: str, files: Mapping[str, Path]) -> str | None:
    """The longest prefix of `target` that is a module."""
    parts = target.split(".")
    while parts:
        name = ".".join(parts)
        if name in files:
            return name
        parts.pop()
    return None


def parts(graph: Graph) -> dict[str, set[str]]:
    """The graph of the package's top-level files and folders, its doors left out."""
    merged: dict[str, set[str]] = {}
    for name, targets in graph.items():
        part = name.split(".")[0]
        if part in DOORS:
            continue
        others = {target.split(".")[0] for target in targets}
        merged.setdefault(part, set()).update(others - {part, *DOORS})
    return merged


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other, each of two or more (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in order:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], order[target])
        if low[node] == order[node]:
            start = stack.index(node)
            group = stack[start:]
            del stack[start:]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return found


def layers(graph: Graph) -> list[list[str]]:
    """Nodes by the longest path below them, the lowest first. Raises ValueError on a circle."""
    if found := circles(graph):
        raise ValueError(f"imports run in a circle: {found}")
    height: dict[str, int] = {}

    def measure(node: str) -> int:
        if node not in height:
            below = [measure(target) for target in graph.get(node, ())]
            height[node] = 1 + max(below, default=-1)
        return height[node]

    top = max((measure(node) for node in graph), default=-1)
    return [sorted(n for n in graph if height[n] == level) for level in range(top + 1)]


def reduced(graph: Graph) -> dict[str, set[str]]:
    """The graph without the arrows that a longer path implies."""

    def reach(node: str) -> set[str]:
        seen: set[str] = set()
        todo = [node]
        while todo:
            for target in graph.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    below = {node: reach(node) for node in graph}
    kept: dict[str, set[str]] = {}
    for node, targets in graph.items():
        implied: set[str] = set().union(*(below.get(target, set()) for target in targets))
        kept[node] = set(targets) - implied
    return kept


def drawing(graph: Graph) -> str:
    """A Mermaid flowchart: a row of boxes for each layer, the top layer first."""
    lines = ["```mermaid", "flowchart TD"]
    for level, names in reversed(list(enumerate(layers(graph)))):
        lines.append(f'  subgraph L{level}[" "]')
        lines += [f"    {name}" for name in names]
        lines.append("  end")
    for name, targets in sorted(reduced(graph).items()):
        lines += [f"  {name} --> {target}" for target in sorted(targets)]
    return "\n".join([*lines, "```"])


def document_with_drawings(text: str) -> str:
    """`text` with what stands between each pair of markers made anew. Raises ValueError without
    them."""
    for package, folder in PACKAGES.items():
        begin = f"<!-- imports of {package}: python tools/import_graph.py -->"
        end = f"<!-- end of the imports of {package} -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not found_begin or not found_end:
            raise ValueError(f"{DOCUMENT.name} has no markers for the imports of {package}")
        text = f"{before}{begin}\n\n{drawing(parts(imports(folder)))}\n\n{end}{after}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    check: bool = parser.parse_args().check
    failed = False
    for package, folder in PACKAGES.items():
        graph = imports(folder)
        found = circles(graph)
        edges = sum(len(targets) for targets in graph.values())
        print(f"{package}: {len(graph)} modules, {edges} imports, {len(found)} circles")
        for group in found:
            failed = True
            print(f"  circle: {' '.join(group)}")
    if failed:
        return 1
    wanted = document_with_drawings(DOCUMENT.read_text())
    if wanted != DOCUMENT.read_text():
        print(f"{DOCUMENT.relative_to(ROOT)} {'is stale' if check else 'rewritten'}")
        if check:
            return 1
        DOCUMENT.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
