"""How dense Python code is, for any trees: `python tools/code_figures.py PATH [PATH ...]`.

A row for each figure, a column for each path (a folder or a file):

    code lines                  neither blank nor a comment alone; docstrings count
    characters of a code line   mean, with its indentation
    lines over 100 columns      share of the code lines
    walrus ... a, b = x, y      so many in 1,000 code lines
    3 or more at once           assignments of three or more values to as many names
    calls with *name            a local tuple or list unpacked into the arguments of a call
    lines of a function         from `def` to its last line: median, 90th percentile, largest
    McCabe over 10              functions with more than ten ways through them, as ruff counts
    documented                  public functions and methods with a docstring, of all
"""

import ast
import io
import statistics
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_COLUMNS = 100
MAX_COMPLEXITY = 10
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Figures:
    """Counts over one or more files."""

    line_lengths: list[int] = field(default_factory=list)
    walrus: int = 0
    comprehensions: int = 0
    ternaries: int = 0
    packed: int = 0
    packed_three: int = 0
    starred_calls: int = 0
    function_lengths: list[int] = field(default_factory=list)
    complex_functions: int = 0
    public: int = 0
    documented: int = 0

    def add(self, source: str) -> None:
        """Counts one file. Raises SyntaxError for what is no Python."""
        tree = ast.parse(source)
        self.line_lengths += code_line_lengths(source)
        for node in ast.walk(tree):
            self._add_expression(node)
            if isinstance(node, ast.Assign):
                self._add_assignment(node)
            elif isinstance(node, Function):
                self._add_function(node)
        for function in public_functions(tree):
            self.public += 1
            if ast.get_docstring(function, clean=False) is not None:
                self.documented += 1

    def _add_expression(self, node: ast.AST) -> None:
        if isinstance(node, ast.NamedExpr):
            self.walrus += 1
        elif isinstance(node, COMPREHENSIONS):
            self.comprehensions += 1
        elif isinstance(node, ast.IfExp):
            self.ternaries += 1
        elif isinstance(node, ast.Call) and any(map(_is_starred_name, node.args)):
            self.starred_calls += 1

    def _add_assignment(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                self.packed += 1
                if len(target.elts) >= 3:
                    self.packed_three += 1

    def _add_function(self, node: Function) -> None:
        assert node.end_lineno is not None
        self.function_lengths.append(node.end_lineno - node.lineno + 1)
        if complexity(node) > MAX_COMPLEXITY:
            self.complex_functions += 1

    def rows(self) -> dict[str, str]:
        """Figure -> its text."""
        count = len(self.line_lengths)
        lengths = self.function_lengths
        return {
            "code lines": f"{count:,}",
            "characters of a code line": f"{_mean(self.line_lengths):.1f}",
            f"lines over {MAX_COLUMNS} columns": f"{_long_share(self.line_lengths):.1%}",
            "walrus in 1,000 lines": _rate(self.walrus, count),
            "comprehensions in 1,000 lines": _rate(self.comprehensions, count),
            "ternaries in 1,000 lines": _rate(self.ternaries, count),
            "a, b = x, y in 1,000 lines": _rate(self.packed, count),
            "3 or more at once": str(self.packed_three),
            "calls with *name": str(self.starred_calls),
            "lines of a function": " / ".join(map(str, _spread(lengths))),
            f"McCabe over {MAX_COMPLEXITY}": str(self.complex_functions),
            "documented": f"{self.documented} of {self.public}",
        }


def code_line_lengths(source: str) -> list[int]:
    """Columns of every line that is neither blank nor a comment alone."""
    bare = set()  # lines with nothing but a comment
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            bare.add(token.start[0])
    lengths = []
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip() and number not in bare:
            lengths.append(len(line.rstrip()))
    return lengths


def complexity(function: Function) -> int:
    """Cyclomatic complexity as ruff's C901 has it: statements alone, functions inside included."""
    return 1 + sum(_branches(node) for node in ast.walk(function) if node is not function)


def _branches(node: ast.AST) -> int:
    if isinstance(node, ast.Match):
        last = node.cases[-1]
        anything = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
        return len(node.cases) - (1 if anything and last.guard is None else 0)
    if isinstance(node, ast.Try):
        return 1 if node.orelse else 0
    return 1 if isinstance(node, (*BRANCHES, *FUNCTIONS)) else 0


def public_functions(tree: ast.Module) -> Iterator[Function]:
    """Functions of a module and methods of its classes whose names, and classes' names, have no
    underscore in front."""
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    while scopes:
        for node in scopes.pop().body:
            if isinstance(node, Function) and not node.name.startswith("_"):
                yield node
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                scopes.append(node)


def _is_starred_name(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Name)


def _mean(values: list[int]) -> float:
    return statistics.fmean(values) if values else 0.0


def _long_share(lengths: list[int]) -> float:
    long = sum(1 for length in lengths if length > MAX_COLUMNS)
    return long / len(lengths) if lengths else 0.0


def _rate(count: int, lines: int) -> str:
    return f"{1000 * count / lines:.1f}" if lines else "-"


def _spread(lengths: list[int]) -> list[int]:
    """Median, 90th percentile, largest."""
    if not lengths:
        return [0, 0, 0]
    ordered = sorted(lengths)
    return [ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10], ordered[-1]]


def figures_of(path: Path) -> Figures:
    """Of a file, or of every Python file below a folder."""
    figures = Figures()
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        figures.add(file.read_text(encoding="utf-8"))
    return figures


def table(columns: dict[str, Figures]) -> Iterator[str]:
    """Lines of Markdown."""
    rows = {name: figures.rows() for name, figures in columns.items()}
    yield "| | " + " | ".join(rows) + " |"
    yield "|---|" + "--:|" * len(rows)
    for figure in Figures().rows():
        yield f"| {figure} | " + " | ".join(column[figure] for column in rows.values()) + " |"


def main(paths: Iterable[str]) -> int:
    columns = {path: figures_of(Path(path)) for path in paths}
    if not columns:
        print(__doc__)
        return 2
    empty = [path for path, figures in columns.items() if not figures.line_lengths]
    if empty:
        print(f"no Python in {', '.join(empty)}", file=sys.stderr)
        return 1
    print("\n".join(table(columns)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
