"""The walls of the runtime: imports run one way, light modules stay light, files stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.child import IMPORT_PATH

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "runtime" / "radix_runtime"
FILES = sorted(PACKAGE.rglob("*.py"))

# Lower may not import higher. A room is a file or folder of the package; what is not here is base.
ORDER = (
    ("ops", "device"),
    ("distributed",),
    ("memory",),
    ("batch",),
    ("quantization",),
    ("attention",),
    ("layers",),
    ("models",),
    ("engine",),
    ("scheduler",),
    ("server",),
    ("engine_api",),
    ("cli", "__main__"),
)
BASE = set(
    "cache_spec config errors log hf messages model_config processes registry sampling_params"
    " step_plan".split()
)
RANK = {room: rank for rank, rooms in enumerate(ORDER, 1) for room in rooms} | dict.fromkeys(
    BASE, 0
)
TORCH_FREE = [*sorted(BASE), "memory.page_allocator", "memory.radix_cache", "scheduler.policy"]
RUNS_THE_ENGINE = {"server.scheduler_process"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_TOTAL_LINES = 6500  # neither comments nor blank lines
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
BANNED_ATTRIBUTES = {"recv_pyobj", "send_pyobj"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}


def module_name(file: Path) -> str:
    """Dotted name below the package; '' for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def in_package_imports(tree: ast.AST, name: str, is_package: bool) -> list[tuple[str, int]]:
    """(dotted module below the package, line) of every in-package import, wherever it stands."""
    here = name.split(".") if name else []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names if a.name.split(".")[0] == "radix_runtime"]
            found += [(n.removeprefix("radix_runtime").lstrip("."), node.lineno) for n in names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                up = node.level - is_package
                base = here[: len(here) - up] if up else here
            elif (node.module or "").split(".")[0] == "radix_runtime":
                base = []
            else:
                continue
            module = (node.module or "").removeprefix("radix_runtime").lstrip(".")
            target = [*base, *(module.split(".") if module else [])]
            # `from . import x` names a module, `from .x import y` an attribute of one
            names = [".".join([*target, a.name]) for a in node.names] if not module else None
            found += [(n, node.lineno) for n in names or [".".join(target)]]
    return found


def violations(source: str, name: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of a module."""
    tree = ast.parse(source)
    room = name.split(".")[0]
    if room not in RANK:
        return [f"{name}: the room {room!r} has no place in the order"]
    wrong = []
    for target, line in in_package_imports(tree, name, is_package):
        first = target.split(".")[0]
        rank = 0 if first.startswith("__") and first not in RANK else RANK.get(first)
        if rank is None:
            wrong.append(f"{name}:{line} imports {target!r}, which has no place in the order")
        elif rank > RANK[room]:
            wrong.append(f"{name}:{line} imports upward: {target}")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            hidden = in_package_imports(node, name, is_package)
            wrong += [f"{name}:{line} hides an import of {t} in a function" for t, line in hidden]
    return wrong


def test_imports_run_one_way() -> None:
    wrong = []
    for file in FILES:
        if file != PACKAGE / "__init__.py":  # the package's door: loads Engine when asked for it
            name = module_name(file)
            wrong += violations(file.read_text(), name, file.name == "__init__.py")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("batch", "from .layers.linear import QKVLinear"),
        ("batch", "from . import layers"),
        ("memory.kv_pool", "from ..batch import ForwardBatch"),
        ("memory.kv_pool", "import radix_runtime.batch"),
        ("memory.kv_pool", "from radix_runtime.batch import ForwardBatch"),
        ("errors", "if x:\n    from .ops import linear"),
        ("server.api", "def f():\n    from ..errors import RequestError"),
        ("attic.junk", "import os"),
        ("batch", "from .attic import junk"),
    ],
)
def test_a_bad_import_is_seen(name: str, source: str) -> None:
    assert violations(source, name)


def test_a_good_import_passes() -> None:
    source = "from .. import ops, __version__\nfrom ..batch import F\nfrom .base import x"
    assert not violations(source, "attention.radix")


def test_no_import_cycle() -> None:
    graph = {}
    for file in FILES:
        if file == PACKAGE / "__init__.py":
            continue
        name = module_name(file)
        tree = without_type_imports(ast.parse(file.read_text()))
        found = in_package_imports(tree, name, file.name == "__init__.py")
        graph[name] = {target for target, _ in found}
    state: dict[str, int] = {}

    def visit(name: str, path: list[str]) -> None:
        assert state.get(name) != 1, "import cycle: " + " -> ".join([*path, name])
        if name in state or name not in graph:
            return
        state[name] = 1
        for target in graph[name]:
            visit(target, [*path, name])
        state[name] = 2

    for name in graph:
        visit(name, [])


def without_type_imports(tree: ast.Module) -> ast.Module:
    """Without what stands under `if TYPE_CHECKING:`, which never runs."""

    def runs(node: ast.stmt) -> bool:
        return not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"))

    return ast.Module([node for node in tree.body if runs(node)], [])


def test_only_ops_imports_the_kernel_wheel() -> None:
    pattern = re.compile(r"^\s*(import|from)\s+radix_kernels\b", re.M)
    found = [str(f) for f in FILES if pattern.search(f.read_text())]
    assert found == [str(PACKAGE / "ops.py")]


def test_light_modules_do_not_load_torch() -> None:
    server = {module_name(f) for f in FILES if f.parent == PACKAGE / "server"} - RUNS_THE_ENGINE
    names = [n for n in [*TORCH_FREE, *sorted(server)] if exists(n)]
    code = (
        "import sys, importlib\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module('radix_runtime.' + name)\n"
        "    bad = {'torch', 'transformers', 'radix_kernels'} & set(sys.modules)\n"
        "    assert not bad, f'{name} loads {bad}'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": IMPORT_PATH, "PATH": "/usr/bin"},
        check=False,
    )
    assert result.returncode == 0, result.stderr.strip().splitlines()[-1]


def exists(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_files_and_functions_are_small() -> None:
    wrong = []
    for file in FILES:
        text = file.read_text()
        if (lines := text.count("\n")) > MAX_FILE_LINES:
            wrong.append(f"{file} has {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    wrong.append(f"{file}:{node.lineno} {node.name} has {length} lines")
    assert not wrong, "\n".join(wrong)


def test_the_runtime_is_lean() -> None:
    lines = [line for file in FILES for line in file.read_text().splitlines()]
    counted = sum(1 for line in lines if not re.match(r" *(#|$)", line))
    assert counted < MAX_TOTAL_LINES


def banned(source: str) -> list[str]:
    """Code that turns bytes into behaviour."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in BANNED_MODULES]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            if (node.module or "").split(".")[0] in BANNED_MODULES:
                found.append(str(node.module))
            found += [f"{node.module}.{a.name}" for a in node.names if is_torch_load(node, a.name)]
        elif isinstance(node, ast.Attribute):
            if node.attr in BANNED_ATTRIBUTES:
                found.append(node.attr)
            if (
                node.attr == "load"
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch"
            ):
                found.append("torch.load")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += [node.func.id] if node.func.id in BANNED_CALLS else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


def is_torch_load(node: ast.ImportFrom, name: str) -> bool:
    return node.module == "torch" and name == "load"


def test_nothing_deserialises_code() -> None:
    wrong = [f"{f}: {name}" for f in FILES for name in banned(f.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import marshal as m",
        "from dill import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "s.recv_pyobj()",
        "eval('1')",
        "exec(code)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_banned_code_is_seen(source: str) -> None:
    assert banned(source)


def test_eval_mode_of_a_module_is_not_banned() -> None:
    assert not banned("model.eval()\nre.compile('x')")
