"""The layers of the kernel package: imports run one way, and light modules load no framework."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.child import IMPORT_PATH

PACKAGE = Path(__file__).parents[2] / "kernel" / "python" / "radix_kernels"
FILES = sorted(PACKAGE.rglob("*.py"))

# Lower may not import higher; within a layer modules may import each other, but in no circle. A
# name is a module or a folder of the package.
LAYERS = (
    ("_hip", "_loader", "_arrays", "_not_tensor", "_op_spec", "_ops", "_choices"),
    ("logit_edits", "_exports", "gating", "weight_kinds"),
    ("_checks",),
    ("reference",),
    ("triton",),
    ("_lazy",),
    ("_dispatch",),
    (
        "_products", "activation", "attention", "codes_layout", "comm", "decoder", "formats", "fp8",
        "fused_rope", "gemm", "gguf_blocks", "grouped_gemm", "kv_cache", "linear", "mla", "moe",
        "merged_weight", "norm", "packed_experts", "packed_heads", "packed_weight",
        "persistent_decoder", "quantize", "quantize_int8", "rope", "sampling",
        "sampling_shards", "stacked_experts", "step", "threads", "unpacked_weight", "weight_form",
        "weight_stack",
    ),
    ("capabilities",),
    ("",),  # the package itself
    ("torch_ops", "selftest"),
)  # fmt: skip
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# What imports torch or Triton at once. Everything else loads them when they are first used.
HEAVY = {"reference", "triton", "torch_ops", "selftest"}
# An import of the package in a function, because it loads what most callers do not need.
HIDDEN = {("comm", "reference.comm")}


def module_name(file: Path) -> str:
    """Dotted name below the package; '' for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def exists(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def package_imports(tree: ast.AST, name: str, is_package: bool) -> list[tuple[str, int]]:
    """(module below the package, line) of every import of the package, wherever it stands."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "radix_kernels":
                    found.append((alias.name.partition(".")[2], node.lineno))
        elif isinstance(node, ast.ImportFrom):
            target = _target(node, name, is_package)
            if target is not None:
                found += [(module, node.lineno) for module in _modules(target, node)]
    return found


def _target(node: ast.ImportFrom, name: str, is_package: bool) -> str | None:
    """The module or package that is imported from; None: it is not of this package."""
    module = node.module or ""
    if node.level == 0:
        top, _, below = module.partition(".")
        return below if top == "radix_kernels" else None
    here = name.split(".") if name else []
    up = node.level - 1 if is_package else node.level
    base = here[: len(here) - up]
    return ".".join([*base, *filter(None, module.split("."))])


def _modules(target: str, node: ast.ImportFrom) -> list[str]:
    """`from . import x` names a module x, where there is one, and `from .x import y` x."""
    names = [f"{target}.{alias.name}".lstrip(".") for alias in node.names]
    modules = [name for name in names if exists(name)]
    if len(modules) < len(names):
        modules.append(target)
    return modules


def layer_name(module: str) -> str:
    """The name by which RANK has a module."""
    return module.split(".")[0]


def violations(source: str, name: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of a module."""
    if layer_name(name) not in RANK:
        return [f"{name}: {layer_name(name)!r} has no place in the layers"]
    tree = ast.parse(source)
    wrong = []
    for target, line in package_imports(tree, name, is_package):
        if layer_name(target) not in RANK:
            wrong.append(f"{name}:{line} imports {target!r}, which has no place in the layers")
        elif RANK[layer_name(target)] > RANK[layer_name(name)]:
            wrong.append(f"{name}:{line} imports upward: {target}")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for target, line in package_imports(node, name, is_package):
                if (name, target) not in HIDDEN:
                    wrong.append(f"{name}:{line} hides an import of {target} in a function")
    return wrong


def test_imports_run_one_way():
    wrong = []
    for file in FILES:
        wrong += violations(file.read_text(), module_name(file), file.name == "__init__.py")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("_ops", "from . import _loader, norm"),
        ("_checks.moe", "from ..moe import fused_experts"),
        ("_checks.moe", "import radix_kernels.moe"),
        ("reference.sampling", "from ..sampling import LogitEdits"),
        ("triton.moe", "from .._dispatch import native"),
        ("triton.moe", "def f():\n    from .._arrays import as_torch"),
        ("_dispatch", "from radix_kernels import linear"),
        ("linear", "def f():\n    from . import reference"),
        ("norm", "from . import capabilities"),
        ("norm", "from . import rmsnorm"),
        ("attic", "import os"),
    ],
)
def test_a_bad_import_is_seen(name, source):
    assert violations(source, name)


def test_good_imports_pass():
    source = "import torch\nfrom .. import reference\nfrom .._arrays import as_torch"
    assert not violations(source, "triton.mla")
    assert not violations("from . import _arrays, _dispatch\nfrom ._lazy import torch", "norm")


def import_graph() -> dict[str, set[str]]:
    graph = {}
    for file in FILES:
        name = module_name(file)
        found = package_imports(ast.parse(file.read_text()), name, file.name == "__init__.py")
        graph[name] = {target for target, _ in found if target != name}
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle, [] where there is none."""
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in finished or name not in graph:
            return []
        for target in sorted(graph[name]):
            circle = visit(target, [*path, name])
            if circle:
                return circle
        finished.add(name)
        return []

    for name in graph:
        circle = visit(name, [])
        if circle:
            return circle
    return []


def test_no_import_circle():
    circle = circle_in(import_graph())
    assert not circle, " -> ".join(circle)


def test_a_circle_is_seen():
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_every_layer_exists():
    names = {layer_name(module_name(file)) for file in FILES}
    assert names == set(RANK)


def test_light_modules_load_no_framework():
    light = [module_name(file) for file in FILES if layer_name(module_name(file)) not in HEAVY]
    code = (
        "import sys, importlib\n"
        f"for name in {light!r}:\n"
        "    importlib.import_module('.'.join(filter(None, ['radix_kernels', name])))\n"
        "    bad = {'torch', 'triton', 'numpy'} & set(sys.modules)\n"
        "    assert not bad, f'{name} loads {bad}'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": IMPORT_PATH, "PATH": "/usr/bin"},
    )
    assert result.returncode == 0, result.stderr.strip().splitlines()[-1]
