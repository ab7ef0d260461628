"""tools/style_lint.py: every rule with a source that breaks it, and a near one that does not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "style_lint.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("style_lint", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


style_lint = load_script()


def rules(source: str) -> list[str]:
    return [finding.rule for finding in style_lint.check_source(source)]


def function(lines: int, head: str = "def f():") -> str:
    """A function of so many lines, its head included."""
    return "\n".join([head, *["    pass"] * (lines - 1)])


BAD = [
    ("packed-assignment", "a, b, c = 1, 2, 3"),
    ("packed-assignment", "self.a, self.b, self.c = a, b, c"),
    ("packed-assignment", "x = a, b, c = 1, 2, 3"),
    ("packed-assignment", "a, b, c, d = 1, *rest, 2"),
    ("positional-fields", "Request(1, 2, 3)"),
    ("positional-fields", "messages.Request(1, 2, 3)"),
    ("positional-fields", "_Call(1, 2, 3)"),
    ("positional-fields", "Request(*fields)"),
    ("positional-fields", "Request(1, 2, 3, name=4)"),
    ("boolean-number", "count += x > 0"),
    ("boolean-number", "count -= not done"),
    ("boolean-number", "shown *= x is None"),
    ("boolean-number", "y = 1 + (x > 0)"),
    ("boolean-number", "y = '.chunk' * (a == b and c == d)"),
    ("boolean-number", "n = sum(x > 0 for x in xs)"),
    ("boolean-number", "n = sum([x is None for x in xs])"),
    ("hidden-walrus", "y = [z for x in xs if (z := f(x))]"),
    ("hidden-walrus", "y = {(z := f(x)): z for x in xs}"),
    ("hidden-walrus", "f(y := 1)"),
    ("hidden-walrus", "f(key=(y := 1))"),
    ("long-function", function(51)),
    ("long-function", function(51, "async def f():")),
    ("long-file", "pass\n" * 401),
]
GOOD = [
    "a, b = b, a",
    "a, b, c = values",
    "a = b = c = 0",
    "x = a, b, c",
    "for a, b, c in rows: pass",
    "Request(1, 2)",
    "Request(rid=1, ids=2, n=3)",
    "Request(1, 2, n=3, **options)",
    "Path('a', 'b', 'c')",
    "Sequential(*layers)",
    "request(1, 2, 3)",
    "MAX(1, 2, 3)",
    "count += 1 if x > 0 else 0",
    "n = sum(1 for x in xs if x > 0)",
    "n = sum(x.size for x in xs)",
    "y = a | (b > 0)",
    "done |= x > 0",
    "y = (a or 0) + 1",
    "if (y := f()) is not None: pass",
    "while y := f(): pass",
    "y = [x for x in xs if x]",
    function(50),
    "def f():\n    '''One.\n\n    Two.\n    '''\n" + "    pass\n" * 49,
    "pass\n" * 400,
]


@pytest.mark.parametrize(("rule", "source"), BAD)
def test_a_break_is_found_once(rule: str, source: str) -> None:
    assert rules(source) == [rule]


@pytest.mark.parametrize("source", GOOD)
def test_what_is_near_passes(source: str) -> None:
    assert rules(source) == []


def test_every_rule_of_the_docstring_is_tried() -> None:
    listed = {line.split()[0] for line in style_lint.__doc__.splitlines() if line[:4] == "    "}
    assert listed == {rule for rule, _ in BAD}


@pytest.mark.parametrize("mark", ["@triton.jit", "@jit", "@triton.heuristics({})\n@triton.jit"])
def test_device_code_of_triton_is_exempt(mark: str) -> None:
    body = "def kernel(a):\n    a, b, c = 1, 2, 3\n    return a + (b > c)\n"
    assert rules(f"{mark}\n{body}") == []
    assert rules(f"@other\n{body}") == ["packed-assignment", "boolean-number"]


def test_the_command_names_places_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "good.py").write_text("x = 1\n")
    assert style_lint.main([str(tmp_path)]) == 0
    (folder / "bad.py").write_text("x = 1\nf(y := 1)\n")
    capsys.readouterr()
    assert style_lint.main([str(tmp_path)]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first == f"{folder / 'bad.py'}:2: hidden-walrus: := inside a call"
