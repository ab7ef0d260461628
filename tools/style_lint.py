"""Rules of style that ruff does not have: `python tools/style_lint.py [PATH ...]`.

Each rule keeps a line to one statement of fact, so that a reader never has to unpack it:

    packed-assignment   three or more values assigned to three or more names at once
    positional-fields   a class called with three or more positional arguments, or with `*fields`
    boolean-number      a comparison or `not` used as a number: in arithmetic, `+=` or `sum`
    hidden-walrus       `:=` inside a comprehension or the arguments of a call
    long-function       more than 50 lines, its docstring not counted
    long-file           more than 400 lines

Line length and cyclomatic complexity are ruff's. Device code of Triton is exempt: its language has
neither keyword constructors nor branches on booleans. Exit status 1 if anything was found.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50
MAX_FIELDS = 2  # positional arguments of a constructor

DEFAULT_PATHS = ("runtime", "kernel/python", "bench", "tests", "tools", "examples")
# Functions whose names are capitalised, and classes whose arguments are a sequence, not fields.
SEQUENCES = frozenset(
    {"Path", "PurePosixPath", "Counter", "ChainMap", "Sequential", "Server", "Terminal"}
)
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Finding:
    """What a rule has found, and where."""

    line: int
    rule: str
    message: str


def check_source(source: str) -> list[Finding]:
    """Findings in one file, in the order of their lines."""
    tree = ast.parse(source)
    exempt = set(_device_code(tree))
    findings = list(_check_length(source))
    for node in ast.walk(tree):
        if node not in exempt:
            findings += _check_node(node)
    return sorted(findings, key=lambda finding: finding.line)


def _check_node(node: ast.AST) -> Iterator[Finding]:
    if isinstance(node, ast.Assign):
        yield from _check_assignment(node)
    elif isinstance(node, ast.Call):
        yield from _check_call(node)
    elif isinstance(node, ast.AugAssign | ast.BinOp):
        yield from _check_arithmetic(node)
    elif isinstance(node, COMPREHENSIONS):
        yield from _check_walrus(ast.iter_child_nodes(node), "a comprehension")
    elif isinstance(node, Function):
        yield from _check_function(node)


def _check_length(source: str) -> Iterator[Finding]:
    count = len(source.splitlines())
    if count > MAX_FILE_LINES:
        message = f"{count} lines, {MAX_FILE_LINES} at most: split the file by concept"
        yield Finding(line=1, rule="long-file", message=message)


def _check_assignment(node: ast.Assign) -> Iterator[Finding]:
    value = node.value
    for target in node.targets:
        if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
            continue
        if len(target.elts) >= 3 and len(value.elts) >= 3:
            message = f"{len(value.elts)} values assigned at once: one line each"
            yield Finding(line=node.lineno, rule="packed-assignment", message=message)


def _check_call(node: ast.Call) -> Iterator[Finding]:
    yield from _check_walrus([*node.args, *node.keywords], "a call")
    name = _called_name(node)
    if name == "sum" and node.args and isinstance(node.args[0], ast.GeneratorExp | ast.ListComp):
        if _is_boolean(node.args[0].elt):
            message = "sum() of comparisons: count the matches, `sum(1 for ... if ...)`"
            yield Finding(line=node.lineno, rule="boolean-number", message=message)
    if not _is_class_name(name) or name in SEQUENCES:
        return
    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    if starred or len(node.args) > MAX_FIELDS:
        yield Finding(
            line=node.lineno, rule="positional-fields", message=f"{name}(...): name its fields"
        )


def _check_arithmetic(node: ast.AugAssign | ast.BinOp) -> Iterator[Finding]:
    if not isinstance(node.op, ARITHMETIC):
        return
    operands = [node.value] if isinstance(node, ast.AugAssign) else [node.left, node.right]
    if any(_is_boolean(operand) for operand in operands):
        message = "a boolean used as a number: write the condition out"
        yield Finding(line=node.lineno, rule="boolean-number", message=message)


def _check_walrus(roots: Iterable[ast.AST], where: str) -> Iterator[Finding]:
    for root in roots:
        for node in ast.walk(root):
            if isinstance(node, ast.NamedExpr):
                yield Finding(line=node.lineno, rule="hidden-walrus", message=f":= inside {where}")


def _check_function(node: Function) -> Iterator[Finding]:
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        docstring = node.body[0]
        assert docstring.end_lineno is not None
        lines -= docstring.end_lineno - docstring.lineno + 1
    if lines > MAX_FUNCTION_LINES:
        message = f"{node.name} has {lines} lines, {MAX_FUNCTION_LINES} at most"
        yield Finding(line=node.lineno, rule="long-function", message=message)


def _called_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_class_name(name: str) -> bool:
    name = name.lstrip("_")
    return name[:1].isupper() and any(letter.islower() for letter in name)


def _is_boolean(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.BoolOp):
        return all(_is_boolean(value) for value in node.values)
    return isinstance(node, ast.Compare)


def _device_code(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, Function) and any(_is_triton(mark) for mark in node.decorator_list):
            yield from ast.walk(node)


def _is_triton(decorator: ast.expr) -> bool:
    """`@triton.jit` and its kin: `@jit`, `@triton.heuristics(...)`."""
    return "triton" in ast.unparse(decorator) or ast.unparse(decorator) == "jit"


def python_files(paths: Iterable[str]) -> Iterator[Path]:
    """Files as given, and every Python file below the folders."""
    for path in map(Path, paths):
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main(arguments: list[str]) -> int:
    found = 0
    for path in python_files(arguments or DEFAULT_PATHS):
        for finding in check_source(path.read_text()):
            print(f"{path}:{finding.line}: {finding.rule}: {finding.message}")
            found += 1
    print(f"{found} findings" if found else "style: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
