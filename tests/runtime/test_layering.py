"""The layers of the runtime: imports run one way, light modules load neither torch nor kernels."""

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

# A part is a file or folder of the package. A part may import its own layer and those before it.
BASE = (
    "cache_spec",
    "channel",
    "checkpoint",
    "config",
    "config_values",
    "constraint",
    "errors",
    "families",
    "gguf",
    "hub",
    "log",
    "messages",
    "model_config",
    "progress",
    "registry",
    "sampling_params",
    "shortcuts",
    "signals",
    "spawn",
    "specs",
    "step_plan",
    "step_shape",
    "step_times",
    "suggestions",
)
ORDER = (
    BASE,
    ("text",),
    ("grammar",),
    ("server",),
    ("ops", "device"),
    ("distributed",),
    ("memory",),
    ("batch_layout",),
    ("batch",),
    ("quantization",),
    ("attention",),
    ("layers",),
    ("models",),
    ("engine",),
    ("scheduler",),
    ("prepare", "start_log"),
    ("offline", "offline_chat", "offline_loop", "offline_requests", "offline_settings"),
    ("processes",),
    ("cli",),
)
# HTTP stands early in the order, and yet only the processes and the command line may import it.
HTTP = "server"
MAY_IMPORT_HTTP = (HTTP, "processes", "cli")
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}
TORCH_FREE = [
    *BASE,
    "prepare",
    "start_log",
    "memory.page_allocator",
    "memory.radix_cache",
    "scheduler.policy",
]
TORCH_FREE_PACKAGES = ("text", "grammar", "server", "processes")
RUNS_THE_ENGINE = {"processes.scheduler"}
# What stays out of the caller's process when it imports `Engine`.
NOT_OFFLINE = ("radix_runtime.server", "radix_runtime.processes", "uvicorn", "fastapi", "zmq")
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
BANNED_ATTRIBUTES = {"recv_pyobj", "send_pyobj"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}


def module_name(file: Path) -> str:
    """Dotted name below the package; '' for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def in_package_imports(tree: ast.AST, name: str, is_package: bool) -> list[tuple[str, int]]:
    """(dotted module below the package, line) of every in-package import, wherever it stands.

    `name` is the importing module's.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "radix_runtime":
                    found.append((below_package(alias.name), node.lineno))
        elif isinstance(node, ast.ImportFrom):
            module = imported_module(node, name, is_package)
            if module is None:
                continue
            if node.module is None or node.module == "radix_runtime":  # the names are modules
                for alias in node.names:
                    target = f"{module}.{alias.name}" if module else alias.name
                    found.append((target, node.lineno))
            else:
                found.append((module, node.lineno))
    return found


def imported_module(node: ast.ImportFrom, name: str, is_package: bool) -> str | None:
    """What stands between `from` and `import`, below the package; None if it is not in it."""
    module = node.module or ""
    if node.level == 0:
        return below_package(module) if module.split(".")[0] == "radix_runtime" else None
    # A package is one level below its own name: `from . import x` in it means a part of it.
    parents = name.split(".") if name else []
    levels_up = node.level - 1 if is_package else node.level
    kept = parents[: len(parents) - levels_up]
    return ".".join([*kept, module] if module else kept)


def below_package(module: str) -> str:
    return module.removeprefix("radix_runtime").lstrip(".")


def violations(source: str, name: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of a module."""
    tree = ast.parse(source)
    part = name.split(".")[0]
    if part not in RANK:
        return [f"{name}: {part!r} has no place in the order"]
    wrong = []
    for target, line in in_package_imports(tree, name, is_package):
        first = target.split(".")[0]
        if first.startswith("__"):  # an attribute of the package, as __version__
            continue
        rank = RANK.get(first)
        if rank is None:
            wrong.append(f"{name}:{line} imports {target!r}, which has no place in the order")
        elif rank > RANK[part]:
            wrong.append(f"{name}:{line} imports upward: {target}")
        elif first == HTTP and part not in MAY_IMPORT_HTTP:
            wrong.append(f"{name}:{line} imports HTTP: {target}")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            hidden = in_package_imports(node, name, is_package)
            wrong += [f"{name}:{line} hides an import of {t} in a function" for t, line in hidden]
    return wrong


def test_imports_run_one_way() -> None:
    wrong = []
    for file in FILES:
        if file != PACKAGE / "__init__.py":  # it loads Engine when asked for it
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
        ("server.api", "from ..processes.ipc import Sender"),
        ("server.api", "from ..scheduler.scheduler import Scheduler"),
        ("text.choices", "from ..server.protocol import Body"),
        ("offline", "from .server.protocol import Body"),
        ("offline", "from .processes.ipc import Sender"),
        ("scheduler.intake", "from ..server.protocol import Body"),
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

    return ast.Module(body=[node for node in tree.body if runs(node)], type_ignores=[])


def test_only_ops_imports_the_kernel_wheel() -> None:
    pattern = re.compile(r"^\s*(import|from)\s+radix_kernels\b", re.M)
    found = [str(f) for f in FILES if pattern.search(f.read_text())]
    assert found == [str(PACKAGE / "ops.py")]


def test_light_modules_do_not_load_torch() -> None:
    light = {module_name(f) for f in FILES if f.parent.name in TORCH_FREE_PACKAGES}
    names = [n for n in [*TORCH_FREE, *sorted(light - RUNS_THE_ENGINE)] if exists(n)]
    code = (
        "import sys, importlib\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module('radix_runtime.' + name)\n"
        "    bad = {'torch', 'transformers', 'radix_kernels'} & set(sys.modules)\n"
        "    assert not bad, f'{name} loads {bad}'\n"
    )
    assert_runs(code)


def test_the_engine_needs_neither_http_nor_processes() -> None:
    assert_runs(
        "import sys\n"
        "from radix_runtime import Engine\n"
        f"bad = {set(NOT_OFFLINE)!r} & set(sys.modules)\n"
        "assert not bad, f'Engine loads {bad}'\n"
    )


def assert_runs(code: str) -> None:
    """This code raises nothing in a Python of its own."""
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
